"""A router's connections to its workers: one thread reads them all.

A thread or two a worker would be thousands. So a `WorkerConnection` is a session whose frames are
read without waiting, by a selector, and sent without waiting (`Channel.post`). A few other threads
dial, prove the token and exchange the first frames; they dial lost workers until these answer.
Called by `router.py`; knows messages, and nothing of requests.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import msgspec

from jaxserve.clock import AwakeClock
from jaxserve.errors import ConfigError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.registry import Place
from jaxserve.fleet.request_frames import Frame
from jaxserve.link.session.channel import Channel, Deadlines, closed_on_error, dial
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Hello
from jaxserve.link.session.messages import Join, encode
from jaxserve.link.session.session import Session

if TYPE_CHECKING:
    from jaxserve.fleet.router import RouterEngine

DIAL_SECONDS = 0.5
"""Pause between two attempts to reach an absent worker."""
DIALLING_THREADS = 8
TICK_SECONDS = 0.1
ECHO_SECONDS = 5.0
"""Interval of signs of life to a worker (`worker_port.SILENT_SECONDS`)."""
MAX_UNSENT_BYTES = 1 << 28
"""A worker that leaves more bytes than this unread is taken for stuck."""

logger = logging.getLogger(__name__)


class WorkerConnection(Session):
    """The connection to one worker, from its welcome on; the selector's thread reads from it."""

    greeting = frames.Welcome

    def __init__(
        self, place: Place, channel: Channel, facts: frames.WorkerFacts, owner: "WorkerConnections"
    ):
        super().__init__(channel, owner.deadlines)
        self.place, self.facts, self._owner = place, facts, owner
        self._clock = owner.clock
        self._heard = self._echoed = self._clock.now
        self.descriptor = channel.descriptor
        self.joined = False
        """True once its first state has come and says that it is well."""
        self.cause = ""
        """Why the connection ended: closed, silent, stuck, failed, unread or removed."""

    def fail(self, reason: str, cause: str = "") -> None:
        """See `Session`."""
        silent = self.silent > self._limit()
        self.cause = self.cause or cause or ("silent" if silent else "closed")
        super().fail(reason)

    def send(self, message: msgspec.Struct) -> None:
        """See `Session`; never waits for the worker."""
        try:
            self._channel.post(encode(message))
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self.fail(str(error))
        if (unsent := len(self._channel.unsent)) > MAX_UNSENT_BYTES:
            self.fail(f"it has left {unsent} bytes unread", "unread")

    def take(self) -> None:
        """Hands every whole frame that has come to its handler."""
        try:
            for body in self._channel.take():
                self.handle(body)
                if self.failure is not None:
                    return
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.fail(str(error) or "it closed the connection")

    def tick(self, now: float) -> None:
        """Sends signs of life and watches the worker's silence."""
        self._tick(now)
        if self.failure is None and self.joined and self.silent > self._owner.suspect:
            self._owner.receiver.silent(self.place, self.silent)

    def _state(self, state: frames.State) -> None:
        if state.failure is not None:
            self.fail(state.failure, "failed")
        elif state.turn_age > self._owner.stuck:
            self.fail(f"its step loop has stood still for {state.turn_age:.0f} s", "stuck")
        elif not self.joined:
            self.joined = True
            logger.info("%s worker %s is there", self.facts.role, self.place.address)
            self._owner.receiver.joined(self.place, self.facts)
        self.pass_on(state)

    def pass_on(self, frame: Any) -> None:
        """Handles a message that is the receiver's."""
        try:
            self._owner.receiver.received(self.place, frame)
        except Exception as error:  # its other frames are lost: its requests begin again
            logger.exception("a frame of %s", self.place.address)
            self.fail(f"a frame of it was not taken: {error}", "failed")

    handlers: ClassVar = dict.fromkeys(get_args(frames.FromWorker), pass_on) | {
        frames.State: _state
    }


