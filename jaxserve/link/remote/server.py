"""The ffn worker's end of a link between runtimes: a message server.

Processes of attention workers connect, send their rows of messages and get the answers to them.
All share a few threads. Some receive rows (`session/readers.py`) and queue a message once it is
whole (`passes.py`); others send answers that were not computed when they were enqueued. One more
takes batches of messages from the queue, chosen by a policy (`batching.py`), and enqueues the
worker's programs. A program is enqueued only once its messages have arrived, because device queues
are in order and a program ahead of its message would block every other domain's. The server keeps
the messages in flight, each lane's last answer (`group.py`) and compiled programs (`work.py`).
`client.py` is the other end. This module knows nothing of ffn, plans or requests.

In an ffn worker of several processes each has a server, and a connection carries the rows that
cross between its two processes. Followers report messages that are whole, and run what process 0
orders, in its order.
"""

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Protocol

import jax
import msgspec
import numpy as np

from jaxserve.errors import EngineFailedError
from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.remote import frames
from jaxserve.link.remote.batching import Turns
from jaxserve.link.remote.group import Arriving, Domain
from jaxserve.link.remote.passes import Passes
from jaxserve.link.remote.work import Preparations, Work
from jaxserve.link.session import readers
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Channel, Deadlines
from jaxserve.link.session.hello import Hello, Refusal
from jaxserve.link.session.listener import Listener, listen
from jaxserve.link.session.messages import Failed, Ready, encode
from jaxserve.link.session.readers import Readers
from jaxserve.link.session.served import ServedSession
from jaxserve.link.transports import opens

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 1024
"""Most processes of domains at a time."""
HELPERS = 16
"""Threads that answer questions and send answers; a peer that reads nothing holds one for 2 s."""

_report = msgspec.msgpack.Decoder(frames.NamedMessage)
_order = msgspec.msgpack.Decoder(list[frames.NamedMessage])


