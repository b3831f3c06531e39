"""The end of a session that listens: two threads, of which one reads frames and the other works off
what they ask for. Base of the servers of all links."""

import abc
import logging
import queue
import threading
from typing import Any

import msgspec

from jaxserve.link.session.channel import Channel, Deadlines, cut_off
from jaxserve.link.session.hello import Hello, Refusal
from jaxserve.link.session.messages import Greeting, Refused, greeted
from jaxserve.link.session.session import Session

logger = logging.getLogger(__name__)


class ServedSession[Wanted](Session, abc.ABC):
    """A session of the end that listens. One thread reads, another works off what is asked for, in
    order.

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
        self._wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        """Orders to work off; None ends the work."""

    @abc.abstractmethod
    def _admit(self, join: Any) -> Greeting:
        """Takes the other end in, whose hello fits, and returns the answer; raises Refusal if it is
        to come back later, or never."""

    @abc.abstractmethod
    def _work(self) -> None:
        """Works off what is wanted until None comes, on a thread of its own."""

    def live(self) -> None:
        """Runs from the hello to the connection's loss."""
        worker, link = None, self._link
        try:
            with cut_off(
                lambda: self.fail("the handshake took too long"), self._deadlines.handshake
            ):
                if not self._welcome():
                    return
            made = threading.Thread(target=self._work, name=f"{link} {self.name}", daemon=True)
            made.start()
            worker = made
            self.read()
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
            join = greeted(self.decode(self._channel.receive()), self.greeting, self._hello)
            self.name = join.hello.worker
            answer = self._admit(join)
        except Refusal as error:
            if not error.later:
                logger.warning("%s: refused %s: %s", self._link, self._channel.peer, error)
            self.send(Refused(str(error), error.later))
            return False
        self.send(answer)
        logger.info("%s: %s joins from %s", self._link, self.name, self._channel.peer)
        return True
