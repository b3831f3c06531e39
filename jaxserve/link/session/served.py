"""The end of a session that listens. Base of the servers of all links."""

import abc
import logging
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
            answer = self._admit(join := greeted(frame, self.greeting, self._hello))
        except Refusal as error:
            if not error.later:
                logger.warning("%s: refused %s: %s", self._link, self._channel.peer, error)
            self.send(Refused(str(error), error.later))
            return self.fail(f"refused: {error}")
        self.send(answer)
        self.name = self.name or join.hello.worker
        logger.info("%s: %s joins from %s", self._link, self.name, self._channel.peer)
        self._joined()

    def _joined(self) -> None:
        """Called once the answer is sent, which must be the first frame that the other end gets."""

    def end(self) -> None:
        """See `Session`. Ends that were refused are not logged: while a worker starts, its router
        tries several times a second."""
        super().end()
        level = logging.INFO if self.name else logging.DEBUG
        name = self.name or self._channel.peer
        logger.log(level, "%s: %s has left: %s", self._link, name, self.failure)
