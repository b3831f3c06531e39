"""The ffn worker's end of a link between runtimes: a message server.

Attention workers connect, send messages and get their answers. Each has two threads here: one
receives a message and enqueues the worker's program for it at once; the other sends answers that
were not computed by then. A program is enqueued only once its message has arrived, because device
queues are in order and a program ahead of its message would block every other domain's. So each
domain is served in the order of its notes, and domains whose messages have arrived take turns. The
server keeps only messages in flight and compiled programs (`work.py`): a lost domain is forgotten.
`client.py` is the other end. This module knows nothing of ffn, plans or requests.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.dispatch.ends import Arrays
from jaxserve.link.remote import frames
from jaxserve.link.remote.work import Preparations, Turns, Work
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Channel, Deadlines, listen
from jaxserve.link.session.hello import Hello
from jaxserve.link.session.listener import Listener
from jaxserve.link.session.messages import Bulk, encode
from jaxserve.link.session.served import ServedSession
from jaxserve.link.transports import opens

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
"""Most domains at a time."""


class MessageServer:
    """Serves messages of any number of attention workers.

    Args:
      address: address to listen on; port 0 takes a free one.
      hello: this worker's facts; attention workers with other facts are refused.
      token: the secret of the deployment.
      work: the worker; its `run` is called by one thread at a time.
      transport: name of the transport of arrays.
      deadlines: deadlines of all waits.
      on_question: answers questions of attention runtimes; called on any thread.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        token: str,
        work: Work,
        *,
        transport: str,
        deadlines: Deadlines = DEFAULT_DEADLINES,
        on_question: Callable[[bytes], bytes] = lambda data: b"",
    ):
        self.transport = transport
        self.on_question = on_question
        self.hello = hello
        self.work = work
        self.message_shapes = functools.cache(work.shapes)
        self.deadlines = deadlines
        self._address, self._token = address, token
        self._domains: set[_Domain] = set()
        self.turns = Turns(lambda: len(self._domains) > 1)
        self.preparations = Preparations(work, self.turns)
        self._listener = Listener(
            "link", token, self._serve, most=MOST_CONNECTIONS, seconds=deadlines.handshake
        )

    def start(self) -> str:
        """Begins to serve and returns the address.

        Raises:
          ConfigError: the address cannot be listened on, or needs a token.
        """
        return self._listener.start(listen(self._address, self._token))

    @property
    def domains(self) -> list[str]:
        """Names of the connected attention workers."""
        return sorted(domain.name for domain in list(self._domains) if domain.name)

    @contextlib.contextmanager
    def between_messages(self) -> Iterator[None]:
        """Keeps `work.run` from being called during the body."""
        with self.turns.take(self):
            yield

    def close(self, seconds: float = 5.0) -> None:
        """Ends all connections."""
        for domain in list(self._domains):
            domain.fail("the ffn worker ends")
        self._listener.close(seconds)

    def _serve(self, channel: Channel) -> None:
        domain = _Domain(self, channel)
        self._domains.add(domain)
        try:
            domain.live()
        finally:
            self._domains.discard(domain)
            self.turns.forget(domain)


_Answer = tuple[int, Sequence[jax.Array]]
"""Number of a message and the pieces of its answer."""


class _Domain(ServedSession[_Answer]):
    """One connected attention worker; its thread of work sends answers."""

    greeting = frames.Join

    def __init__(self, server: MessageServer, channel: Channel):
        super().__init__("link", channel, server.hello, server.deadlines)
        self.pieces = 0
        """Pieces of each of the domain's messages."""
        self._server = server
        self._answering = False
        self._transfers = opens(server.transport)(channel)

    def _admit(self, join: frames.Join) -> frames.Welcome:
        self._server.preparations.ask(join.pieces, join.rows)
        self.pieces, self.name = join.pieces, join.domain
        return frames.Welcome(self._hello)

    def _asked(self, question: frames.Question) -> None:
        """Answers a question on a thread of its own, as that may take a while. One at a time."""

        def run() -> None:
            try:
                answer = frames.Answer(question.number, self._server.on_question(question.data))
            except Exception as error:
                logger.exception("link: a question of %s", self.name)
                answer = frames.Answer(question.number, failed=f"{type(error).__name__}: {error}")
            self._answering = False  # before the answer, upon which the next question may come
            with contextlib.suppress(OSError):
                self.send(answer)

        if self._answering:
            self.send(frames.Answer(question.number, failed="answers another question"))
            return
        self._answering = True
        threading.Thread(target=run, name="link question", daemon=True).start()

    def _announced(self, note: frames.Note) -> None:
        work, size = self._server.work, MessageSize(self.pieces, note.rows)
        if note.epoch != self._server.hello.epoch:
            raise RuntimeError(f"epoch {note.epoch}, here {self._server.hello.epoch}")
        try:
            shapes = self._server.message_shapes(note.kind, size)
        except Exception as error:
            logger.exception("link: no shapes of %s", note)
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        pieces = self._transfers.receive(note.bulk, shapes)
        self._run(note, size, work.land(size, pieces))

    handlers: ClassVar = {frames.Note: _announced, frames.Question: _asked}

    def _run(self, note: frames.Note, size: MessageSize, message: Arrays) -> None:
        """Enqueues the answer, and sends it or has it sent once it is computed."""
        turns = self._server.turns
        try:
            with turns.take(self):
                answer = self._server.work.run(note.kind, note.layer, size, message)
                turns.enqueued(answer[0])
        except Exception as error:
            logger.exception("link: no answer to %s", note)
            self._refuse(note.number, f"{type(error).__name__}: {error}")
            return
        if self._transfers.at_once(answer):
            self._send(note.number, answer)
        else:
            self._wanted.put((note.number, answer))

    def _work(self) -> None:
        """Sends answers; after a failure only drops them, with their memory."""
        while (item := self._wanted.get()) is not None:
            if self.failure is None:
                self._send(*item)
            del item  # or it would be kept until the next one comes

    def _send(self, number: int, answer: Sequence[jax.Array]) -> None:
        """Sends an answer once it is computed."""

        def result(bulk: Bulk) -> bytes:
            return encode(frames.Result(number, bulk))

        try:
            self._transfers.send(result, answer)
        except OSError as error:
            self.fail(f"the connection closed ({error})")
        except Exception as error:
            self._refuse(number, f"{type(error).__name__}: {error}")

    def _refuse(self, number: int, text: str) -> None:
        """Tells the domain that a message gets no answer. The domain then ends the connection."""
        with contextlib.suppress(OSError):
            self.send(frames.Failed(number, text))
