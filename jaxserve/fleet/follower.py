"""A follower's end of the control plane: step plans in, signs of life out.

Created by `bootstrap.joined` on every process but 0; `following.Following` iterates `boundaries()`
and reports what the devices have completed. The session with the leader has a thread of its own
(`_Source`), so a driver that is stuck in a device call is still seen, and still ends when the
leader is gone. Where another follower hands the plans on, a second session brings them. This
process hands the messages for all on to those below it as they came (`Relay`); no process is asked
again or reconnects, since the leader misses a lost one. Another thread answers the leader's
questions. Knows nothing of requests or device arrays.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, get_args

import msgspec

from jaxserve.config.sections import Cluster
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.fleet import control
from jaxserve.fleet.below import HELLO_SECONDS, Below, everywhere, listening_socket
from jaxserve.link.session.channel import (
    LOOK_SECONDS,
    AuthenticationError,
    Channel,
    Deadlines,
    dial,
    split_address,
)
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Refusal
from jaxserve.link.session.listener import Listener
from jaxserve.link.session.messages import Echo
from jaxserve.link.session.session import Session
from jaxserve.progress import advances

MOST_BELOW = 256
"""Connections at a time: the other processes of this host, and the first ones of a few hosts."""


class Relay:
    """Listens for the processes below this one.

    Args:
      identity: of this process; those below have equal facts.
      token: secret of the deployment.
    """

    def __init__(self, identity: control.Identity, token: str):
        self.identity = identity
        self.below: list[_Below] = []
        """Processes that have introduced themselves."""
        serve, seconds = lambda channel: _Below(self, channel).live(), HELLO_SECONDS
        self._listener = Listener("plans", token, serve, most=MOST_BELOW, seconds=seconds)

    def listen(self, host: str) -> int:
        """Takes processes from now on; returns the port.

        Raises:
          OSError: the host is none of this machine's.
        """
        return split_address(self._listener.start(listening_socket(host)))[1]

    def post(self, body: bytes) -> None:
        """Sends a message to all processes below, without waiting for any."""
        for below in self.below:
            below.post(body)

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        self._listener.close(LOOK_SECONDS)


class _Below(Below):
    """A process to which this one hands on the messages for all. It sends signs of life alone."""

    def __init__(self, relay: Relay, channel: Channel):
        deadlines = Deadlines(handshake=HELLO_SECONDS, down=math.inf)
        super().__init__("plans", channel, relay.identity, deadlines)
        self._relay = relay

    def _admit(self, join: control.Register) -> control.Accepted:
        return control.Accepted(self._relay.identity)

    def _joined(self) -> None:
        self._relay.below.append(self)

    def _ignore(self, echo: Echo) -> None:
        """Returns none: only messages of the leader show that they get through."""

    handlers: ClassVar = {Echo: _ignore}


logger = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""Seconds between two log lines while waiting for the leader."""
_HELLO_SECONDS = 10.0
"""Seconds within which the leader answers a registration."""
_DIAL_SECONDS = 0.1
"""Pause between two attempts to reach the leader."""
_TOLD = control.Joined, control.WarmUp, control.FailureReceived, control.Shutdown
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
        self.position: Callable[[], str] = str
        """Describes where the driver is. A session's thread calls it, so it must be quick."""
        self.progress: Callable[[], int] = advances
        """Returns a number that changes while this process loads or compiles; quick, too."""
        self._token = token
        self.cluster = cluster
        self._on_failure = on_failure
        self._state = control.FollowerState()
        self._running: deque[tuple[int, Any]] = deque()
        """Boundaries that are not known to be done, and their last arrays."""
        self._next = 0
        self._leader = f"the leader (process 0, {address})"
        self._answers: dict[str, Callable[[], bytes]] = {}
        self._inbox: queue.SimpleQueue[control.Boundary | None] = queue.SimpleQueue()
        self._answering = ThreadPoolExecutor(1, "control-answer")
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._told: dict[Any, threading.Event] = {kind: threading.Event() for kind in _TOLD}
        """Set once the leader has said this, or this process has failed."""
        self._closed = threading.Event()
        """Set once this process is leaving: from then on the session may end."""
        self.relay = Relay(identity, token)
        self._link: _Leader | None = None
        """The session with the leader, once it has accepted this process."""
        self._source: _Source | None = None
        """The session with the follower that hands the plans on to this one, if one does."""

    def register(self) -> None:
        """Joins the deployment, waiting for the leader up to `cluster.start_seconds`.

        The log says every 10 seconds that the leader is waited for, and why it cannot be reached.

        Raises:
          ConfigError: the leader refuses this process, and says why.
          EngineFailedError: no leader answered in time, or the process that should hand the
            broadcast on did not.
        """
        host = everywhere(split_address(self.address, "--control")[0])
        register = control.Register(self.identity, self.relay.listen(host))
        link, accepted = self._join(register)
        self._leader = f"the leader ({accepted.hello}, {self.address})"
        self._link = _Leader(self, link, lambda why: self._failed(f"{self._leader}: {why}"))
        threading.Thread(target=self._link.live, name="control-read", daemon=True).start()
        if source := accepted.source:
            try:
                # The leader waits twice as long, so that it hears which address is the problem.
                channel, _ = self._greeted(source, register, self.cluster.meeting_seconds / 2)
            except (AuthenticationError, OSError, EOFError, Refusal, msgspec.DecodeError) as error:
                raise EngineFailedError(
                    f"registered but cannot reach {source}, where {accepted.source_name} hands on "
                    f"the plans: {error or 'it closed the connection'}"
                ) from None
            name = f"plans from {accepted.source_name}"
            self._source = _Source(self, channel, lambda why: self._unheard(f"{name}: {why}"))
            threading.Thread(target=self._source.live, name="plans-read", daemon=True).start()
        self._state.subscribed = True
        self.tell()

    def _join(self, register: control.Register) -> tuple[Channel, control.Accepted]:
        """Registers with the leader, once it is there."""
        limit, told, started = self.cluster.start_seconds, 0.0, time.monotonic()
        while True:
            try:
                return self._greeted(self.address, register, _HELLO_SECONDS)
            except (AuthenticationError, Refusal, msgspec.DecodeError) as error:
                raise ConfigError(f"{self.identity}: refused by {self._leader}: {error}") from None
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
                time.sleep(min(_DIAL_SECONDS, limit - waited))

    def _greeted(
        self, address: str, register: control.Register, seconds: float
    ) -> tuple[Channel, control.Accepted]:
        """Dials a process above this one, and returns its answer."""
        channel = dial(address, self._token, seconds, control.MAX_MESSAGE_BYTES)
        return channel, greet(channel, register, control.Accepted, _Source.decode, seconds)

    def wait_registered(self) -> None:
        """Waits until all processes have registered, as long as the leader is alive.

        Raises:
          EngineFailedError: the leader is gone, or another process failed.
        """
        self._wait(control.Joined)

    def wait_warm_up(self, weights: str = "") -> None:
        """Tells the leader that everything is loaded and compiled, and waits for all others.

        Waits as long as the leader is alive.

        Args:
          weights: Digest of the weights that this process has loaded.

        Raises:
          EngineFailedError: the leader is gone, or another process failed.
        """
        self._state.weights = weights
        self.tell()
        self._wait(control.WarmUp)

    def _wait(self, kind: type[msgspec.Struct]) -> None:
        while not self._told[kind].wait(self.cluster.heartbeat_seconds):
            pass  # the session ends this wait when the leader is late
        if self.failure is not None:
            raise self.failure

    def ready(self) -> None:
        """Tells the leader that this process is warm."""
        self._state.ready = True
        self.tell()

    @property
    def status(self) -> str:
        """ "starting", "ready", "failed" or "closed", as an engine's."""
        if self.failure is not None:
            return "failed"
        if self._closed.is_set():
            return "closed"
        return "ready" if self._state.ready else "starting"

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
                boundary = self._inbox.get(timeout=self.cluster.heartbeat_seconds)
            except queue.Empty:
                continue  # the session ends this wait when the leader is late
            if self.failure is not None:
                raise self.failure
            if boundary is None:
                return
            yield boundary

    def completed(self, number: int, last: Any = None) -> None:
        """Reports that all work of boundary `number` is done, also on the devices, with the first
        sign of life after that.

        Call it for every boundary, in order, even if no other follows: one that stays incomplete
        for `cluster.step_seconds` is a failure.

        Args:
          last: a `jax.Array` that is ready once the work is done; None: it is done already.
        """
        self._running.append((number, last))

    def answer(self, name: str, produce: Callable[[], bytes]) -> None:
        """Sets the answer to `Leader.collect(name)`; `produce` runs on a thread of its own."""
        self._answers[name] = produce

    def report(self, data: bytes) -> None:
        """Sends `MessageArrived` to the leader, on the caller's thread: a message waits for it."""
        self._send(control.MessageArrived(data))

    def request_drain(self, reason: str) -> None:
        """Asks the leader to drain and end the deployment. Safe in a signal handler."""
        self._state.drain = reason

    def fail(self, problem: str, timeout: float = 2.0) -> None:
        """Tells the leader that this process cannot continue, and waits until it knows.

        Perhaps the leader itself is gone, which shows a moment after transfers with it break;
        `failure` then says so when this returns. The process is not ended here: the caller does
        that, or the leader's `Shutdown`. Sends nothing if the leader is gone or was told before.
        """
        if self.failure is not None or self._told[control.FailureReceived].is_set():
            return
        if self._link is not None:
            self._state.error = problem
            self.tell()
            self._told[control.FailureReceived].wait(timeout)

    def close(self) -> None:
        """Leaves the deployment; afterwards the leader may end. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._told[control.Shutdown].set()
        self._answering.shutdown(wait=False, cancel_futures=True)
        self.tell()
        self.relay.close()
        for session in filter(None, (self._source, self._link)):
            session.fail("closed here")

    # ---------------------------------------------------------- receiving (sessions' threads)
    def _unheard(self, problem: str) -> None:
        """Gives up after the leader has had time to name the process to blame."""
        if self._told[control.Shutdown].is_set():
            return
        self.fail(problem)
        if not self._told[control.Shutdown].wait(_VERDICT_SECONDS):
            self._failed(f"{self.identity}: {problem}")

    def received(self, message: Any) -> None:
        """Handles a message of the leader."""
        match message:
            case control.Boundary():
                self._take(message)
            case control.Collect():
                with contextlib.suppress(RuntimeError):  # this process leaves
                    self._answering.submit(self._answer, message)
            case control.Shutdown(failure):
                if failure or not self._state.ready:
                    why = failure or "before it was ready"
                    self._failed(f"{self._leader} ended the deployment: {why}")
                self._inbox.put(None)
        if told := self._told.get(type(message)):
            told.set()

    def _take(self, boundary: control.Boundary) -> None:
        """Checks a boundary and hands it to the driver."""
        digest = control.shapes_digest(self.identity.digest, boundary.plans)
        if (boundary.number, boundary.digest) != (self._next, digest):
            problem = (
                f"boundary {boundary.number} with shapes digest {boundary.digest} came, where "
                f"{self._next} with {digest} is next"
            )
            self._state.error = problem
            self.tell()
            self._failed(f"{self.identity}: {problem}")
            return
        self._next += 1
        self._inbox.put(boundary)

    def _answer(self, question: control.Collect) -> None:
        """Answers a question of the leader, on a thread of its own.

        An answer may wait for the devices. The threads that hear the leader do not.
        """
        try:
            answer = control.Collected(question.number, self._answers[question.name]())
        except Exception as error:
            logger.exception("collecting %r", question.name)
            answer = control.Collected(question.number, b"", f"{type(error).__name__}: {error}")
        self._send(answer)

    def tell(self) -> None:
        """Tells the leader how far this process is."""
        with self._telling:
            try:
                while self._running and _is_ready(self._running[0][1]):
                    self._state.completed = self._running.popleft()[0]
            except Exception as error:  # of the computation
                self._state.error = self._state.error or f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # signs of life go on without them
                self._state.position, self._state.progress = self.position(), self.progress()
            self._state.leaving = self._closed.is_set() and self.failure is None
            self._send(self._state)

    def _send(self, message: msgspec.Struct) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the thread that reads says why
                self._link.send(message)

    def _failed(self, text: str) -> None:
        with self._lock:
            if self.failure is not None or self._closed.is_set():
                return
            self.failure = EngineFailedError(text)
        self._inbox.put(None)
        for told in self._told.values():
            told.set()
        if self._link is not None:
            logger.error("%s", text)
            self._on_failure(self.failure)


def _is_ready(last: Any) -> bool:
    """Whether an array is computed; raises the error of its computation."""
    return last is None or (last.is_ready() and last.block_until_ready() is last)


class _Source(Session):
    """A session with a process above this one, read by a thread of its own."""

    greeting = control.Accepted

    def __init__(self, follower: Follower, channel: Channel, lost: Callable[[str], None]):
        cluster = follower.cluster
        super().__init__(channel, Deadlines(probe=control.heartbeat_interval(cluster)))
        seconds = cluster.silence_seconds(True)  # a large message may take as long as silence may
        channel.allow(seconds, seconds)
        self._follower, self._lost = follower, lost

    def _limit(self) -> float:
        return self._follower.cluster.silence_seconds(self._follower.status == "ready")

    def _drop(self) -> None:
        self._lost(self.failure or "")

    def handle(self, body: bytes) -> None:
        """See `Session`. A message for all goes on to others before it is carried out here."""
        self._heard = self._clock.now
        message = self.decode(body)
        if isinstance(message, control.ForAll):
            self._follower.relay.post(body)
        self._take(message)

    def _receive(self, message: msgspec.Struct) -> None:
        self._follower.received(message)

    handlers: ClassVar = dict.fromkeys(get_args(control.FromLeader), _receive)


class _Leader(_Source):
    """The session with the leader."""

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if self._echoed == now:
            self._follower.tell()
