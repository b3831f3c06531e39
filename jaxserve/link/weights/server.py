"""The end of a running worker of a weights channel: hands out parts of its weights, read-only.

Workers that start, or that lack an expert, connect and ask for parts. A thread for each reads them
from the holder of the weights, keeps the rate, and sends them. `client.py` is the
other end. Knows neither models nor meshes.
"""

import logging
import threading
import time
from typing import ClassVar, Protocol

import numpy as np

from jaxserve.link.session.channel import DEFAULT_DEADLINES, Channel
from jaxserve.link.session.hello import Hello
from jaxserve.link.session.listener import Listener, listen
from jaxserve.link.session.messages import Bulk, Failed, Join, Ready, encode
from jaxserve.link.session.served import ServedSession
from jaxserve.link.weights import frames

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
IDLE_SECONDS = 60.0
"""Idle time after which a connection is closed; a worker that wants more dials again."""


class HoldsWeights(Protocol):
    """Holder of the weights. Any thread may call it."""

    def held(self) -> frames.Held:
        """The arrays that are here whole."""

    def warm_up(self) -> None:
        """Gets ready for reads, so that the first ones are as quick as others."""

    def read(self, block: str, leaf: str, ranges: frames.Ranges) -> np.ndarray:
        """The bytes of a part, row by row; waits for them.

        Raises:
          ValueError: there is no such part here.
        """


class Pace:
    """Lets a number of bytes a second pass, over all connections that share it."""

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
    ):
        self._address, self._token = address, token
        self.hello, self.holder = hello, holder
        self.pace = Pace(bytes_per_second)
        self._warming = threading.Thread(target=holder.warm_up, name="weights", daemon=True)
        serve, seconds = lambda channel: _Reader(self, channel).live(), DEFAULT_DEADLINES.handshake
        self._listener = Listener("weights", token, serve, most=MOST_CONNECTIONS, seconds=seconds)

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


class _Reader(ServedSession):
    """One connected worker that reads."""

    greeting = Join

    def __init__(self, server: WeightsServer, channel: Channel):
        super().__init__("weights", channel, server.hello, DEFAULT_DEADLINES)
        self._server = server
        self._bytes = 0  # sent

    def _admit(self, join: Join) -> frames.Welcome:
        return frames.Welcome(self._hello, self._server.holder.held())

    def _limit(self) -> float:
        """Seconds without a read: this link has no signs of life."""
        return IDLE_SECONDS if self.name else super()._limit()

    def _give(self, read: frames.Read) -> None:
        """Sends a part, or why there is none."""
        try:
            part = self._server.holder.read(read.block, read.leaf, read.ranges)
        except (ValueError, RuntimeError) as error:
            return self.send(Failed(read.number, str(error)))
        self._server.pace.take(part.nbytes)
        self._channel.send(encode(Ready(read.number, Bulk(part.nbytes, None))), [memoryview(part)])
        self._bytes += part.nbytes

    def end(self) -> None:
        """See `ServedSession`."""
        super().end()
        logger.info("weights: %s got %.1f MB", self._channel.peer, self._bytes / 1e6)

    handlers: ClassVar = {frames.Read: _give}
