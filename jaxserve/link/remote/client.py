"""The attention worker's end of a `pull` link: messages to ffn workers of other runtimes.

The two runtimes share no `jax.distributed` group, and either may die. An ffn worker is pure, so the
attention worker can send a message again. It keeps each one until its answer has arrived, and sends
it over the next connection when a connection is lost, a deadline passes or the ffn worker refuses.
Answers are returned only once they have arrived whole: a program that is given an array in error
destroys the KV pages that are donated to it. `server.py` is the other end. Knows nothing of
attention, ffn, plans or requests.

An attention worker of several processes has a client in each. All send the same messages in the
same order, each the rows of its own devices. An answer may have reached one process and not another
when the ffn worker is lost, so each keeps a lane's last answered message, too, and sends it again
with the others, even while its engine waits for devices that wait for the other process.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence

import jax
import msgspec
from jax.sharding import Mesh

from jaxserve.clock import AwakeClock
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.link.dispatch.ends import piece_sharding
from jaxserve.link.dispatch.put import fast_put
from jaxserve.link.remote.connection import AnswerShape, MessageConnection, Unanswered
from jaxserve.link.remote.frames import Join
from jaxserve.link.remote.peer import Peer, PeerState
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Deadlines, split_address
from jaxserve.link.session.hello import Hello

logger = logging.getLogger(__name__)

MOST_REFUSALS = 3
"""Refusals by ffn workers after which a message is given up with their error."""
MOST_POSTS = 12
"""Number of times that a message is sent; if ffn workers keep dying after it, it is given up."""
WAIT_SECONDS = 0.25

PieceShape = Callable[[str, int], jax.ShapeDtypeStruct]
"""(kind, rows of a piece) → shape of a piece of the answer."""


class LinkCounters(msgspec.Struct, kw_only=True):
    """Counts of a link's work since it was opened.

    Attributes:
      messages: answered messages.
      resends: messages sent again.
      failures: connections lost while they were in use.
      last_failure: why the last one was lost; empty if none was.
    """

    messages: int = 0
    resends: int = 0
    failures: int = 0
    last_failure: str = ""


class MessageClient:
    """Sends messages to any ffn worker that is up, and receives their answers.

    `send` and `receive` are called by one thread.

    Args:
      addresses: addresses of equivalent ffn workers, those of a worker's processes one after the
        other. The first worker that is up is used until it is lost, or, if this worker has several
        processes, which must agree, as long as it is the first; warm connections to the others are
        kept.
      hello: this worker's facts; ffn workers with other facts are refused.
      token: the secret of the deployment.
      domain: name of this attention worker, equal in all of its processes and in no other worker.
      transport: name of the transport of arrays.
      mesh: mesh of this worker alone.
      answer_piece: shape of a piece of the answer to a message.
      rows: all numbers of rows that a piece may have.
      processes: processes of each ffn worker.
      deadlines: deadlines of all waits.

    Raises:
      ConfigError: no address, a bad one, or not one for each process.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: Hello,
        token: str,
        *,
        domain: str,
        transport: str,
        mesh: Mesh,
        answer_piece: PieceShape,
        rows: Sequence[int],
        processes: int = 1,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ):
        if not addresses or len(addresses) % processes:
            raise ConfigError(
                f"link addresses: {len(addresses)}, expected {processes} for each of one ffn "
                "worker or more"
            )
        for address in addresses:
            split_address(address)
        self._answer_shape = functools.cache(self._make_answer_shape)
        self._answer_piece, self._mesh = answer_piece, mesh
        here, devices = jax.process_index(), enumerate(mesh.devices.flat)
        self._own = tuple(piece for piece, device in devices if device.process_index == here)
        self._shared = len(self._own) < mesh.size
        self._deadlines = deadlines
        self._changed = threading.Condition()
        self._unanswered: dict[int, Unanswered] = {}
        self._answered: dict[int, Unanswered] = {}
        """Each lane's last answered message, where other processes may lack its answer."""
        self._numbers = itertools.count()
        self._active: Sequence[MessageConnection] = ()
        self.wanted = "ffn worker"
        """Name of what the addresses belong to, for errors."""
        self.needed: Callable[[str, Sequence[jax.Array]], Sequence[bytes]]
        self.needed = lambda kind, pieces: ()
        """Finds the rows of a message, of a kind and in pieces, that the ffn worker needs; see
        `PullTransfers.send`. The others are not sent."""
        self.last_used = ""
        """Address of the ffn worker in use, or of the one that was."""
        self._closed = False
        self.counters = LinkCounters()
        us = Join(hello, domain, mesh.size, tuple(rows), self._own)
        calls = self._notify, self._silence_allowed
        self.peers = [
            Peer(address, us, token, deadlines, transport, *calls) for address in addresses
        ]
        self._workers = list(itertools.batched(self.peers, processes))

    def connect(self) -> None:
        """Starts connecting everywhere and waits for the first ffn worker that is up.

        Raises:
          ConfigError: every address refuses this worker, naming the differing facts.
          EngineFailedError: no ffn worker is up within `deadlines.absent`; while one compiles for
            this worker, that time does not run.
        """
        for peer in self.peers:
            peer.start()
        self._wait_for_connection(give_up_when_refused=True)

    def send(self, lane: int, kind: str, layer: int, rows: int, packed: jax.Array) -> None:
        """Sends a lane's message, which may still be computed; never waits.

        Args:
          lane: lane without an unanswered message.
          kind, rows: fix the shapes of message and answer; `kind` and `layer` also tell the ffn
            worker what to compute.
          packed: one piece on every device of the mesh. Kept until the answer arrives, so it must
            not be donated.
        """
        assert lane not in self._unanswered, lane
        words = next(self._numbers), lane, kind, layer, rows
        with self._changed:
            shape = self._answer_shape(kind, rows)
            self._unanswered[lane] = Unanswered(*words, packed, shape, needed=self.needed)
        self._post_waiting()

    def receive(self, lane: int) -> jax.Array:
        """Waits for the answer to the lane's message and returns it, complete and without error.

        Sends unanswered messages again, to any ffn worker that is up, as often as needed.

        Raises:
          EngineFailedError: no ffn worker was up for `deadlines.absent`, ffn workers refuse the
            message or die of it, or the link was closed.
          jax.errors.JaxRuntimeError: the message itself is an error of this worker's device.
        """
        message = self._unanswered[lane]
        while True:
            self._wait_for_answer(message)
            if message.error is not None:
                raise message.error
            with self._changed:
                if message.whole:
                    pieces = [message.pieces[piece] for piece in self._own]
                    message.pieces.clear()
                    del self._unanswered[lane]
                    if self._shared:
                        self._answered[lane] = message
                    else:  # a late worker's connection may refer to it
                        message.connections = ()
                    self.counters.messages += 1
                    return message.answer_shape.put(pieces)
            self._check(message)
            self._wait_for_connection()

    def _wait_for_answer(self, message: Unanswered) -> None:
        """Waits until a message has its answer or an error, or has been lost."""
        for connection in message.connections:
            connection.wait_for(message)

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Asks the runtime of the ffn worker in use, or of another that is up; from one thread at a
        time, as `RemoteExperts` does.

        Raises:
          EngineFailedError: no ffn worker is up, or none answers within `seconds`.
        """
        leaders = [*self._active[:1], *(peers[0].connection for peers in self._workers)]
        connection = next((one for one in leaders if one and one.failure is None), None)
        if connection is None:
            raise EngineFailedError(f"no ffn worker is up: {self._whereabouts()}")
        return connection.ask(data, seconds)

    def close(self) -> None:
        """Ends all connections; callers that wait for an answer get an EngineFailedError."""
        self._closed = True
        for peer in self.peers:
            peer.close()
        self._notify()

    @property
    def problems(self) -> list[str]:
        """Problems of ffn workers, by their place among the addresses; from any thread."""
        found = enumerate(peer.describe() for peer in self.peers)
        return [f"ffn worker {number}: {what}" for number, what in found if what]

    def _usable(self) -> Sequence[MessageConnection]:
        """Returns the connections in use, or those to another worker that is up, or none; notes the
        loss of the former. Needs the lock."""
        failed = next((one.failure for one in self._active if one.failure is not None), None)
        if failed is not None:
            self.counters.failures += 1
            self.counters.last_failure = failed
            for one in self._active:
                one.fail(failed)
            self._active = ()
        if self._active and not self._shared:
            return self._active
        # The worker lost last may be up again and answer probes, but not messages. Processes of one
        # attention worker, which must agree, go by the addresses alone.
        lost = "" if self._shared else self.last_used
        order = sorted(self._workers, key=lambda peers: peers[0].address == lost)
        for wanted in (PeerState.UP, PeerState.SUSPECT):
            for peers in order:
                found = [made for peer in peers if (made := peer.connection) is not None]
                states = {peer.state for peer in peers}
                if len(found) == len(peers) and states <= {PeerState.UP, wanted}:
                    self._active, self.last_used = found, peers[0].address
                    return found
        return ()

    def _post_waiting(self, here: bool = True) -> None:
        """Sends messages that have not gone to the ffn worker in use, if one is. The lock is held
        only while they are chosen: an ffn worker that reads slowly delays no other thread. `here`
        is as in `MessageConnection.post`."""
        with self._changed:
            connections = [one for one in self._usable() if one.places]
            due = [
                message
                for message in (*self._answered.values(), *self._unanswered.values())
                if connections and message.connections != connections and message.error is None
                # Other processes may lack an answer that has arrived here.
                if self._shared or not message.whole
            ]
            for message in due:
                self.counters.resends += bool(message.connections)
                message.posts += 1
                message.pieces.clear()  # all pieces of an answer come from one ffn worker
                message.connections = connections
        for message in due:
            for connection in connections:
                connection.post(message, here)

    def _check(self, message: Unanswered) -> None:
        if message.refusals >= MOST_REFUSALS:
            raise EngineFailedError(f"ffn workers refused {message}: {self.counters.last_failure}")
        if message.posts >= MOST_POSTS:
            lost = f"{message.posts} connections were lost over {message}"
            raise EngineFailedError(f"{lost}; the last: {self.counters.last_failure}")

    def _make_answer_shape(self, kind: str, rows: int) -> AnswerShape:
        piece = self._answer_piece(kind, rows)
        whole = self._mesh.size * piece.shape[0], *piece.shape[1:]
        put = fast_put()(whole, piece.dtype, piece_sharding(self._mesh))
        return AnswerShape([piece] * len(self._own), put)

    def _wait_for_connection(self, *, give_up_when_refused: bool = False) -> None:
        """Waits until an ffn worker is up, and sends to it what waits for one."""
        clock = AwakeClock(longest=2 * WAIT_SECONDS)
        with self._changed:
            while not self._usable():
                if self._closed:
                    raise EngineFailedError("the link to the ffn workers was closed")
                if any(peer.state is PeerState.PREPARING for peer in self.peers):
                    clock = AwakeClock(longest=2 * WAIT_SECONDS)
                if clock.tick() > self._deadlines.absent:
                    raise EngineFailedError(
                        f"no {self.wanted} for {self._deadlines.absent:g} s (link.absent_seconds): "
                        f"{self._whereabouts()}"
                    )
                refused = all(peer.state is PeerState.REFUSED for peer in self.peers)
                if refused and give_up_when_refused:
                    raise ConfigError(f"refused by every ffn worker: {self._whereabouts()}")
                self._changed.wait(WAIT_SECONDS)
        self._post_waiting()

    def _whereabouts(self) -> str:
        return "; ".join(f"{peer.address} {peer.state.value}: {peer.reason}" for peer in self.peers)

    def _notify(self) -> None:
        if not self._closed:
            self._post_waiting(here=False)
        with self._changed:
            self._changed.notify_all()

    def _silence_allowed(self, peer: Peer) -> float:
        """Returns the silence allowed to a peer: less for the one in use if another stands by."""
        others = (peers for peers in self._workers if peer not in peers)
        if any(all(other.state is PeerState.UP for other in peers) for peers in others):
            return self._deadlines.suspect
        return self._deadlines.down