class Group(Protocol):
    """The other processes of an ffn worker, as the server of one process sees them."""

    process: int
    """Number of this process; 0 leads."""

    def report(self, data: bytes) -> None:
        """Tells process 0 (`MessageServer.reported`)."""

    def order(self, data: bytes) -> None:
        """Tells all followers (`MessageServer.ordered`), in the order of the calls."""

    def fail(self, error: Exception) -> None:
        """Ends all processes, of which one cannot go on."""


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
      group: the other processes of this worker; None: it has none.
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
        group: Group | None = None,
    ):
        self.transport = transport
        self.on_question = on_question
        self.hello = hello
        self.work = work
        self.message_shapes = functools.cache(work.shapes)
        self.deadlines = deadlines
        self._address, self._token = address, token
        self._group, self.process = group, group.process if group else 0
        self._changing = threading.Lock()
        self._domains: dict[str, Domain[_DomainConnection]] = {}
        self.policy = policy or Turns()
        self.passes = Passes(self.policy, lambda: len(self.domains) > 1)
        self.preparations = Preparations(work, self.passes, several=group is not None)
        self._thread = threading.Thread(target=self._run_passes, name="link passes", daemon=True)
        self._readers = Readers()
        self.helpers = ThreadPoolExecutor(HELPERS)
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
        self._readers.start()
        begun = threading.Barrier(HELPERS)
        for _ in range(HELPERS):  # all begin now: later growth is a leak (`chaos/resources.py`)
            self.helpers.submit(begun.wait, self.deadlines.handshake)
        return self._listener.start(listening)

    @property
    def domains(self) -> list[str]:
        """Names of the connected attention workers."""
        return sorted(one.name for one in list(self._domains.values()) if one.connections)

    def close(self, seconds: float = 5.0) -> None:
        """Ends all connections, and waits for the threads, up to `seconds` for each kind: one that
        is inside JAX while the interpreter ends would abort the process."""
        self._listener.close(seconds)
        self.passes.close()
        self._readers.close(seconds)
        self.helpers.shutdown(wait=False)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _serve(self, channel: Channel) -> None:
        self._readers.add(channel.descriptor, _DomainConnection(self, channel))

    # ------------------------------------------------------------- a domain's connections
    def admit(self, connection: "_DomainConnection", name: str) -> "Domain[_DomainConnection]":
        """Adds a connection to its domain. Another one of the same process has been lost."""
        if len(self._readers.sessions) > MOST_CONNECTIONS:
            raise Refusal(f"{MOST_CONNECTIONS} connections", later=True)
        with self._changing:
            domain = self._domains.setdefault(name, Domain(name, self.process))
            lost = domain.connections.get(connection.own)
            domain.connections[connection.own] = connection
            self._forget_absent()
        if lost is not None:
            lost.fail("the process has connected again")
        return domain

    def _forget_absent(self) -> None:
        """Forgets domains without connections. A worker of several processes remembers one for as
        long as it may come back: another process may have run a message of which this one is asked
        again. Needs the lock."""
        patience = 0.0 if self._group is None else self.deadlines.absent
        for one in list(self._domains.values()):
            if not one.connections and time.monotonic() - one.left >= patience:
                self._domains.pop(one.name).clear()

    def left(self, connection: "_DomainConnection") -> None:
        """Notes that a connection has ended; with its last one a domain has left."""
        domain = connection.domain
        with self._changing:
            if domain.connections.get(connection.own) is connection:
                del domain.connections[connection.own]
            if not domain.connections and self._domains.get(domain.name) is domain:
                domain.left = time.monotonic()
                self.passes.forget(domain)
                self._forget_absent()

    # ------------------------------------------------------------------------ its messages
    def arrived(
        self,
        connection: "_DomainConnection",
        what: frames.NamedMessage,
        rows: Mapping[int, np.ndarray],
        needed: Mapping[int, bytes],
    ) -> None:
        """Takes rows. With the last ones that a message lacks it is put on the devices and queued,
        or reported to process 0.

        Args:
          needed: rows of each piece that were sent, a bit each; none: all rows of all pieces.
        """
        with self._changing:
            message = connection.domain.message(what, self.work.holders(what.pieces))
            if message is None:
                return
            last, answer = message.take(connection, rows), message.answer
            message.needed.update(needed)
        if answer is not None:
            connection.answer(message, {piece: answer[piece] for piece in rows})
        if last:
            pieces = [message.rows[piece] for piece in message.places]
            message.landed = self.work.land(*message.shape, pieces)
        if self._group is None or not self.process:
            self._reported(message, 0)
        elif last:
            self._group.report(encode(what))

    def reported(self, process: int, data: bytes) -> None:
        """Handles the report of a follower, in process 0."""
        if (message := self._named(_report.decode(data))) is not None:
            self._reported(message, process)

    def _named(self, what: frames.NamedMessage) -> "_Arriving | None":
        """Returns a message that another process of this worker names; none of it may be here."""
        with self._changing:
            domain = self._domains.setdefault(what.domain, Domain(what.domain, self.process))
            return domain.message(what, self.work.holders(what.pieces))

    def _reported(self, message: "_Arriving", process: int) -> None:
        """Queues a message in process 0 once it has landed at all processes; once more if its
        domain, which was lost and with it the message's place in the queue, sends it again."""
        domain = message.domain
        with self._changing:
            message.waiting.discard(process)
            whole = message.landed is not None and not message.waiting
            if whole and domain.connections and domain.complete(message):
                self.passes.put(message)

    def _run_passes(self) -> None:
        while batch := self.passes.take():
            self._run_pass(batch)
            del batch  # or it would be kept until the next one comes, of a forgotten domain, too

    def _run_pass(self, batch: "Sequence[_Arriving]") -> None:
        """Runs a batch in all processes of this worker, without messages that have an answer or
        whose domains were lost meanwhile."""
        batch = [one for one in batch if one.answer is None and one.domain.connections]
        if not batch:
            return
        result, names = None, [message.what for message in batch]
        try:
            if self._group is not None:
                self._group.order(msgspec.msgpack.encode(names))
            result = self._run(batch)
        except Exception as error:
            logger.exception("link: no answer to %s", names)
            for message in batch:
                self.failed(message.domain, message.what.number, error)
        self.passes.enqueued(batch, result)

    def failed(self, domain: "Domain[_DomainConnection]", number: int, error: Exception) -> None:
        """Refuses a message, or ends the worker if other processes run it without this one."""
        if self._group is not None:
            self._group.fail(error)
        with self._changing:
            senders = domain.failed(number)
        for connection in senders:
            with contextlib.suppress(OSError):  # The domain then ends the connection.
                connection.send(Failed(number, f"{type(error).__name__}: {error}"))

    def ordered(self, data: bytes) -> jax.Array | None:
        """Carries out an order of process 0, in a follower; called by one thread.

        Returns:
          Array that is ready once the devices have carried it out; None: they have nothing to do.

        Raises:
          EngineFailedError: a message of the pass has not arrived here.
        """
        batch = []
        for what in _order.decode(data):
            message = self._named(what)
            if message is None or not message.whole:
                raise EngineFailedError(f"process 0 orders {what}, which has not arrived here")
            batch.append(message)
        return self._run(batch)

    def _run(self, batch: "Sequence[_Arriving]") -> jax.Array | None:
        """Enqueues the answers to a batch, keeps them, and sends every process its pieces, now or
        once they are computed. Returns a piece of the first answer; None: all land elsewhere."""
        (kind, size), layer = batch[0].shape, batch[0].layer
        nothing = self.work.land(kind, size, []) if batch[0].landed is None else ()
        landed = [nothing if message.landed is None else message.landed for message in batch]
        answers = self.work.run(kind, layer, size, landed)
        for message, answer in zip(batch, answers, strict=True):
            with self._changing:
                parts = message.domain.ran(message, answer)
            for connection, own in parts.items():
                connection.answer(message, own)
        return next(iter(answers[0]), None)


