"""The ffn worker's end of a link between runtimes: a message server.

Processes of attention workers connect, send their rows of messages and get the answers to them.
Each has two threads here. One receives rows and queues the message once it is whole (`passes.py`);
the other sends answers that were not computed when they were enqueued. One more thread takes
batches of messages from the queue, chosen by a policy (`batching.py`), and enqueues the worker's
programs. A program is enqueued only once its messages have arrived, because device queues are in
order and a program ahead of its message would block every other domain's. The server keeps only
messages in flight and compiled programs (`work.py`): a lost domain is forgotten. The loss of a
connection ends those of the domain's other processes, too: all connect and send again. `client.py`
is the other end. This module knows nothing of ffn, plans or requests.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import jax
import numpy as np

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.dispatch.ends import Arrays
from jaxserve.link.remote import frames
from jaxserve.link.remote.batching import Turns, Waiting
from jaxserve.link.remote.passes import Passes
from jaxserve.link.remote.work import Preparations, Work
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Channel, Deadlines, listen
from jaxserve.link.session.hello import Hello, Refusal
from jaxserve.link.session.listener import Listener
from jaxserve.link.session.messages import Bulk, encode
from jaxserve.link.session.served import ServedSession
from jaxserve.link.transports import opens

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
"""Most processes of domains at a time."""


class MessageServer:
    """Serves messages of any number of attention workers.

    Args:
      address: address to listen on; port 0 takes a free one.
      hello: this worker's facts; attention workers with other facts are refused.
      token: the secret of the deployment.
      work: the worker; its `run` is called by one thread at a time.
      transport: name of the transport of arrays.
      policy: chooses the messages of a pass.
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
        policy: Turns | None = None,
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
        self.changing = threading.Lock()
        self._domains: dict[str, _Domain] = {}
        self._policy = policy or Turns()
        self.passes = Passes(self._policy, lambda: len(self._domains) > 1)
        self.preparations = Preparations(work, self.passes)
        self._thread = threading.Thread(target=self._run_passes, name="link passes", daemon=True)
        self._listener = Listener(
            "link", token, self._serve, most=MOST_CONNECTIONS, seconds=deadlines.handshake
        )

    def start(self) -> str:
        """Begins to serve and returns the address.

        Raises:
          ConfigError: the address cannot be listened on, or needs a token.
        """
        listening = listen(self._address, self._token)
        self._thread.start()
        return self._listener.start(listening)

    @property
    def domains(self) -> list[str]:
        """Names of the connected attention workers."""
        return sorted(self._domains)

    def between_messages(self) -> AbstractContextManager[None]:
        """Keeps `work.run` from being called during the body."""
        return self.passes.between()

    def together(self, name: str) -> int:
        """Returns the most messages of a pass once a domain of this name has joined."""
        with self.changing:
            return min(self._policy.most, len({*self._domains, name}))

    def close(self, seconds: float = 5.0) -> None:
        """Ends all connections."""
        for domain in list(self._domains.values()):
            self._end(domain, "the ffn worker ends")
        self._listener.close(seconds)
        self.passes.close()

    def _serve(self, channel: Channel) -> None:
        connection = _DomainConnection(self, channel)
        try:
            connection.live()
        finally:
            self.left(connection.domain)

    def admit(self, connection: "_DomainConnection", name: str) -> "_Domain":
        """Adds a connection to its domain. Another one of the same process has been lost."""
        with self.changing:
            domain, own = self._domains.setdefault(name, _Domain(name)), set(connection.own)
            if any(own.intersection(one.own) for one in domain.connections):
                self._end(domain, "the process has connected again")
                domain = self._domains[name] = _Domain(name)
            domain.connections.append(connection)
        return domain

    def left(self, domain: "_Domain") -> None:
        """Ends the domain's other connections after the loss of one, and forgets its messages."""
        with self.changing:
            self._end(domain, "another connection of the domain has ended")
        self.passes.forget(domain)

    def _end(self, domain: "_Domain", reason: str) -> None:
        if self._domains.get(domain.name) is domain:
            del self._domains[domain.name]
        # The two refer to each other, and orders that its thread of work did not see are arrays.
        connections, domain.connections = domain.connections, []
        domain.arriving.clear()
        for connection in connections:
            connection.fail(reason)

    def arrived(self, domain: "_Domain", note: frames.Note, rows: "_Rows") -> None:
        """Puts a message that is whole on the devices and queues it."""
        pieces = dict(pair for one, own in rows.items() for pair in zip(one.own, own, strict=True))
        size = MessageSize(len(pieces), note.rows)
        landed = self.work.land(size, [pieces[piece] for piece in range(size.pieces)])
        lane, shape = note.lane, (note.kind, size)
        message = _Arrived(domain, lane, note.layer, shape, lane, note, size, landed, list(rows))
        with self.changing:
            if self._domains.get(domain.name) is domain:
                self.passes.put(message)

    def _run_passes(self) -> None:
        while self._run_pass():
            pass

    def _run_pass(self) -> bool:
        """Enqueues the answers to the next batch, and sends each, or has it sent once it is
        computed. Returns False once the server is closed."""
        batch: Sequence[_Arrived] = self.passes.take()
        if not batch:
            return False
        result, first = None, batch[0]
        try:
            landed = [message.landed for message in batch]
            answers = self.work.run(first.note.kind, first.layer, first.size, landed)
            result = answers[0][0]
        except Exception as error:
            logger.exception("link: no answer to %s", first.note)
            for message in batch:
                message.refuse(f"{type(error).__name__}: {error}")
        else:
            for message, answer in zip(batch, answers, strict=True):
                message.answer(answer)
        self.passes.enqueued(batch, result)
        return True


