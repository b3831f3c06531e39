"""One connection of an attention worker to an ffn worker, from hello to loss.

The engine's thread posts messages and reads while it waits for their answers (`client.py`), so
that no other thread has to wake it. A peer's thread (`peer.py`) joins, watches deadlines, and reads
while the engine does not. A third one sends messages that were not computed when they were posted.
Knows nothing of attention and ffn.
"""

import contextlib
import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import msgspec
import numpy as np

from jaxserve.errors import EngineFailedError
from jaxserve.link.remote import frames
from jaxserve.link.session.channel import TICK_SECONDS, Channel, Deadlines
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Hello
from jaxserve.link.session.messages import Bulk, Failed, Ready, encode
from jaxserve.link.session.session import Session
from jaxserve.link.transports import opens


class AnswerShape(NamedTuple):
    """Landing of an answer on the attention mesh."""

    pieces: Sequence[jax.ShapeDtypeStruct]
    """Shapes of the pieces of this process's devices, one each."""
    put: Callable[[Sequence[np.ndarray]], jax.Array]
    """Puts them on the devices, as one array."""


@dataclasses.dataclass(eq=False)
class Unanswered:
    """A lane's message that waits for its answer.

    A message refers to its connections. A connection refers back only until the answer has arrived
    or the connection has failed, so that arrays and sockets are freed without the garbage
    collector.

    Attributes:
      number: number of the message, equal in all processes of the attention worker.
      packed: the message on the attention mesh; kept to be sent again.
      answer_shape: form in which the answer is put on the devices.
      connections: all connections of the latest send, to the processes of one ffn worker; empty
        before the first send.
      pieces: pieces of the answer that have arrived since the latest send, by number. Any of the
        connections that the message ever went to may bring them.
      error: why the message could not be computed.
      posts: number of sends.
      refusals: number of times that an ffn worker refused to answer.
      needed: finds the rows of a message, of its kind and in its pieces, that the ffn worker needs,
        once they are computed.
    """

    number: int
    lane: int
    kind: str
    layer: int
    rows: int
    packed: jax.Array
    answer_shape: AnswerShape
    connections: "Sequence[MessageConnection]" = ()
    pieces: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    error: Exception | None = None
    posts: int = 0
    refusals: int = 0
    needed: Callable[[str, Sequence[jax.Array]], Sequence[bytes]] = lambda kind, pieces: ()

    def __str__(self) -> str:
        return f"layer {self.layer} of lane {self.lane} ({self.rows} rows a piece)"

    @property
    def whole(self) -> bool:
        """True once its answer has arrived."""
        return len(self.pieces) == len(self.answer_shape.pieces)

    @property
    def lost(self) -> bool:
        """True once one of its connections has failed."""
        return any(one.failure is not None for one in self.connections)