class _DomainConnection(ServedSession):
    """A connected process of an attention worker."""

    greeting = frames.Join

    def __init__(self, server: MessageServer, channel: Channel):
        super().__init__("link", channel, server.hello, server.deadlines)
        self.own: tuple[int, ...] = ()
        """Numbers of the pieces that the process has."""
        self.places: Sequence[int] = ()
        """Numbers of those that cross this connection."""
        self._pieces = 0
        self._server = server
        self.domain = Domain[_DomainConnection]("")
        """Domain of the process, once it is admitted."""
        self._waiting = collections.deque[Callable[[], None]]()
        """Sends answers, on one thread, in this order; the first is being sent."""
        self._queueing = threading.Lock()
        self._transfers = opens(server.transport)(channel)

    def _admit(self, join: frames.Join) -> frames.Welcome:
        server = self._server
        if not join.own:
            self.send(frames.Welcome(self._hello))
            readers.keep_alive(self._channel.descriptor)
            raise EOFError("kept to show when this process ends")
        if list(join.own) != sorted(set(range(join.pieces)).intersection(join.own)):
            raise Refusal(f"sends pieces {list(join.own)} of messages of {join.pieces} pieces")
        together = min(server.policy.most, len({*server.domains, join.domain}))
        server.preparations.ask(join.pieces, join.rows, together)
        self._pieces, self.own, self.name = join.pieces, join.own, join.domain
        holders = server.work.holders(join.pieces)
        self.places = [piece for piece in join.own if holders[piece] == server.process]
        self.domain = server.admit(self, join.domain)
        return frames.Welcome(self._hello, tuple(self.places))

    def _asked(self, question: frames.Question) -> None:
        self._server.helpers.submit(self._reply, question)

    def _reply(self, question: frames.Question) -> None:
        try:
            answer = frames.Answer(question.number, self._server.on_question(question.data))
        except Exception as error:
            logger.exception("link: a question of %s", self.name)
            answer = frames.Answer(question.number, failed=f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self.send(answer)

    def _announced(self, note: frames.Note) -> None:
        shapes = self._server.message_shapes(note.kind, MessageSize(self._pieces, note.rows))
        own = [shapes[piece] for piece in self.places]
        padding = self._server.work.padding(note.kind) if note.bulk.rows else 0
        rows = self._transfers.receive(note.bulk, own, padding)
        words = note.number, note.lane, note.kind, note.layer, note.rows
        what = frames.NamedMessage(self.name, self._pieces, *words)
        needed = dict(zip(self.places, note.bulk.rows, strict=False))
        self._server.arrived(self, what, dict(zip(self.places, rows, strict=True)), needed)

    handlers: ClassVar = {frames.Note: _announced, frames.Question: _asked}

    def answer(self, message: "_Arriving", pieces: Mapping[int, jax.Array]) -> None:
        """Sends an answer, or has it sent once it is computed."""
        arrays = list(pieces.values())
        needed = [message.needed[piece] for piece in pieces if piece in message.needed]
        send = functools.partial(self._send, message.what.number, arrays, needed)
        if self._transfers.at_once(arrays):
            send()
        else:
            with self._queueing:
                self._waiting.append(send)
                if len(self._waiting) == 1 and self.failure is None:
                    self._server.helpers.submit(self._send_waiting)

    def _send_waiting(self) -> None:
        """Sends answers; after a failure only drops them, with their memory."""
        more = True
        while more:
            if self.failure is None:
                self._waiting[0]()
            with self._queueing:
                self._waiting.popleft()
                more = bool(self._waiting)

    def _send(self, number: int, answer: Sequence[jax.Array], needed: Sequence[bytes]) -> None:
        """Sends an answer once it is computed."""
        try:
            self._transfers.send(lambda bulk: encode(Ready(number, bulk)), answer, needed)
        except OSError as error:
            self.fail(f"the connection closed ({error})")
        except Exception as error:
            self._server.failed(self.domain, number, error)

    def end(self) -> None:
        """See `ServedSession`."""
        super().end()
        self._server.left(self)


_Arriving = Arriving[_DomainConnection]