class WorkerConnections:
    """Connects to all workers of a fleet, and dials lost and absent ones again.

    Args:
      places: Returns the places of the workers; called in every tick.
      token: Secret of the deployment.
      hello: Introduction of this router.
      receiver: Takes the events of all connections.
      suspect: Seconds without a frame after which the receiver is told of the silence.
      silent: Seconds without a frame after which a worker counts as gone.
      stuck: Seconds for which a worker's step loop may stand still.
      kind: Kind of the connections, with their table of messages.
    """

    def __init__(
        self,
        places: Callable[[], Sequence[Place]],
        token: str,
        hello: Hello,
        receiver: "RouterEngine",
        suspect: float,
        silent: float,
        stuck: float,
        kind: type[WorkerConnection] = WorkerConnection,
    ):
        self._places, self._token, self._hello, self._kind = places, token, hello, kind
        self.receiver, self.suspect, self.stuck = receiver, suspect, stuck
        self.deadlines = Deadlines(probe=ECHO_SECONDS, down=silent)
        self._dialling = ThreadPoolExecutor(DIALLING_THREADS, "dial")
        self.clock = AwakeClock(1.0)
        self._stopping = False
        self._lock = threading.Lock()
        # Under the lock:
        self._due: dict[str, float] = {}  # address → when to dial again
        self._dialled: list[WorkerConnection] = []
        # Written by the connections' thread:
        self._wires: dict[str, WorkerConnection] = {}
        self._reasons: dict[str, str] = {}  # address → why no worker is connected there
        self.losses: dict[str, dict[str, int]] = {}
        """Role → cause → number of workers lost."""
        self._next_tick = 0.0
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.last_turn = time.monotonic()
        """Seconds of `time.monotonic` at which the thread last went round."""
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._stopping = True
        self.wake()
        self._thread.join(TICK_SECONDS + self.deadlines.handshake)
        self._dialling.shutdown(wait=False, cancel_futures=True)

    def send(self, address: str, frame: Frame) -> None:
        """Sends a frame, or drops it if no worker is connected there; from any thread."""
        if (wire := self._wires.get(address)) is not None:
            wire.send(frame)

    def forget(self, address: str, why: str) -> None:
        """Gives up the connection to a place that has left the fleet; from any thread."""
        wire = self._wires.get(address)
        if wire is not None:
            wire.fail(why, "removed")

    def wake(self) -> None:
        """Begins the thread's next round at once."""
        with contextlib.suppress(OSError):  # it has been woken already, or is closed
            self._wake.send(b"\0")

    def absences(self) -> dict[str, str]:
        """Returns why no worker is connected, by address."""
        return {
            p.address: self._reasons.get(p.address, "not reached yet")
            for p in self._places()
            if p.address not in self._wires
        }

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:
                logger.exception("workers' connections")
        with self._lock:
            dialled, self._dialled = self._dialled, []
        for wire in (*self._wires.values(), *dialled):
            wire.end()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _turn(self) -> None:
        events = self._selector.select(TICK_SECONDS)
        self.last_turn = time.monotonic()
        now = self.clock.tick()
        for key, _ in events:
            wire: WorkerConnection | None = key.data
            if wire is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                continue
            wire.take()
            self._drop_lost(wire)
        self._welcome()
        self.receiver.turn()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        for wire in list(self._wires.values()):
            wire.tick(now)
            self._drop_lost(wire)
        self._dial(now)
        self.receiver.tick()

    def _drop_lost(self, wire: WorkerConnection) -> None:
        """Gives a connection up if it is lost."""
        if wire.failure is not None and self._wires.get(wire.place.address) is wire:
            self._drop(wire, wire.failure)

    def _welcome(self) -> None:
        with self._lock:
            dialled, self._dialled = self._dialled, []
        for wire in dialled:
            if wire.place.address in self._wires:  # a dial that was not started was
                wire.end()
                continue
            self._wires[wire.place.address] = wire
            self._reasons.pop(wire.place.address, None)
            self._selector.register(wire.descriptor, selectors.EVENT_READ, wire)
            wire.take()  # frames right behind the welcome have come with it
            self._drop_lost(wire)

    def _drop(self, wire: WorkerConnection, why: str) -> None:
        address = wire.place.address
        del self._wires[address]
        self._reasons[address] = why
        self._selector.unregister(wire.descriptor)
        wire.end()
        with self._lock:
            self._due[address] = self.clock.now + DIAL_SECONDS
        if wire.joined:
            logger.warning("%s worker %s is gone: %s", wire.facts.role, address, why)
            causes = self.losses.setdefault(wire.place.role, {})
            causes[wire.cause] = causes.get(wire.cause, 0) + 1
            self.receiver.left(wire.place, why)

    def _dial(self, now: float) -> None:
        for place in self._places():
            if place.address in self._wires:
                continue
            with self._lock:
                if self._due.get(place.address, 0.0) > now:
                    continue
                self._due[place.address] = float("inf")  # until it is answered
            try:
                self._dialling.submit(self._connect, place)
            except RuntimeError as error:  # no thread can be started
                self._not_reached(place, error)

    def _connect(self, place: Place) -> None:
        try:
            wire = self._handshake(place)
        except Exception as error:  # of whatever kind: else nobody would dial there again
            self._not_reached(place, error)
            return
        with self._lock:
            if self._stopping:
                wire.end()
                return
            self._dialled.append(wire)
        self.wake()

    def _not_reached(self, place: Place, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if self._reasons.get(place.address) != reason:
            logger.info("%s worker %s: %s", place.role, place.address, reason)
        self._reasons[place.address] = reason
        with self._lock:
            self._due[place.address] = self.clock.now + DIAL_SECONDS

    def _handshake(self, place: Place) -> WorkerConnection:
        seconds = self.deadlines.handshake
        channel = dial(place.address, self._token, seconds, frames.WORKER_FRAME_BYTES)
        with closed_on_error(channel):
            join, decode = Join(self._hello), self._kind.decode
            facts = greet(channel, join, frames.Welcome, decode, seconds).facts
            if facts.role != place.role and not facts.stands_in:
                raise ConfigError(f"it is a {facts.role}, not a {place.role}")
            return self._kind(place, channel, facts, self)