@dataclasses.dataclass(eq=False, slots=True)
class _Arrived(Waiting):
    """A message on the ffn mesh, and the connections over which it came."""

    note: frames.Note
    size: MessageSize
    landed: Arrays
    connections: "list[_DomainConnection]"

    def answer(self, pieces: Sequence[jax.Array]) -> None:
        """Sends every process its pieces of the answer."""
        for connection in self.connections:
            connection.answer(self.note.number, [pieces[piece] for piece in connection.own])

    def refuse(self, text: str) -> None:
        """Tells all processes that the message gets no answer."""
        for connection in self.connections:
            connection.refuse(self.note.number, text)


class _Domain:
    """An attention worker: connections of its processes, from their joining to the first loss, and
    messages that are not whole, by lane and number."""

    def __init__(self, name: str):
        self.name = name
        self.connections: list[_DomainConnection] = []
        self.arriving: dict[tuple[int, int], _Rows] = {}


_Answer = tuple[int, Sequence[jax.Array]]
"""Number of a message and the pieces of its answer."""


class _DomainConnection(ServedSession[_Answer]):
    """A connected process of an attention worker; its thread of work sends answers."""

    greeting = frames.Join

    def __init__(self, server: MessageServer, channel: Channel):
        super().__init__("link", channel, server.hello, server.deadlines)
        self.own: Sequence[int] = ()
        """Numbers of the pieces that this process sends."""
        self._pieces = 0
        self._server = server
        self.domain = _Domain("")
        """Domain of the process, once it is admitted."""
        self._answering = False
        self._transfers = opens(server.transport)(channel)

    def _admit(self, join: frames.Join) -> frames.Welcome:
        if not join.own or list(join.own) != sorted(set(range(join.pieces)).intersection(join.own)):
            raise Refusal(f"sends pieces {list(join.own)} of messages of {join.pieces} pieces")
        together = self._server.together(join.domain)
        self._server.preparations.ask(join.pieces, join.rows, together)
        self._pieces, self.own, self.name = join.pieces, join.own, join.domain
        self.domain = self._server.admit(self, join.domain)
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
        arriving, size = self.domain.arriving, MessageSize(self._pieces, note.rows)
        if note.epoch != self._server.hello.epoch:
            raise RuntimeError(f"epoch {note.epoch}, here {self._server.hello.epoch}")
        try:
            shapes = self._server.message_shapes(note.kind, size)
        except Exception as error:
            logger.exception("link: no shapes of %s", note)
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        rows = self._transfers.receive(note.bulk, [shapes[piece] for piece in self.own])
        with self._server.changing:
            message = arriving.setdefault((note.lane, note.number), {})
            message[self] = rows
            if sum(len(one.own) for one in message) < self._pieces:
                return
            for lane, number in list(arriving):
                if lane == note.lane and number <= note.number:
                    del arriving[lane, number]
        self._server.arrived(self.domain, note, message)

    handlers: ClassVar = {frames.Note: _announced, frames.Question: _asked}

    def answer(self, number: int, pieces: Sequence[jax.Array]) -> None:
        """Sends an answer, or has it sent once it is computed."""
        if self._transfers.at_once(pieces):
            self._send(number, pieces)
        else:
            self._wanted.put((number, pieces))

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
            self.refuse(number, f"{type(error).__name__}: {error}")

    def refuse(self, number: int, text: str) -> None:
        """Tells the domain that a message gets no answer. The domain then ends the connection."""
        with contextlib.suppress(OSError):
            self.send(frames.Failed(number, text))


_Rows = dict[_DomainConnection, list[np.ndarray]]
"""Rows of a message by the connections over which they came."""
