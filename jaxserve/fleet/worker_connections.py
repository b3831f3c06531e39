"""A router's connections to its workers: one thread reads and writes all of them.

A thread or two a worker would be thousands. A few other threads dial, prove the token and exchange
the first frames (`link/session/channel.py`); they dial lost workers until these answer. Called by
`router.py`; knows frames, and nothing of requests.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

import jaxserve
from jaxserve.clock import AwakeClock
from jaxserve.errors import ConfigError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.registry import Place
from jaxserve.fleet.request_frames import Frame
from jaxserve.link.session.channel import Channel, cut_off, dial

HANDSHAKE_SECONDS = 5.0
DIAL_SECONDS = 0.5
"""Pause between two attempts to reach an absent worker."""
DIALLING_THREADS = 8
TICK_SECONDS = 0.1
ECHO_SECONDS = 5.0
"""Interval of signs of life to a worker (`worker_port.SILENT_SECONDS`)."""
READ_BYTES = 1 << 18
MAX_UNSENT_BYTES = 1 << 28
"""A worker that leaves more bytes than this unread is taken for stuck."""

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """Takes the events of connections, all on their thread."""

    def joined(self, place: Place, facts: frames.WorkerFacts) -> None:
        """Called when a worker is connected and ready."""

    def left(self, place: Place, why: str) -> None:
        """Called when a worker is lost."""

    def received(self, place: Place, frame: frames.FromWorker) -> None:
        """Called for every frame of a connected worker."""

    def silent(self, place: Place, seconds: float) -> None:
        """Called repeatedly while a connected worker stays silent, with the seconds of silence."""

    def turn(self) -> None:
        """Called in every round of the thread, and soon after `wake`."""

    def tick(self) -> None:
        """Called every `TICK_SECONDS`."""


class _Wire:
    """The connection to one worker, from its welcome on."""

    def __init__(self, place: Place, channel: Channel, facts: frames.WorkerFacts):
        self.place, self.facts = place, facts
        self.socket, self._framing = channel.detach()
        self.socket.setblocking(False)
        self.heard = self.echo_at = 0.0
        self.joined = False
        """True once its first state has come and says that it is well."""
        self.lost = ""
        """Why the connection is given up; empty while it is not."""
        self.cause = ""
        """The reason in one word: closed, silent, stuck, failed, unread or removed."""
        self._received = bytearray()
        self.unsent = bytearray()
        """Bytes that wait for room in the connection's buffer."""
        self._sending = threading.Lock()

    def lose(self, cause: str, why: str) -> None:
        """Gives the connection up; the first reason counts."""
        if not self.lost:
            self.cause, self.lost = cause, why

    def send(self, found: Sequence[Frame]) -> bool:
        """Sends frames as far as the socket takes them; returns whether all went."""
        bodies = [frames.encode(frame) for frame in found]
        with self._sending:
            for body in bodies:
                self.unsent += self._framing.pack(body)
            if len(self.unsent) > MAX_UNSENT_BYTES:
                self.lose("unread", f"it has left {len(self.unsent)} bytes unread")
            return self._flush()

    def flush(self) -> None:
        """Sends more of the bytes that wait."""
        with self._sending:
            self._flush()

    def read(self) -> list[frames.FromWorker]:
        """Returns the frames that have come.

        Raises:
          OSError, EOFError, msgspec.DecodeError: the connection is lost, or has sent nonsense.
        """
        ended = False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                data = self.socket.recv(READ_BYTES)
                ended = not data
                self._received += data
                if len(data) < READ_BYTES:
                    break
        found = self._framing.take(self._received)
        if ended and not found:
            raise EOFError("it closed the connection")
        return [frames.decode_from_worker(body) for body in found]

    def _flush(self) -> bool:
        try:
            while self.unsent:
                sent = self.socket.send(self.unsent)
                del self.unsent[:sent]
        except BlockingIOError:
            return False
        except OSError as error:
            self.lose("closed", str(error))
            self.unsent.clear()
        return True


