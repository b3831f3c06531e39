"""The end of a session that listens. Base of the servers of all links."""

import abc
import logging
import queue
import threading
from typing import Any

import msgspec

from jaxserve.link.session.channel import Channel, Deadlines
from jaxserve.link.session.hello import Hello, Refusal
from jaxserve.link.session.messages import Greeting, Refused, greeted
from jaxserve.link.session.session import Session

logger = logging.getLogger(__name__)


class ServedSession(Session, abc.ABC):
    """A session of the end that listens, read by the thread of `live` or by `readers.py`.

    Args:
      link: name of the link, for logs.
      hello: introduction of this worker; the other end must fit it.
    """

    returns_echoes = True

    def __init__(self, link: str, channel: Channel, hello: Hello, deadlines: Deadlines):
        super().__init__(channel, deadlines)
        self.name = ""
        """Name of the worker at the other end, once it has joined."""
        self._link, self._hello = link, hello

    @abc.abstractmethod
    def _admit(self, join: Any) -> Greeting:
        """Takes the other end in, whose hello fits, and returns the answer; raises Refusal if it is
        to come back later, or never."""

    def _limit(self) -> float:
        return self._deadlines.down if self.name else self._deadlines.handshake

    def _take(self, frame: msgspec.Struct) -> None:
        """Handles a frame; the first one introduces the other end."""
        if self.name:
            return super()._take(frame)
        try:
            join = greeted(frame, self.greeting, self._hello)
            answer = self._admit(join)
        except Refusal as error:
            if not error.later:
                logger.warning("%s: refused %s: %s", self._link, self._channel.peer, error)
            self.send(Refused(str(error), error.later))
            return self.fail("refused")
        self.name = self.name or join.hello.worker
        self.send(answer)
        logger.info("%s: %s joins from %s", self._link, self.name, self._channel.peer)

    def live(self) -> None:
        """Runs from the hello to the connection's loss, on this thread."""
        try:
            self.read()
        finally:
            self.end()

    def end(self) -> None:
        """Frees the connection, once no thread reads any more."""
        self.fail("closed here")
        self._channel.close()
        if self.name:
            logger.info("%s: %s has left: %s", self._link, self.name, self.failure)


class WorkingSession[Wanted](ServedSession):
    """A session of two threads: one reads, the other works off what is asked for, in order."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        """Orders to work off; None ends the work."""

    @abc.abstractmethod
    def _work(self) -> None:
        """Works off what is wanted until None comes, on a thread of its own."""

    def read(self) -> None:
        """See `Session`."""
        worker = threading.Thread(target=self._work, name=f"{self._link} work", daemon=True)
        worker.start()
        try:
            super().read()
        finally:
            self.fail("closed here")
            self._wanted.put(None)
            worker.join()
