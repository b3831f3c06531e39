"""The end of a running worker of a weights channel: hands out parts of its weights, read-only.

Workers that start, or that lack an expert, connect and ask for parts. A thread for each reads what
it asks for from the holder of the weights, keeps the rate, and sends it. `client.py` is the
other end. Knows neither models nor meshes.
"""

import logging
import threading
import time
from typing import Protocol

import msgspec
import numpy as np

from jaxserve.link.session.channel import (
    DEFAULT_DEADLINES,
    TICK_SECONDS,
    Channel,
    Deadlines,
    cut_off,
    listen,
)
from jaxserve.link.session.hello import Hello, Refusal, Refused, greeted
from jaxserve.link.session.listener import Listener
from jaxserve.link.weights import frames

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
IDLE_SECONDS = 60.0
"""Idle time after which a connection is closed; a worker that wants more dials again."""


class HoldsWeights(Protocol):
    """Holder of the weights. Any thread may call it."""

    def held(self) -> frames.Held:
        """The arrays that are here whole."""
        ...

    def warm_up(self) -> None:
        """Gets ready for reads, so that the first ones are as quick as others."""

    def read(self, block: str, leaf: str, ranges: frames.Ranges) -> np.ndarray:
        """The bytes of a part, row by row; waits for them.

        Raises:
          ValueError: there is no such part here.
        """
        ...


class Pace:
    """Lets so many bytes a second pass, over all that share it."""

    def __init__(self, bytes_per_second: float):
        self._rate = bytes_per_second
        self._free, self._lock = 0.0, threading.Lock()

    def take(self, size: int) -> None:
        """Waits until they may pass."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free)
            self._free = begin + size / self._rate
        time.sleep(begin - now)


class WeightsServer:
    """Serves any number of workers that start.

    Args:
      address: to listen on; port 0 takes a free one.
      hello: what this worker's weights are; who wants others is refused.
      token: the secret of the deployment.
      bytes_per_second: most that is sent, over all connections.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        token: str,
        holder: HoldsWeights,
        *,
        bytes_per_second: float,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ):
        self._address, self._token = address, token
        self._hello, self._holder = hello, holder
        self._pace, self._deadlines = Pace(bytes_per_second), deadlines
        self._warming = threading.Thread(target=holder.warm_up, name="weights", daemon=True)
        self._listener = Listener(
            "weights", token, self._live, most=MOST_CONNECTIONS, seconds=deadlines.handshake
        )

    def start(self) -> str:
        """Begins to serve and returns the address; raises ConfigError as `listen` does."""
        address = self._listener.start(listen(self._address, self._token))
        self._warming.start()
        return address

    def close(self, seconds: float = 5.0) -> None:
        """Ends all connections."""
        self._listener.close(seconds)
        if self._warming.is_alive():
            self._warming.join(seconds)

    def _live(self, channel: Channel) -> None:
        """From the handshake to the connection's loss."""
        try:
            if self._welcome(channel):
                self._serve(channel)
        except (EOFError, OSError, RuntimeError, msgspec.DecodeError) as error:
            logger.info("weights: a connection has ended: %s", error or "end of file")
        finally:
            channel.close()

    def _welcome(self, channel: Channel) -> bool:
        with cut_off(channel.shutdown, self._deadlines.handshake):
            try:
                greeted(frames.decode_from_starting(channel.receive()), frames.Join, self._hello)
            except Refusal as error:
                logger.warning("weights: refused %s: %s", channel.peer, error)
                channel.send(frames.encode(Refused(str(error))))
                return False
            channel.send(frames.encode(frames.Welcome(self._hello, self._holder.held())))
            return True

    def _serve(self, channel: Channel) -> None:
        begin, count, size = time.monotonic(), 0, 0
        heard = begin
        while True:
            if not channel.wait(TICK_SECONDS):
                if time.monotonic() - heard > IDLE_SECONDS:
                    break
                continue
            try:
                frame = frames.decode_from_starting(channel.receive())
            except EOFError:
                break
            heard = time.monotonic()
            if not isinstance(frame, frames.Read):
                raise RuntimeError("joined twice")
            try:
                part = self._holder.read(frame.block, frame.leaf, frame.ranges)
            except (ValueError, RuntimeError) as error:
                channel.send(frames.encode(frames.Unread(frame.number, str(error))))
                continue
            self._pace.take(part.nbytes)
            channel.send(frames.encode(frames.Ready(frame.number, part.nbytes)), [memoryview(part)])
            count, size = count + 1, size + part.nbytes
        logger.info(
            "weights: %s got %.1f MB in %d parts, %.1f s",
            *(channel.peer, size / 1e6, count, heard - begin),
        )