class WorkerConnections:
    """Connects to all workers of a fleet, and dials lost and absent ones again.

    Args:
      places: Returns the places of the workers; called in every tick.
      token: Secret of the deployment.
      router: Name of this router.
      receiver: Takes the events of all connections.
      suspect: Seconds without a frame after which the receiver is told of the silence.
      silent: Seconds without a frame after which a worker counts as gone.
      stuck: Seconds for which a worker's step loop may stand still.
    """

    def __init__(
        self,
        places: Callable[[], Sequence[Place]],
        token: str,
        router: str,
        receiver: Receiver,
        suspect: float,
        silent: float,
        stuck: float,
    ):
        self._places, self._token, self._router = places, token, router
        self._receiver = receiver
        self._suspect, self._silent, self._stuck = suspect, silent, stuck
        self._dialling = ThreadPoolExecutor(DIALLING_THREADS, "dial")
        self._clock = AwakeClock(1.0)
        self._stopping = False
        self._lock = threading.Lock()
        # Under the lock:
        self._due: dict[str, float] = {}  # address → when to dial again
        self._dialled: list[_Wire] = []
        self._changed: set[_Wire] = set()  # with bytes left to send, or lost
        # Written by the connections' thread:
        self._wires: dict[str, _Wire] = {}
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
        self._thread.join(TICK_SECONDS + HANDSHAKE_SECONDS)
        self._dialling.shutdown(wait=False, cancel_futures=True)

    def send(self, address: str, frame: Frame) -> None:
        """Sends a frame, or drops it if no worker is connected there; from any thread."""
        wire = self._wires.get(address)
        if wire is not None and (not wire.send([frame]) or wire.lost):
            with self._lock:
                self._changed.add(wire)
            self.wake()

    def forget(self, address: str, why: str) -> None:
        """Gives up the connection to a place that has left the fleet; from any thread."""
        wire = self._wires.get(address)
        if wire is not None:
            wire.lose("removed", why)
            with self._lock:
                self._changed.add(wire)
            self.wake()

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
            wire.socket.close()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _turn(self) -> None:
        events = self._selector.select(TICK_SECONDS)
        self.last_turn = time.monotonic()
        now = self._clock.tick()
        for key, mask in events:
            wire: _Wire | None = key.data
            if wire is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                continue
            if mask & selectors.EVENT_WRITE:
                wire.flush()
            if mask & selectors.EVENT_READ:
                self._read(wire, now)
            if wire.lost or mask & selectors.EVENT_WRITE:
                self._look_after(wire)
        self._welcome(now)
        self._receiver.turn()
        with self._lock:
            changed, self._changed = self._changed, set()
        for wire in changed:
            self._look_after(wire)
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        for wire in list(self._wires.values()):
            if now >= wire.echo_at:
                wire.echo_at = now + ECHO_SECONDS
                wire.send([frames.Echo(0)])
            silent = now - wire.heard
            if silent > self._silent:
                wire.lose("silent", f"it has been silent for {silent:.1f} s")
                self._look_after(wire)
            elif silent > self._suspect and wire.joined:
                self._receiver.silent(wire.place, silent)
        self._dial(now)
        self._receiver.tick()

    def _look_after(self, wire: _Wire) -> None:
        """Gives a lost connection up, and waits for room where something is left to send."""
        if self._wires.get(wire.place.address) is not wire:
            return
        if wire.lost:
            self._drop(wire)
            return
        wanted = selectors.EVENT_READ
        if wire.unsent:
            wanted |= selectors.EVENT_WRITE
        if self._selector.get_key(wire.socket).events != wanted:
            self._selector.modify(wire.socket, wanted, wire)

    def _read(self, wire: _Wire, now: float) -> None:
        try:
            found = wire.read()
        except (OSError, EOFError, msgspec.DecodeError) as error:
            wire.lose("closed", str(error) or type(error).__name__)
            return
        if found:
            wire.heard = now
        for frame in found:
            if isinstance(frame, frames.State):
                if frame.failure is not None:
                    wire.lose("failed", frame.failure)
                elif frame.turn_age > self._stuck:
                    wire.lose("stuck", f"its step loop has stood still for {frame.turn_age:.0f} s")
                elif not wire.joined:
                    wire.joined = True
                    logger.info("%s worker %s is there", wire.facts.role, wire.place.address)
                    self._receiver.joined(wire.place, wire.facts)
            if wire.lost:
                return
            try:
                self._receiver.received(wire.place, frame)
            except Exception as error:  # its other frames are lost: its requests begin again
                logger.exception("a frame of %s", wire.place.address)
                wire.lose("failed", f"a frame of it was not taken: {error}")

    def _welcome(self, now: float) -> None:
        with self._lock:
            dialled, self._dialled = self._dialled, []
        for wire in dialled:
            if wire.place.address in self._wires:  # a dial that was not started was
                wire.socket.close()
                continue
            wire.heard = now
            self._wires[wire.place.address] = wire
            self._reasons.pop(wire.place.address, None)
            self._selector.register(wire.socket, selectors.EVENT_READ, wire)

    def _drop(self, wire: _Wire) -> None:
        address = wire.place.address
        del self._wires[address]
        self._reasons[address] = wire.lost
        self._selector.unregister(wire.socket)
        wire.socket.close()
        with self._lock:
            self._due[address] = self._clock.now + DIAL_SECONDS
        if wire.joined:
            logger.warning("%s worker %s is gone: %s", wire.facts.role, address, wire.lost)
            causes = self.losses.setdefault(wire.place.role, {})
            causes[wire.cause] = causes.get(wire.cause, 0) + 1
            self._receiver.left(wire.place, wire.lost)

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
                wire.socket.close()
                return
            self._dialled.append(wire)
        self.wake()

    def _not_reached(self, place: Place, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if self._reasons.get(place.address) != reason:
            logger.info("%s worker %s: %s", place.role, place.address, reason)
        self._reasons[place.address] = reason
        with self._lock:
            self._due[place.address] = self._clock.now + DIAL_SECONDS

    def _handshake(self, place: Place) -> _Wire:
        channel = dial(place.address, self._token, HANDSHAKE_SECONDS, frames.WORKER_FRAME_BYTES)
        try:
            with cut_off(channel.shutdown, HANDSHAKE_SECONDS):
                join = frames.Join(self._router, jaxserve.__version__, frames.PROTOCOL)
                channel.send(frames.encode(join))
                answer = frames.decode_from_worker(channel.receive())
            if isinstance(answer, frames.Refused):
                raise ConfigError(answer.reason)
            if not isinstance(answer, frames.Welcome):
                raise ConfigError(f"{type(answer).__name__} came before Welcome")
            stands_in = answer.facts.stands_in and place.role == "prefill"
            if answer.facts.role != place.role and not stands_in:
                raise ConfigError(f"it is a {answer.facts.role}, not a {place.role}")
        except BaseException:
            channel.close()
            raise
        return _Wire(place, channel, answer.facts)
