"""One connection of an attention worker to an ffn worker, from hello to loss.

A peer's thread (`peer.py`) joins, reads frames, sends signs of life and watches deadlines; the
engine's thread posts messages (`client.py`), which a third one sends once they are computed. Every
way in which a connection ends passes through `MessageConnection.fail`, which wakes threads that
wait for an answer. Knows nothing of attention and ffn.
"""

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from jaxserve.clock import AwakeClock
from jaxserve.errors import EngineFailedError
from jaxserve.link.dispatch.copy import fast_shards
from jaxserve.link.remote import frames
from jaxserve.link.remote.transfers import ArrayTransfers
from jaxserve.link.session.channel import LONGEST_TICK_SECONDS, TICK_SECONDS, Channel, Deadlines
from jaxserve.link.session.hello import Hello, greeted
from jaxserve.link.session.messages import Bulk, Echo
from jaxserve.link.transports import opens


class AnswerShape(NamedTuple):
    """Landing of an answer on the attention mesh."""

    pieces: Sequence[jax.ShapeDtypeStruct]
    """Shapes of its pieces, one for each device."""
    put: Callable[[Sequence[np.ndarray]], jax.Array]
    """Puts them on the devices, as one array."""


@dataclasses.dataclass(eq=False)
class Posting:
    """A message that was sent over one connection.

    References go from messages to postings and connections only, so that all are freed, arrays and
    sockets too, without the garbage collector.

    Attributes:
      number: of the message on this connection.
      answer: gets the answer; None where the connection failed, or there is an `error`.
      error: why the message could not be computed.
      sent: whether the message was computed and has left.
      due: on the connection's clock, when the answer is late; None before.
      refused: whether the ffn worker said that there will be no answer.
    """

    what: str
    answer_shape: AnswerShape
    number: int
    answer: "queue.SimpleQueue[jax.Array | None]" = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    error: Exception | None = None
    sent: bool = False
    due: float | None = None
    refused: bool = False


@dataclasses.dataclass(eq=False)
class Unanswered:
    """Message of a lane that has no answer yet.

    Attributes:
      packed: the message on the attention mesh; kept to be sent again.
      answer_shape: landing of its answer.
      connection, posting: how it was last sent; None before.
      posts: how often it was sent.
      refusals: how often an ffn worker said that it gets no answer.
    """

    lane: int
    kind: str
    layer: int
    rows: int
    packed: jax.Array
    answer_shape: AnswerShape
    connection: "MessageConnection | None" = None
    posting: Posting | None = None
    posts: int = 0
    refusals: int = 0

    def __str__(self) -> str:
        return f"layer {self.layer} of lane {self.lane} ({self.rows} rows a piece)"


class NotYet(Exception):
    """The other end compiles what this one needs; the message says what."""


class Introduction(NamedTuple):
    """Introduction of an attention worker that joins."""

    hello: Hello
    domain: str
    pieces: int
    rows: tuple[int, ...]


