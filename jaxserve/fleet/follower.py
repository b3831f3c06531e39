"""A follower's end of the control plane: step plans in, heartbeats out.

Created by `bootstrap.joined` on every process but 0; `following.Following` iterates `boundaries()`
and reports what the devices have completed. A thread of this module sends the heartbeats and
watches the leader, so a driver that is stuck in a device call is still seen, and still ends when
the leader is gone. Another hands the broadcast on to the processes below this one (`broadcast.py`),
and a third answers the leader's questions. Knows nothing of requests or device arrays.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from jaxserve.clock import AwakeClock
from jaxserve.config.deployment import Cluster
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.fleet import control
from jaxserve.fleet.broadcast import Broadcaster
from jaxserve.fleet.listening import everywhere
from jaxserve.fleet.subscription import Subscription
from jaxserve.link.session.channel import (
    AuthenticationError,
    Channel,
    cut_off,
    dial,
    split_address,
)
from jaxserve.progress import advances

logger = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""Seconds between two log lines while waiting for the leader."""
_HELLO_SECONDS = 10.0
"""Seconds within which the leader answers a registration."""
_DIAL_SECONDS = 0.1
"""Pause between two attempts to reach the leader."""
_VERDICT_SECONDS = 3.0
"""Seconds that the leader has to name the process to blame after the broadcast has stopped."""


