"""The leader's end of the control plane: step plans out, heartbeats in, failures named.

Made by `serve.py` on process 0. The engine calls `broadcast` once a boundary, which costs it one
encoding and a queue entry a follower; threads of this module do the sending and the watching.
Knows nothing of requests or device arrays, and never waits without a deadline.
"""

import hmac
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, cast

import grpc
import msgspec

from jaxserve.cluster.control import (
    METHOD,
    SERVER_OPTIONS,
    SERVICE,
    TOKEN_KEY,
    AwakeClock,
    Beat,
    Boundary,
    Collect,
    Collected,
    Compiled,
    Failure,
    Farewell,
    Goodbye,
    Heartbeat,
    Identity,
    Noted,
    Position,
    Register,
    WarmUp,
    Welcome,
    decode_from_follower,
    encode,
    heartbeat_interval,
    refusal,
)
from jaxserve.config.deployment import Cluster
from jaxserve.errors import ConfigError, EngineFailedError

logger = logging.getLogger(__name__)


class _Seat:
    """What the leader knows of one follower. Written under the leader's lock."""

    def __init__(self, identity: Identity, now: float):
        self.identity = identity
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.position: Position | None = None
        self.completed = -1
        self.compiled = False
        self.ready = False
        self.heard = now
        """Awake time of its last message."""
        self.moved = now
        """Awake time at which it last had nothing to do or completed a boundary."""
        self.problem = ""
        """Why it is gone, in its own words or the connection's."""
        self.left = False
        """Whether it said farewell."""
        self.gone = False
        """Whether its stream has ended."""
        self.collected: dict[str, Collected] = {}

    def describe(self) -> str:
        """The follower and where it was seen last."""
        seen = f"last seen in {self.position}" if self.position else "no step seen yet"
        return f"{self.identity}: {self.problem}; {seen}"