class MessageConnection:
    """One connection to an ffn worker, from hello to loss.

    The peer's thread drives it (`join`, `serve`); the engine's thread posts messages; any thread
    may `fail` it.
    """

    def __init__(self, channel: Channel, deadlines: Deadlines, transport: str):
        self.channel = channel
        self.failure: str | None = None
        self.silent = 0.0
        """Seconds since the last frame of the peer."""
        self._transfers: ArrayTransfers = opens(transport)(channel)
        self._deadlines = deadlines
        self._failing = threading.Lock()
        self._clock = AwakeClock(LONGEST_TICK_SECONDS)
        self._heard = self._echoed = 0.0
        self._posted: dict[int, Posting] = {}
        """By number."""
        self._to_send: queue.SimpleQueue[tuple[Unanswered, Posting] | None] = queue.SimpleQueue()
        self._questions: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._epoch = 0

    def join(self, us: Introduction) -> Hello:
        """Introduces this worker.

        Raises:
          Refusal: the two ends do not fit.
          NotYet: the other end is not ready for this one.
          OSError, EOFError: the connection is lost.
        """
        self.channel.send(frames.encode(frames.Join(us.hello, us.domain, us.pieces, us.rows)))
        frame = frames.decode_from_ffn(self.channel.receive())
        if isinstance(frame, frames.Preparing):
            raise NotYet(frame.reason)
        welcome = greeted(frame, frames.Welcome, us.hello)
        self._epoch = us.hello.epoch
        self._heard = self._echoed = self._clock.tick()
        return welcome.hello

    def post(self, message: Unanswered) -> None:
        """Has the message sent once it is computed; does not wait."""
        posting = Posting(str(message), message.answer_shape, next(self._numbers))
        message.connection, message.posting = self, posting
        message.posts += 1
        self._posted[posting.number] = posting
        self._to_send.put((message, posting))
        if self.failure is not None:
            posting.answer.put(None)

    def fail(self, reason: str) -> None:
        """Gives the connection up; the first reason counts."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        self.channel.shutdown()
        self._to_send.put(None)
        for posting in list(self._posted.values()):
            posting.answer.put(None)
        for number in list(self._questions):
            self._settle(frames.Answer(number, failed=reason))

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Asks the runtime at the other end; any thread but the peer's.

        Raises:
          EngineFailedError: no answer came within `seconds`, or the other end has none.
        """
        future: Future[bytes] = Future()
        number = next(self._numbers)
        self._questions[number] = future
        try:
            if self.failure is not None:
                raise EngineFailedError(f"link: {self.failure}")
            self.channel.send(frames.encode(frames.Question(number, data)))
            return future.result(seconds)
        except TimeoutError:
            raise EngineFailedError(f"link: no answer within {seconds:g} s") from None
        except OSError as error:
            raise EngineFailedError(f"link: {error}") from None
        finally:
            self._questions.pop(number, None)

    def _settle(self, answer: frames.Answer) -> None:
        future = self._questions.pop(answer.number, None)
        if future is None:
            return
        if answer.failed:
            future.set_exception(EngineFailedError(f"link: {answer.failed}"))
        else:
            future.set_result(answer.data)

    def serve(self, limit: Callable[[], float]) -> None:
        """Reads and watches until the connection has failed, and has messages sent meanwhile.

        Args:
          limit: seconds of silence that are allowed just now.
        """
        sender = threading.Thread(target=self._send, name="link sender", daemon=True)
        sender.start()
        while self.failure is None:
            try:
                if self.channel.wait(TICK_SECONDS):
                    self._take(frames.decode_from_ffn(self.channel.receive()))
                self._tick(limit)
            except (EOFError, OSError) as error:
                self.fail(f"the connection closed ({error or 'end of file'})")
            except msgspec.DecodeError as error:
                self.fail(str(error))
        sender.join()

    def _send(self) -> None:
        while self.failure is None and self._send_next():
            pass

    def _send_next(self) -> bool:
        """Waits for a message and sends it; False at the end. Keeps no reference to it."""
        item = self._to_send.get()
        if item is None:
            return False
        message, posting = item
        shards_of, _ = fast_shards()

        def note(bulk: Bulk) -> bytes:
            fields = message.lane, message.kind, message.layer, message.rows
            return frames.encode(frames.Note(posting.number, *fields, self._epoch, bulk))

        try:
            self._transfers.send(note, shards_of(message.packed))
            posting.sent = True
        except OSError as error:
            self.fail(f"the connection closed ({error})")
        except Exception as error:  # of its computation, which `receive` raises
            posting.error = error
            self._posted.pop(posting.number, None)
            posting.answer.put(None)
        return True

    def _take(self, frame: frames.FromFFN) -> None:
        self._heard = self._clock.now
        match frame:
            case Echo():
                pass
            case frames.Result(number=number, bulk=bulk) if number in self._posted:
                posting = self._posted.pop(number)
                pieces = self._transfers.receive(bulk, posting.answer_shape.pieces)
                posting.answer.put(posting.answer_shape.put(pieces))
            case frames.Answer() as answer:
                self._settle(answer)
            case frames.Failed(number=number, text=text):
                if number in self._posted:
                    self._posted[number].refused = True
                self.fail(text)
            case _:
                self.fail(f"unexpected {type(frame).__name__}")

    def _tick(self, limit: Callable[[], float]) -> None:
        now = self._clock.tick()
        self.silent = now - self._heard
        if self.silent > limit():
            self.fail(f"silent for {self.silent:.1f} s")
            return
        for posting in list(self._posted.values()):
            if posting.due is None and posting.sent:
                posting.due = now + self._deadlines.answer
            elif posting.due is not None and now > posting.due:
                self.fail(f"no answer to {posting.what} within {self._deadlines.answer:g} s")
                return
        if now - self._echoed >= self._deadlines.probe:
            self._echoed = now
            self.channel.send(frames.encode(Echo(0)))