class Follower:
    """This process's connection to the leader: registers, and receives the leader's boundaries.

    Args:
      identity: Identity of this process.
      address: `host:port` of the leader's control plane.
      token: Secret of the deployment.
      cluster: Deadlines.
      on_failure: Called once, from a thread of this object, when the leader is gone, has failed or
        sent something invalid. The driver may be stuck in a device call by then, so this is where
        the process is ended (`bootstrap.abandon`).
    """

    def __init__(
        self,
        identity: control.Identity,
        *,
        address: str,
        token: str,
        cluster: Cluster,
        on_failure: Callable[[EngineFailedError], None] = lambda error: None,
    ):
        self.identity = identity
        self.address = address
        self.failure: EngineFailedError | None = None
        self.last_turn = time.monotonic()
        """Time (`time.monotonic`) when the loop over boundaries last came round."""
        self.position: Callable[[], control.Position | None] = lambda: None
        """Returns where the driver is; called by the heartbeat thread, so it must be quick."""
        self.progress: Callable[[], int] = advances
        """Returns a number that changes while this process loads or compiles; quick, too."""
        self._token = token
        self._cluster = cluster
        self._on_failure = on_failure
        self._interval = control.heartbeat_interval(cluster)
        self._clock = AwakeClock(longest=max(1.0, cluster.heartbeat_seconds))
        self._last_message = 0.0
        self._completed = -1
        self._ready = False
        self._next = 0
        self._leader = f"the leader (process 0, {address})"
        self._answers: dict[str, Callable[[], bytes]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[control.Boundary | None] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[control.Collect | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._all_joined = threading.Event()
        self._warm_up_begun = threading.Event()
        self._received_failure = threading.Event()
        self._verdict = threading.Event()
        """Set when this process has failed or leaves."""
        self._closed = threading.Event()
        """Set once this process is leaving: from then on the stream may end."""
        self._broadcaster = Broadcaster(token)
        self._subscription: Subscription | None = None
        self._source, self._source_name = "", ""
        self._heard = 0.0
        """Time of the last broadcast message."""
        self._channel: Channel | None = None
        """Channel to the leader, once it has accepted this process."""
        self._writer = threading.Thread(target=self._write, name="control-write", daemon=True)
        self._reader = threading.Thread(target=self._read, name="control-read", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="control-watch", daemon=True)

    def register(self) -> None:
        """Joins the deployment, waiting for the leader up to `cluster.start_seconds`.

        The log says every 10 seconds that the leader is waited for, and why it cannot be reached.

        Raises:
          ConfigError: the leader refuses this process, and says why.
          EngineFailedError: no leader answered in time, or the process that should hand the
            broadcast on did not.
        """
        host, _ = split_address(self.address, "--control")
        self._join(self._broadcaster.listen(everywhere(host)))
        for thread in (self._reader, self._writer):
            thread.start()
        self._last_message = self._heard = self._clock.tick()
        self._watcher.start()
        own = self.address.rpartition(":")[0]
        source = f"{own}{self._source}" if self._source.startswith(":") else self._source
        try:
            # The leader waits twice as long, so that it hears which address is the problem.
            seconds = self._cluster.meeting_seconds / 2
            self._subscription = Subscription(source, self._token, seconds)
        except OSError as error:
            raise EngineFailedError(
                f"registered but cannot reach {source}, where {self._source_name} hands on the "
                f"plans: {error}"
            ) from None
        threading.Thread(target=self._hear, name="control-hear", daemon=True).start()
        threading.Thread(target=self._answer, name="control-answer", daemon=True).start()
        self._send(control.Subscribed())

    def _join(self, port: int) -> None:
        """Registers with the leader; `port` is where this process hands the broadcast on."""
        register = control.encode(control.Register(self.identity, port))
        limit, told, started = self._cluster.start_seconds, 0.0, time.monotonic()
        while self._channel is None:
            try:
                channel = dial(self.address, self._token, _HELLO_SECONDS, control.MAX_MESSAGE_BYTES)
                with contextlib.ExitStack() as stack:
                    stack.callback(channel.close)
                    with cut_off(channel.shutdown, _HELLO_SECONDS):
                        channel.send(register)
                        answer = control.decode_from_leader(channel.receive())
                    if not isinstance(answer, control.Accepted):
                        why = getattr(answer, "reason", f"{type(answer).__name__} came first")
                        raise ConfigError(f"{self.identity}: refused by {self._leader}: {why}")
                    stack.pop_all()
            except AuthenticationError:
                raise ConfigError(
                    f"{self.identity}: refused by {self._leader}: wrong or no cluster token"
                ) from None
            except (OSError, EOFError) as error:
                waited = time.monotonic() - started
                problem = f"({self.address} cannot be reached: {error or 'it closed'})"
                if waited >= limit:
                    raise EngineFailedError(
                        f"{self.identity}: {self._leader} did not answer within {limit:g} s "
                        f"{problem}"
                    ) from None
                if waited - told >= TELL_SECONDS:
                    told = waited
                    logger.info("waiting for %s, %.0f s %s", self._leader, waited, problem)
                self._verdict.wait(min(_DIAL_SECONDS, limit - waited))
            else:
                patience = self._cluster.meeting_seconds
                channel.allow(patience, patience)  # the watcher knows better when it is stuck
                self._channel = channel
                self._leader = f"the leader ({answer.leader}, {self.address})"
                self._source, self._source_name = answer.source, answer.source_name
                self._next = answer.next_number

    def wait_registered(self) -> None:
        """Waits until all processes have registered, as long as the leader is alive.

        Raises:
          EngineFailedError: the leader is gone, or another process failed.
        """
        self._wait(self._all_joined)

    def wait_warm_up(self, weights: str = "") -> None:
        """Tells the leader that everything is loaded and compiled, and waits for all others.

        Waits as long as the leader is alive.

        Args:
          weights: Digest of the weights that this process has loaded.

        Raises:
          EngineFailedError: the leader is gone, or another process failed.
        """
        self._send(control.Compiled(weights))
        self._wait(self._warm_up_begun)

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(self._cluster.heartbeat_seconds):
            pass  # the watcher ends this wait when the leader is late
        if self.failure is not None:
            raise self.failure

    def ready(self) -> None:
        """Tells the leader that this process is warm."""
        self._ready = True
        self._send(self._heartbeat())

    @property
    def status(self) -> str:
        """ "starting", "ready", "failed" or "closed", as an engine's."""
        if self.failure is not None:
            return "failed"
        if self._closed.is_set():
            return "closed"
        return "ready" if self._ready else "starting"

    def boundaries(self) -> Iterator[control.Boundary]:
        """Yields the leader's boundaries in order, each checked; ends when the leader shuts down.

        Waits as long as the leader is alive, with or without work.

        Raises:
          EngineFailedError: the leader is gone, ended because of a failure, or sent a boundary that
            does not follow the last one or whose shapes differ from this process's.
        """
        while True:
            self.last_turn = time.monotonic()
            try:
                boundary = self._inbox.get(timeout=self._cluster.heartbeat_seconds)
            except queue.Empty:
                continue  # the watcher ends this wait when the leader is late
            if self.failure is not None:
                raise self.failure
            if boundary is None:
                return
            yield boundary

    def completed(self, number: int) -> None:
        """Reports that all work of boundary `number` is done, also on the devices.

        Call it for every boundary, even if no other follows: one that stays incomplete for
        `cluster.step_seconds` is a failure.
        """
        self._completed = number

    def answer(self, name: str, produce: Callable[[], bytes]) -> None:
        """Sets the answer to `Leader.collect(name)`; `produce` runs on a thread of its own."""
        self._answers[name] = produce

    def report(self, data: bytes) -> None:
        """Sends a `Report` to the leader, on the caller's thread: a message waits for it."""
        assert self._channel is not None
        with contextlib.suppress(OSError):  # the reader says why
            self._channel.send(control.encode(control.Report(data)))

    def request_drain(self, reason: str) -> None:
        """Asks the leader to drain and end the whole deployment. Safe in a signal handler."""
        self._send(control.DrainRequest(reason))

    def fail(self, problem: str, timeout: float = 2.0) -> None:
        """Tells the leader that this process cannot continue, and waits until it knows.

        Perhaps the leader itself is gone, which shows a moment after transfers with it break;
        `failure` then says so when this returns. The process is not ended here: the caller does
        that, or the leader's `Shutdown`. Sends nothing if the leader is gone or was told before.
        """
        if self.failure is not None or self._received_failure.is_set():
            return
        if self._channel is not None:
            self._send(control.Failure(problem, self._position()))
            self._received_failure.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Leaves the deployment; afterwards the leader may end. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._verdict.set()
        self._broadcaster.close()
        if self._subscription is not None:
            self._subscription.close()
        here = threading.current_thread()
        if self._watcher.ident is not None:
            if here is not self._watcher:
                self._watcher.join(timeout)
            self._send(self._heartbeat())
            if self.failure is None:
                self._send(control.Leaving())
        self._questions.put(None)
        self._outbox.put(None)
        if self._reader.ident is not None and here is not self._reader:
            self._reader.join(timeout)

    # ------------------------------------------------------------ receiving (own thread)
    def _read(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            while True:
                data = channel.receive()
                self._last_message = self._clock.now
                self._received(control.decode_from_leader(data))
        except (EOFError, OSError) as error:
            problem = f"its connection closed ({error or 'end of file'})"
        except Exception as error:
            problem = f"sent an invalid message: {type(error).__name__}: {error}"
        if not self._closed.is_set():
            self._failed(f"{self._leader}: {problem}")
        self._outbox.put(None)
        self._writer.join()
        channel.close()

    def _write(self) -> None:
        """Sends the outbox's messages until it yields None."""
        assert self._channel is not None
        with contextlib.suppress(OSError):
            while (data := self._outbox.get()) is not None:
                self._channel.send(data)
        self._channel.shutdown()

    def _hear(self) -> None:
        """Receives the broadcast and hands it on until the leader shuts down."""
        assert self._subscription is not None
        problem = "its connection closed"
        try:
            for data in self._subscription.messages():
                silent = self._clock.now - self._heard
                if data is None and silent <= self._cluster.silence_seconds(self._ready):
                    continue
                if data is None:
                    problem = f"no heartbeat for {silent:.1f} s"
                    break
                self._broadcaster.send(data)
                self._heard = self._clock.now
                message = control.decode_from_leader(data)
                self._received(message)
                if isinstance(message, control.Shutdown):
                    return
        except Exception as error:
            problem = f"sent an invalid message: {type(error).__name__}: {error}"
        self._unheard(f"plans from {self._source_name}: {problem}")

    def _unheard(self, problem: str) -> None:
        """Gives up after the leader has had time to name the process to blame."""
        if self.failure is not None or self._closed.is_set():
            return
        self.fail(problem)
        if not self._verdict.wait(_VERDICT_SECONDS):
            self._failed(f"{self.identity}: {problem}")

    def _received(self, message: Any) -> None:
        match message:
            case control.Boundary():
                self._take(message)
            case control.LeaderHeartbeat():
                pass
            case control.FailureReceived():
                self._received_failure.set()
            case control.Joined():
                self._all_joined.set()
            case control.WarmUp():
                self._warm_up_begun.set()
            case control.Collect():
                self._questions.put(message)
            case control.Shutdown(failure):
                if failure or not self._ready:
                    why = failure or "before it was ready"
                    self._failed(f"{self._leader} ended the deployment: {why}")
                self._inbox.put(None)

    def _take(self, boundary: control.Boundary) -> None:
        """Checks a boundary and hands it to the driver."""
        expected = control.shapes_digest(self.identity.digest, boundary.plans)
        problem = ""
        if boundary.number != self._next:
            problem = f"boundary {boundary.number} arrived where {self._next} is next"
        elif boundary.digest != expected:
            problem = (
                f"boundary {boundary.number} has shapes digest {boundary.digest} on the leader, "
                f"{expected} here"
            )
        if problem:
            self._send(control.Failure(problem, self._position()))
            self._failed(f"{self.identity}: {problem}")
            return
        self._next += 1
        self._inbox.put(boundary)

    # ------------------------------------------------------------ answering (own thread)
    def _answer(self) -> None:
        """Answers the leader's questions one by one.

        An answer may wait for the devices. The threads that hear the leader's heartbeats do not.
        """
        while (question := self._questions.get()) is not None:
            try:
                answer = control.Collected(question.number, self._answers[question.name]())
            except Exception as error:
                logger.exception("collecting %r", question.name)
                answer = control.Collected(question.number, b"", f"{type(error).__name__}: {error}")
            self._send(answer)

    # ------------------------------------------------------------- watching (own thread)
    def _watch(self) -> None:
        """Sends heartbeats and fails when the leader has been silent for too long."""
        tick = min(self._interval, 0.5)
        sent = -self._interval
        while not self._closed.is_set():
            now = self._clock.tick()
            if now - sent >= self._interval:
                sent = now
                self._send(self._heartbeat())
            silent = now - self._last_message
            if silent > self._cluster.silence_seconds(self._ready):
                self._failed(f"{self._leader}: no heartbeat for {silent:.1f} s")
            self._closed.wait(tick)

    def _send(self, message: msgspec.Struct) -> None:
        self._outbox.put(control.encode(message))

    def _heartbeat(self) -> control.Heartbeat:
        return control.Heartbeat(self._completed, self._ready, self._position(), self.progress())

    def _position(self) -> control.Position | None:
        try:
            return self.position()
        except Exception:
            logger.exception("position of the driver")
            return None

    def _failed(self, text: str) -> None:
        with self._lock:
            if self.failure is not None or self._closed.is_set():
                return
            self.failure = EngineFailedError(text)
        self._inbox.put(None)
        self._all_joined.set()
        self._warm_up_begun.set()
        self._received_failure.set()
        self._verdict.set()
        if self._channel is not None:
            logger.error("%s", text)
            self._on_failure(self.failure)