class Leader:
    """Serves the control plane of `identity.processes - 1` followers.

    Args:
      identity: of this process; followers must have the same versions and deployment.
      address: `host:port` to listen on (port 0: any free one; see `address`).
      token: the secret that followers must present.
      cluster: deadlines.
      on_failure: called once, from a thread of this object, with the first failure of a follower.
        It must not block for long and must not call `close`.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        address: str,
        token: str,
        cluster: Cluster,
        on_failure: Callable[[EngineFailedError], None],
    ):
        if not token:
            raise ConfigError("cluster token: empty, so that anybody could join")
        self.identity = identity
        self.address = address
        self.failure: EngineFailedError | None = None
        self._token = token.encode()
        self._cluster = cluster
        self._on_failure = on_failure
        self._interval = heartbeat_interval(cluster)
        self._clock = AwakeClock(longest=max(1.0, cluster.heartbeat_seconds))
        self._changed = threading.Condition()
        self._seats: dict[int, _Seat] = {}
        self._refused: list[str] = []
        self._next = 0
        self._closing = False
        """Whether goodbyes are out: from now on, followers may go."""
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="control-watch", daemon=True)
        self._server = grpc.server(
            cast(Any, _Threads()),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=2 * identity.processes + 16,
        )
        handler: Any = grpc.stream_stream_rpc_method_handler(self._attach)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )

    def start(self) -> None:
        """Listens.

        Raises:
          ConfigError: the address cannot be bound.
        """
        host, _, port = self.address.rpartition(":")
        try:
            bound = self._server.add_insecure_port(self.address)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(
                f"control address {self.address}: cannot listen on port {port} of {host}; is it "
                "taken, or not an address of this host?"
            )
        self.address = f"{host}:{bound}"
        self._server.start()
        self._watcher.start()

    def wait_registered(self, timeout: float | None = None) -> None:
        """Waits until every follower has joined (`cluster.start_seconds` unless told otherwise).

        Raises:
          EngineFailedError: some did not, or one that had joined is gone. Names them.
        """
        self._wait(lambda: self._missing(lambda seat: True), "did not register", timeout)

    def begin_warm_up(self, timeout: float | None = None) -> None:
        """Waits until every follower has loaded and compiled, and lets all of them warm up; errors
        as `wait_registered`.

        A transfer waits only so long for its other end, and compiling takes what it takes.
        """
        self._wait(lambda: self._missing(lambda seat: seat.compiled), "did not compile", timeout)
        for seat in self._seats.values():
            seat.outbox.put(encode(WarmUp()))

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until every follower is warm; errors as `wait_registered`."""
        self._wait(lambda: self._missing(lambda seat: seat.ready), "did not get ready", timeout)

    def broadcast(self, boundary: Boundary) -> None:
        """Sends a boundary to every follower; returns at once.

        Raises:
          EngineFailedError: a follower has failed, or the number does not follow the last one.
        """
        if self.failure is not None:
            raise self.failure
        if boundary.number != self._next:
            raise EngineFailedError(
                f"boundary {boundary.number} to broadcast where {self._next} is next"
            )
        data = encode(boundary)
        self._next += 1
        for seat in self._seats.values():
            seat.outbox.put(data)

    def collect(self, name: str, timeout: float) -> dict[int, bytes]:
        """Bytes that each follower keeps under a name, by process id.

        Raises:
          EngineFailedError: a follower did not answer in time, or could not.
        """
        for seat in self._seats.values():
            seat.collected.pop(name, None)
            seat.outbox.put(encode(Collect(name)))
        waiting = f"did not send {name!r}"
        self._wait(lambda: self._missing(lambda seat: name in seat.collected), waiting, timeout)
        for seat in self._seats.values():
            if error := seat.collected[name].error:
                raise EngineFailedError(f"{seat.identity}: could not send {name!r}: {error}")
        return {process: seat.collected[name].data for process, seat in self._seats.items()}

    def explain(self, error: EngineFailedError, timeout: float = 2.0) -> EngineFailedError:
        """Who is behind a step's error: a transfer breaks a moment before its peer is missed.

        Waits up to `timeout` seconds for a follower's failure to show, and returns that; otherwise
        the error with what every follower was doing.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, timeout)
        if self.failure is not None:
            return self.failure
        return EngineFailedError(f"{error}; {self.describe()}")

    def describe(self) -> str:
        """Where every follower is, for an error about a step that is late."""
        with self._changed:
            return "; ".join(
                f"{seat.identity}: {seat.position or 'no step seen yet'}, boundary "
                f"{seat.completed} of {self._next - 1} done, last heard "
                f"{self._clock.now - seat.heard:.1f} s ago"
                for seat in self._seats.values()
            )

    def close(self, *, failure: str = "", timeout: float = 10.0) -> bool:
        """Ends the deployment: followers finish what they were sent and leave, then this returns.

        Args:
          failure: why, where the end is not an orderly one; followers then exit non-zero.
          timeout: seconds for the followers to leave.

        Returns:
          Whether every follower said farewell in time.
        """
        with self._changed:
            first, self._closing = not self._closing, True
            for seat in self._seats.values():
                if first:
                    seat.outbox.put(encode(Goodbye(failure or str(self.failure or ""))))
            self._changed.wait_for(lambda: all(seat.gone for seat in self._seats.values()), timeout)
            late = [str(seat.identity) for seat in self._seats.values() if not seat.left]
            for seat in self._seats.values():
                seat.outbox.put(None)
            self._closed = True
            self._changed.notify_all()
        if late and not self.failure and not failure:
            logger.warning("did not leave within %g s: %s", timeout, ", ".join(late))
        self._server.stop(grace=1.0).wait(2.0)
        return not late

    def _missing(self, done: Callable[[_Seat], bool]) -> list[str]:
        """Followers, by name, of which `done` is not (yet) true."""
        missing = []
        for process in range(1, self.identity.processes):
            seat = self._seats.get(process)
            if seat is None:
                missing.append(f"process {process}")
            elif not done(seat):
                missing.append(seat.describe() if seat.problem else str(seat.identity))
        return missing

    def _wait(self, missing: Callable[[], list[str]], what: str, timeout: float | None) -> None:
        timeout = self._cluster.start_seconds if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: self.failure or not missing(), timeout)
            if self.failure is not None:
                raise self.failure
            if names := missing():
                refused = "".join(f"; refused: {text}" for text in self._refused[-3:])
                raise EngineFailedError(f"{', '.join(names)}: {what} within {timeout:g} s{refused}")

    # ------------------------------------------------- one follower's stream (RPC threads)
    def _attach(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Handles one stream: admits the follower, then sends what its outbox holds."""
        offered = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(offered).encode(), self._token):
            logger.warning("refused %s: wrong or no cluster token", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or no cluster token")
        try:
            register = decode_from_follower(next(requests))
        except (StopIteration, msgspec.DecodeError, grpc.RpcError):
            register = None
        if not isinstance(register, Register):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a registration")
            return
        seat, problem = self._admit(register.identity)
        if seat is None:
            logger.warning("refused %s: %s", register.identity, problem)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
            return
        context.add_callback(lambda: self._ended(seat))
        reader = threading.Thread(
            target=self._read, args=(seat, requests), name="control-read", daemon=True
        )
        reader.start()
        while (data := seat.outbox.get()) is not None:
            yield data

    def _admit(self, identity: Identity) -> tuple[_Seat | None, str]:
        problem = refusal(self.identity, identity)
        with self._changed:
            taken = self._seats.get(identity.process_id)
            if not problem and taken is not None:
                problem = f"process id {identity.process_id} is taken by {taken.identity}"
            if not problem and self._closing:
                problem = "the deployment is ending"
            if problem:
                self._refused.append(f"{identity}: {problem}")
                return None, problem
            seat = _Seat(identity, self._clock.now)
            seat.outbox.put(encode(Welcome(self.identity, self._next)))
            self._seats = {**self._seats, identity.process_id: seat}
            self._changed.notify_all()
        logger.info("joined: %s", identity)
        return seat, ""

    def _read(self, seat: _Seat, requests: Iterator[bytes]) -> None:
        """Receives from one follower until its stream ends."""
        try:
            for data in requests:
                message = decode_from_follower(data)
                with self._changed:
                    self._received(seat, message)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # the stream's end is `_ended`'s business
        except Exception as error:
            with self._changed:
                seat.problem = seat.problem or f"sent what is no message: {error}"
        self._ended(seat)

    def _received(self, seat: _Seat, message: Any) -> None:
        seat.heard = self._clock.now
        match message:
            case Heartbeat(completed, ready, position):
                if completed != seat.completed:
                    seat.moved = self._clock.now
                seat.completed, seat.position = completed, position
                seat.ready = seat.ready or ready
            case Compiled():
                seat.compiled = True
            case Collected(name):
                seat.collected[name] = message
            case Failure(text, position):
                seat.problem, seat.position = text, position or seat.position
                seat.outbox.put(encode(Noted()))
            case Farewell():
                seat.left = True

    def _ended(self, seat: _Seat) -> None:
        with self._changed:
            seat.gone = True
            if not seat.problem and not (seat.left and self._closing):
                seat.problem = "left unasked" if seat.left else "its connection closed"
            seat.outbox.put(None)
            self._changed.notify_all()

    # ---------------------------------------------------------------- watching (own thread)
    def _watch(self) -> None:
        """Sends beats and looks for followers that are gone, silent or stuck."""
        tick = min(self._interval, 0.5)
        beat, beaten = encode(Beat()), 0.0
        while True:
            now = self._clock.tick()
            if now - beaten >= self._interval:
                beaten = now
                for seat in self._seats.values():
                    seat.outbox.put(beat)
            with self._changed:
                if self._closed:
                    return
                failure = None if self._closing or self.failure else self._find_failure(now)
                if failure is None:
                    self._changed.wait(tick)
                    continue
                self.failure = failure
                self._changed.notify_all()
            logger.error("%s; all followers: %s", failure, self.describe())
            self._on_failure(failure)

    def _find_failure(self, now: float) -> EngineFailedError | None:
        """What is wrong with the first follower that has a problem."""
        for seat in self._seats.values():
            problem = seat.problem or self._late(seat, now)
            if problem:
                seat.problem = problem
                return EngineFailedError(seat.describe())
        return None

    def _late(self, seat: _Seat, now: float) -> str:
        """Whether a follower has missed a deadline, in words."""
        silent = now - seat.heard
        # While it loads and compiles, a follower may hold the interpreter for long.
        allowed = self._cluster.heartbeat_seconds * 2 if seat.ready else self._cluster.start_seconds
        if silent > allowed:
            return f"no heartbeat for {silent:.1f} s"
        if seat.completed >= self._next - 1:
            seat.moved = now
        stuck = now - seat.moved
        if stuck > self._cluster.step_seconds + self._interval:
            return f"boundary {seat.completed + 1} not done after {stuck:.1f} s"
        return ""


class _Threads(futures.Executor):
    """A daemon thread a task: a stream that waits never keeps the interpreter from ending."""

    def submit[T](self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        future: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="control-rpc", daemon=True).start()
        return future