class MessageConnection(Session):
    """One connection to a process of an ffn worker.

    The peer's thread drives it (`join`, `serve`, `close`); the engine's thread posts messages and
    waits for answers; any thread may `fail` it.

    Args:
      limit: returns the seconds of silence that are allowed just now.

    Attributes:
      places: numbers of the pieces that cross this connection.
    """

    greeting = frames.Welcome

    def __init__(
        self, channel: Channel, deadlines: Deadlines, transport: str, limit: Callable[[], float]
    ):
        super().__init__(channel, deadlines)
        self._transfers = opens(transport)(channel)
        self._allowed = limit
        self._posted: dict[int, Unanswered] = {}
        """Message number → message."""
        self._due: dict[int, float] = {}
        """Message number → when its answer is late, once it has left."""
        self._to_send: queue.SimpleQueue[Unanswered | None] = queue.SimpleQueue()
        self._reading = threading.Lock()
        self._numbers = itertools.count()
        self._replies: queue.SimpleQueue[frames.Answer] = queue.SimpleQueue()
        """Answers to questions; one with the number -1 once the connection has failed."""
        self.places: Sequence[int] = ()
        self._own: Sequence[int] = ()
        self._lifeline = channel
        """Connection that ends as soon as the other process dies; this one, before there is any."""

    def join(self, us: frames.Join, dialled: Callable[[], Channel]) -> Hello:
        """Introduces this worker over this connection, and over another one that `dialled` makes,
        which shows when the other process ends; raises as `greet`."""
        self._own = us.own
        known = frames.Welcome, self.decode, self._deadlines.handshake
        welcome = greet(self._channel, us, *known)
        self._lifeline = dialled()
        greet(self._lifeline, msgspec.structs.replace(us, own=()), *known)
        self.places = welcome.places
        return welcome.hello

    def post(self, message: Unanswered, here: bool) -> None:
        """Sends the message's rows that cross this connection, once they are computed.

        Args:
          here: whether this thread may send them, if that takes less time than waking another.
        """
        self._posted[message.number] = message
        if here and self._transfers.at_once([message.packed]):
            self._send_one(message)
        else:
            self._to_send.put(message)

    def wait_for(self, message: Unanswered, end: float = math.inf) -> None:
        """Waits until a posted message has the pieces that cross this connection, from here or from
        another worker, or an error, or one of its connections has failed, or `time.monotonic` has
        reached `end` and all frames that came until then are read."""
        with self._reading:
            left, came = 1.0, True
            while (
                any(place not in message.pieces for place in self.places)
                and message.error is None
                and not message.lost
                and self.failure is None
                and (left > 0 or came)
            ):
                left = max(0.0, end - time.monotonic())
                came = self.read_frame(min(left, TICK_SECONDS))

    def _drop(self) -> None:
        self._lifeline.shutdown()
        self._to_send.put(None)
        self._replies.put(frames.Answer(-1, failed=self.failure or ""))

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Asks the runtime at the other end; one thread at a time, and not the peer's.

        Raises:
          EngineFailedError: no answer came within `seconds`, or the other end has none.
        """
        number, end = next(self._numbers), time.monotonic() + seconds
        try:
            self.send(frames.Question(number, data))
            while (reply := self._replies.get(timeout=end - time.monotonic())).number != number:
                if reply.number < 0:
                    break
        except (queue.Empty, ValueError):
            raise EngineFailedError(f"link: no answer within {seconds:g} s") from None
        except OSError as error:
            raise EngineFailedError(f"link: {error}") from None
        if reply.failed:
            raise EngineFailedError(f"link: {reply.failed}")
        return reply.data

    def _replied(self, reply: frames.Answer) -> None:
        self._replies.put(reply)

    def serve(self) -> None:
        """Watches until the connection has failed, and reads what the engine does not wait for."""
        sender = threading.Thread(target=self._send, name="link sender", daemon=True)
        sender.start()
        while self.failure is None:
            with contextlib.suppress(EOFError, OSError):
                if not self._lifeline.wait(TICK_SECONDS):
                    if not self._reading.locked():
                        with self._reading:
                            self.read_frame(0.0)
                    continue
            self.fail("the connection closed (the process has ended)")
        sender.join()

    def _send(self) -> None:
        while self.failure is None and (item := self._to_send.get()) is not None:
            self._send_one(item)
            del item  # or it would be kept until the next one comes

    def _send_one(self, message: Unanswered) -> None:
        def note(bulk: Bulk) -> bytes:  # called once the rows are computed
            self._due[message.number] = self._clock.now + self._deadlines.answer
            fields = message.number, message.lane, message.kind, message.layer, message.rows
            return encode(frames.Note(*fields, bulk))

        try:
            shards = [shard.data for shard in message.packed.addressable_shards]
            sent = [shards[self._own.index(piece)] for piece in self.places]
            self._transfers.send(note, sent, message.needed(message.kind, sent))
        except OSError as error:
            self.fail(f"the connection closed ({error})")
        except Exception as error:  # of its computation, which `receive` raises
            message.error = error
            self._posted.pop(message.number, None)

    def close(self) -> None:
        """Ends the connection and frees the descriptors."""
        self.fail("closed here")
        with self._reading:
            self._channel.close()
            self._lifeline.close()

    def _limit(self) -> float:
        return self._allowed()

    def _arrived(self, result: Ready) -> None:
        message = self._posted.get(result.number)
        if message is None:
            raise RuntimeError(f"an answer to message {result.number}, which waits for none")
        shapes = message.answer_shape.pieces[: len(self.places)]
        pieces = self._transfers.receive(result.bulk, shapes)
        message.pieces.update(zip(self.places, pieces, strict=True))
        # Earlier messages of the lane, sent again for other processes, get no answer any more.
        for number, one in list(self._posted.items()):
            if one.lane == message.lane and number <= result.number:
                del self._posted[number]
                self._due.pop(number, None)

    def _refused(self, failed: Failed) -> None:
        if failed.number in self._posted:
            self._posted[failed.number].refusals += 1
        self.fail(failed.text)

    handlers: ClassVar = {Ready: _arrived, Failed: _refused, frames.Answer: _replied}

    def _tick(self, now: float) -> None:
        for number, due in list(self._due.items()):
            if now > due and (message := self._posted.get(number)) is not None:
                self.fail(f"no answer to {message} within {self._deadlines.answer:g} s")
        super()._tick(now)
