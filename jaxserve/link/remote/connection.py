"""One connection of an attention worker to an ffn worker, from hello to loss.

A peer's thread (`peer.py`) joins, reads frames, probes and watches deadlines; the engine's thread
posts messages (`client.py`). Every way in which a connection ends passes through
`MessageConnection.fail`, which turns unfinished pulls into errors, so that no thread waits
for it. Knows nothing of attention and ffn.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import jax
import msgspec
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.clock import AwakeClock
from jaxserve.errors import EngineFailedError
from jaxserve.link.remote import frames
from jaxserve.link.remote.transfers import PROBE_BYTES, ArrayTransfers, is_ready, new_uuid
from jaxserve.link.session.channel import LONGEST_TICK_SECONDS, TICK_SECONDS, Channel, Deadlines
from jaxserve.link.session.hello import Hello, Refusal, greeted
from jaxserve.link.transports import opens

REASON_SECONDS = 0.1
"""How long an error of a transfer waits for the reason that the other end may be telling."""


@dataclasses.dataclass(eq=False)
class Posting:
    """A message that was sent over one connection.

    References go from messages to postings and connections only, so that all are freed, arrays and
    sockets too, without the garbage collector.

    Attributes:
      uuid: of the message on this connection.
      answer: the answer as being pulled; None where the connection failed before.
      due: on the connection's clock, when it is late; None while the message is computed.
      refused: whether the ffn worker said that there will be no answer.
    """

    what: str
    packed: jax.Array
    uuid: int
    answer: jax.Array | None = None
    due: float | None = None
    refused: bool = False


@dataclasses.dataclass(eq=False)
class Unanswered:
    """Message of a lane that has no answer yet.

    Attributes:
      packed: the message on the attention mesh; kept to be sent again.
      answer_shape: of its answer, on the attention mesh.
      connection, posting: how it was last sent; None before.
      posts: how often it was sent.
      refusals: how often an ffn worker said that it gets no answer.
    """

    lane: int
    kind: str
    layer: int
    rows: int
    packed: jax.Array
    answer_shape: jax.ShapeDtypeStruct
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

    def __init__(self, channel: Channel, device: jax.Device, deadlines: Deadlines, transport: str):
        self.channel = channel
        self.failure: str | None = None
        self.silent = 0.0
        """Seconds since the last frame of the peer."""
        self._transfers: ArrayTransfers = opens(transport)(device, channel.local_host)
        self._deadlines = deadlines
        self._failing = threading.Lock()
        self._failed = threading.Event()
        self._clock = AwakeClock(LONGEST_TICK_SECONDS)
        self._heard = 0.0
        self._posted: dict[int, Posting] = {}
        self._questions: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._epoch = 0
        sharding = SingleDeviceSharding(device)
        self._probe = jax.device_put(np.arange(PROBE_BYTES // 4, dtype=np.int32), sharding)
        self._probe_shape = jax.ShapeDtypeStruct(
            self._probe.shape, self._probe.dtype, sharding=sharding
        )
        self._probed: jax.Array | None = None
        self._probe_time = 0.0
        self._probes = 0

    def join(self, us: Introduction) -> Hello:
        """Introduces this worker and has one probe go there and back.

        Raises:
          Refusal: the two ends do not fit.
          NotYet: the other end is not ready for this one.
          OSError, EOFError, RuntimeError: the connection is lost.
        """
        hello = us.hello
        join = frames.Join(hello, us.domain, self._transfers.address, us.pieces, us.rows)
        self.channel.send(frames.encode(join))
        frame = frames.decode_from_ffn(self.channel.receive())
        if isinstance(frame, frames.Preparing):
            raise NotYet(frame.reason)
        welcome = greeted(frame, frames.Welcome, hello)
        self._epoch = hello.epoch
        self._transfers.connect(welcome.transfer_address)
        returned = self._send_probe()
        if not np.array_equal(returned, self._probe):
            raise Refusal("a probe came back changed")
        self._probed = None
        self._clock.tick()
        self._heard = self._probe_time = self._clock.now
        return welcome.hello

    def post(self, message: Unanswered, domain: str) -> None:
        """Registers and announces the message and asks for its answer; does not wait.

        Raises OSError or RuntimeError when the connection is lost.
        """
        uuid, answer = new_uuid(), new_uuid()
        note = frames.Note(
            domain,
            message.lane,
            message.kind,
            message.layer,
            message.rows,
            uuid,
            answer,
            self._epoch,
        )
        posting = Posting(str(message), message.packed, uuid)
        message.connection, message.posting = self, posting
        message.posts += 1
        self._posted[message.lane] = posting
        self._transfers.register(uuid, [message.packed])
        self.channel.send(frames.encode(note))
        (posting.answer,) = self._transfers.pull(answer, [message.answer_shape])

    def answered(self, message: Unanswered) -> None:
        """Forgets a message whose answer has arrived."""
        self._posted.pop(message.lane, None)

    def lost(self, what: str) -> None:
        """Gives the connection up after an error of the engine's thread.

        The other end refuses before it drops what is being transferred, but the two take different
        ways: what it said, which the peer's thread reads, goes before `what`.
        """
        self._failed.wait(REASON_SECONDS)
        self.fail(what)

    def fail(self, reason: str) -> None:
        """Gives the connection up; the first reason counts."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        self._failed.set()
        self._transfers.cancel()
        self.channel.shutdown()
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
        """Reads, probes and watches until the connection has failed.

        Args:
          limit: seconds of silence that are allowed just now.
        """
        while self.failure is None:
            try:
                if self.channel.wait(TICK_SECONDS):
                    self._take(self.channel.receive())
                self._tick(limit)
            except (EOFError, OSError) as error:
                self.fail(f"the connection closed ({error or 'end of file'})")
            except RuntimeError as error:
                self._hear_out()
                self.fail(f"a probe failed: {error}")
            except msgspec.DecodeError as error:
                self.fail(str(error))

    def _hear_out(self) -> None:
        """Reads what the other end may have said before it dropped what was being transferred."""
        end = time.monotonic() + REASON_SECONDS
        with contextlib.suppress(EOFError, OSError):
            while self.failure is None and self.channel.wait(max(0.0, end - time.monotonic())):
                self._take(self.channel.receive())

    def _take(self, data: bytes) -> None:
        self._heard = self._clock.now
        match frames.decode_from_ffn(data):
            case frames.Echo():
                pass
            case frames.Answer() as answer:
                self._settle(answer)
            case frames.Failed(uuid=uuid, text=text):
                for posting in list(self._posted.values()):
                    posting.refused |= posting.uuid == uuid
                self.fail(text)
            case frame:
                self.fail(f"unexpected {type(frame).__name__}")

    def _tick(self, limit: Callable[[], float]) -> None:
        now = self._clock.tick()
        self.silent = now - self._heard
        if self.silent > limit():
            self.fail(f"silent for {self.silent:.1f} s")
            return
        for posting in list(self._posted.values()):
            answer = posting.answer
            if posting.due is None or not is_ready(posting.packed):
                posting.due = now + self._deadlines.answer
            elif now > posting.due and answer is not None and not is_ready(answer):
                self.fail(f"no answer to {posting.what} within {self._deadlines.answer:g} s")
                return
        if now - self._probe_time < self._deadlines.probe:
            return
        if self._probed is None or is_ready(self._probed):
            if self._probed is not None:
                self._probed.block_until_ready()  # Raises where it came back as an error.
            self._probed = self._send_probe()
            self._probe_time = now
        elif now - self._probe_time > limit():
            self.fail(f"a probe was not returned within {now - self._probe_time:.1f} s")

    def _send_probe(self) -> jax.Array:
        self._probes += 1
        uuid, answer = new_uuid(), new_uuid()
        self._transfers.register(uuid, [self._probe])
        self.channel.send(frames.encode(frames.Probe(uuid, answer)))
        self.channel.send(frames.encode(frames.Echo(self._probes)))
        return self._transfers.pull(answer, [self._probe_shape])[0]
