"""One accepted connection of a link's server, from the join of the other end to its loss.

Base of the connections of `link/remote/server.py` and `link/pages/server.py`. Two threads share a
connection: one reads frames, the other works off what they ask for, in order.
"""

import abc
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from jaxserve.clock import AwakeClock
from jaxserve.link.session.channel import (
    LONGEST_TICK_SECONDS,
    TICK_SECONDS,
    Channel,
    Deadlines,
    cut_off,
)
from jaxserve.link.session.hello import Greeting, Hello, Refusal, Refused, greeted

logger = logging.getLogger(__name__)


class ServedConnection[Wanted](abc.ABC):
    """A connection of a worker at the other end.

    Args:
      link: name of the link, for logs.
      channel: the authenticated channel.
      hello: introduction of this worker; the other end must fit it.
      join: class of the other end's first frame.
      encode, decode: make bytes of a frame, and a frame of the other end's bytes.
    """

    def __init__(
        self,
        link: str,
        channel: Channel,
        hello: Hello,
        join: type[Greeting],
        encode: Callable[[msgspec.Struct], bytes],
        decode: Callable[[bytes], object],
        deadlines: Deadlines,
    ):
        self.failure: str | None = None
        self.name = ""
        """Name of the worker at the other end, once it has joined."""
        self._link, self._channel, self._hello, self._join = link, channel, hello, join
        self._encode, self._decode, self._deadlines = encode, decode, deadlines
        self._failing = threading.Lock()
        self._wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        """Orders to work off; None ends the work."""

    @abc.abstractmethod
    def _admit(self, frame: Any) -> bool:
        """Takes the other end in, whose hello fits, or answers why not."""

    @abc.abstractmethod
    def _take(self, frame: Any) -> None:
        """Acts on a frame."""

    @abc.abstractmethod
    def _work(self) -> None:
        """Works off what is wanted until None comes, on a thread of its own."""

    def fail(self, reason: str) -> None:
        """Gives the connection up; the first reason counts."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        self._drop()
        self._channel.shutdown()

    def _drop(self) -> None:  # noqa: B027 (most connections have nothing in flight)
        """Drops what is in flight, before the channel closes."""

    def live(self) -> None:
        """Runs from the handshake to the connection's loss."""
        worker, link = None, self._link
        try:
            late = functools.partial(self.fail, "the handshake took too long")
            with cut_off(late, self._deadlines.handshake):
                if not self._welcome():
                    return
            worker = threading.Thread(target=self._work, name=f"{link} {self.name}", daemon=True)
            worker.start()
            self._read()
        except (EOFError, OSError) as error:
            self.fail(f"the connection closed ({error or 'end of file'})")
        except (RuntimeError, msgspec.DecodeError) as error:
            self.fail(str(error))
        finally:
            self.fail("closed here")
            if worker is not None:
                self._wanted.put(None)
                worker.join()
                logger.info("%s: %s has left: %s", link, self.name, self.failure)
            self._channel.close()

    def _welcome(self) -> bool:
        try:
            frame = greeted(self._decode(self._channel.receive()), self._join, self._hello)
        except Refusal as error:
            logger.warning("%s: refused %s: %s", self._link, self._channel.peer, error)
            self._channel.send(self._encode(Refused(str(error))))
            return False
        return self._admit(frame)

    def _read(self) -> None:
        clock = AwakeClock(LONGEST_TICK_SECONDS)
        heard = clock.now
        while self.failure is None:
            if not self._channel.wait(TICK_SECONDS):
                silent = clock.tick() - heard
                if silent > self._deadlines.down:
                    self.fail(f"silent for {silent:.1f} s")
                continue
            frame = self._decode(self._channel.receive())
            heard = clock.tick()
            if isinstance(frame, self._join):
                self.fail("joined twice")
            else:
                self._take(frame)
