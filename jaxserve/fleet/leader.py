"""The leader's end of the control plane: sends step plans, takes signs of life, names failures.

Created by `bootstrap.joined` on process 0. The engine calls `broadcast` once a boundary, which
costs it one encoding and a system call for each process directly below this one (`below.py`); a
thread for each follower receives, and another one watches. `follower_session.py` decides which
follower is to blame for a failure. Knows nothing of requests or device arrays, and never waits
without a deadline.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from jaxserve.clock import AwakeClock
from jaxserve.config.sections import Cluster
from jaxserve.config.topology import HOSTS_EACH
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.fleet import control
from jaxserve.fleet.below import HELLO_SECONDS, listening_socket
from jaxserve.fleet.follower_session import FollowerSession, find_failure
from jaxserve.link.session.channel import join_address, split_address
from jaxserve.link.session.hello import Refusal
from jaxserve.link.session.listener import Listener
from jaxserve.link.session.messages import encode


def parent_of(host: str, leader: str, followers: Sequence[str]) -> int | None:
    """Returns the number of the follower that hands on to the next one; None: the leader does.

    The first process of a host gets everything, and hands it on to the others there. The hosts are
    a tree below the leader's, each with at most `HOSTS_EACH` below it, so that no process has more
    to send when more hosts join.

    Args:
      host: of the one that joins.
      leader: its host.
      followers: hosts of those that have joined, in that order.
    """
    if host == leader:
        return None
    if host in followers:
        return followers.index(host)
    hosts = [each for each in dict.fromkeys(followers) if each != leader]
    above = len(hosts) // HOSTS_EACH
    return followers.index(hosts[above - 1]) if above else None


logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""Seconds between two checks of waiting threads."""
TELL_SECONDS = 10.0
"""Seconds between two log lines that name the missing processes."""


class Leader:
    """Serves the control plane of `identity.processes - 1` followers.

    Args:
      identity: Identity of this process; followers must have the same versions and deployment.
      address: `host:port` to listen on (port 0: any free one; see `address`).
      token: Secret that followers must present.
      cluster: Deadlines.
      roles: Role of every process, in their order, for the names of those that have not registered.
      on_failure: called once, from a thread of this object, with the first failure of a follower.
        It must not block for long, unless it ends the process (`bootstrap.abandon`).
      on_drain: called once, likewise, when a follower was asked to end: the deployment should
        drain. Gets the follower and its reason, in words.
    """

    def __init__(
        self,
        identity: control.Identity,
        *,
        address: str,
        token: str,
        cluster: Cluster,
        roles: Sequence[str] = (),
        on_failure: Callable[[EngineFailedError], None],
        on_drain: Callable[[str], None] = lambda reason: None,
    ):
        if not token:
            raise ConfigError("cluster token: empty, so that anybody could join")
        self.identity = identity
        self.address = address
        self.failure: EngineFailedError | None = None
        self.on_report: Callable[[int, bytes], None] = lambda process, data: None
        """Takes a follower's number and its `MessageArrived`; must return at once."""
        self.cluster = cluster
        self._roles = roles
        self._on_failure = on_failure
        self._on_drain = on_drain
        self._clock = AwakeClock(longest=max(1.0, cluster.heartbeat_seconds))
        self._changed = threading.Condition()
        self._followers: dict[int, FollowerSession] = {}
        self._below: list[FollowerSession] = []
        """Followers to which this process itself sends the messages for all."""
        self._refused: list[str] = []
        self._next = 0
        self._questions = 0
        self._asking = threading.Lock()
        """Held while a question waits for its answers."""
        self._step_error = ""
        """Error of this process's own step (`explain`)."""
        self._closing = False
        """True once `Shutdown` was sent: from then on followers may leave."""
        self._watcher = threading.Thread(target=self._watch, name="control-watch", daemon=True)
        self._listener = Listener(
            "control",
            token,
            lambda channel: FollowerSession(self, channel).live(),
            most=2 * identity.processes + 16,
            seconds=HELLO_SECONDS,
            frame_bytes=control.MAX_MESSAGE_BYTES,
        )

    def start(self) -> None:
        """Listens.

        Raises:
          ConfigError: the address cannot be bound.
        """
        host, port = split_address(self.address, "control address")
        try:
            listening = listening_socket(host, port)
        except OSError as error:
            raise ConfigError(
                f"control address {self.address}: cannot listen on port {port} of {host}: {error}"
            ) from None
        self.address = join_address(host, int(listening.getsockname()[1]))
        self._listener.start(listening)
        self._watcher.start()

    def wait_registered(self) -> None:
        """Waits until every follower has joined and receives the broadcast, and tells all of them.

        The deadline, `cluster.start_seconds`, counts from the last process that came.

        Raises:
          EngineFailedError: some did not come, or one that had joined is gone. Names them.
        """
        self._wait(lambda follower: follower.state.subscribed, "register")
        self._tell_each(control.Joined())

    def begin_warm_up(self, weights: str = "") -> None:
        """Waits until every follower has loaded and compiled, and lets all of them warm up.

        A transfer waits for its other end for a limited time, and compiling may take longer. So the
        deadline counts from the last progress (bytes loaded or hashed, programs compiled) that a
        follower reported.

        Args:
          weights: Digest of the weights that this process has loaded. Compared here and not when
            processes join, because hashing a large folder takes as long as loading it.

        Raises:
          ConfigError: A follower has loaded other weights.
          EngineFailedError: As `wait_registered`.
        """
        self._wait(lambda follower: follower.state.weights is not None, "compile")
        for process, follower in self._followers.items():
            if (theirs := follower.state.weights) != weights:
                raise ConfigError(
                    f"weights = {theirs} on process {process}, {weights} on the leader"
                )
        self._tell_each(control.WarmUp())

    def wait_ready(self) -> None:
        """Waits until every follower is warm; deadline and errors as `begin_warm_up`."""
        self._wait(lambda follower: follower.state.ready, "get ready")

    def broadcast(self, boundary: control.Boundary) -> None:
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
        self._next += 1
        self._broadcast(boundary)

    def _broadcast(self, message: msgspec.Struct) -> None:
        body = encode(message)
        for below in self._below:
            below.post(body)

    def _tell_each(self, message: msgspec.Struct) -> None:
        body = encode(message)
        for follower in self._followers.values():
            if follower.name:  # after the answer to its registration
                follower.post(body)

    def collect(self, name: str, timeout: float) -> dict[int, bytes]:
        """Asks every follower the question `name`; returns their answers by process id.

        Raises:
          EngineFailedError: a follower did not answer in time, or could not.
        """
        with self._asking:
            number = self._questions = self._questions + 1
            self._tell_each(control.Collect(number, name))
            self._wait(lambda each: each.collected.number == number, f"send {name!r}", timeout)
            answers = {process: each.collected for process, each in self._followers.items()}
        for process, answer in answers.items():
            if answer.error:
                identity = self._followers[process].identity
                raise EngineFailedError(f"{identity}: could not send {name!r}: {answer.error}")
        return {process: answer.data for process, answer in answers.items()}

    def find_cause(self, error: str, timeout: float = 3.0) -> EngineFailedError | None:
        """Returns the failure of a follower behind an error on this process, or None.

        A transfer breaks a moment before its peer is missed, so this waits up to `timeout` seconds
        for that failure to show. If followers report errors and none is gone, all errors are named,
        this process's own first.
        """
        with self._changed:
            self._step_error = error
            self._changed.wait_for(lambda: self.failure is not None, timeout)
        return self.failure

    def explain(self, error: EngineFailedError, timeout: float = 3.0) -> EngineFailedError:
        """Returns the failure that `find_cause` finds, or the error with every follower's place."""
        cause = self.find_cause(str(error), timeout)
        return cause or EngineFailedError(f"{error}; {self.describe()}")

    def describe(self) -> str:
        """Says where every follower is, for an error about a step that is late."""
        with self._changed:
            return "; ".join(
                f"{follower.identity}: {follower.state.position or 'no step seen yet'}, boundary "
                f"{follower.state.completed} of {self._next - 1} done, last heard "
                f"{follower.silent:.1f} s ago"
                for follower in self._followers.values()
            )

    def close(self, *, failure: str = "", timeout: float = 10.0) -> bool:
        """Ends the deployment: followers finish what they were sent and leave, then this returns.

        Args:
          failure: why, where the end is not an orderly one; followers then exit non-zero.
          timeout: seconds for the followers to leave.

        Returns:
          Whether every follower left in time.
        """
        with self._changed:
            followers = list(self._followers.values())
            first, self._closing = not self._closing, True
            if first:
                why = failure or str(self.failure or "")
                orderly = not why and all(follower.state.ready for follower in followers)
                # An orderly end comes behind the last boundary.
                (self._broadcast if orderly else self._tell_each)(control.Shutdown(why))
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(each.failure for each in followers), timeout)
            late = [str(each.identity) for each in followers if not each.state.leaving]
        if late and not self.failure and not failure:
            logger.warning("did not leave within %g s: %s", timeout, ", ".join(late))
        self._listener.close(_LOOK_SECONDS)
        return not late

    def _wait(
        self, done: Callable[[FollowerSession], bool], what: str, timeout: float | None = None
    ) -> None:
        """Waits until `done` is true of every follower; raises as `wait_registered`. A timeout of
        None is `cluster.start_seconds`, which begin anew whenever a follower advances or is done.
        """
        limit = self.cluster.start_seconds if timeout is None else timeout
        clock = AwakeClock(longest=max(1.0, 2 * _LOOK_SECONDS))
        first = told = began = clock.now
        progress: dict[int, int | None] = {}
        with self._changed:
            while True:
                missing = self._missing(done)
                if self.failure is not None:
                    raise self.failure
                if not missing:
                    return
                now = clock.tick()
                current = {n: each.state.progress if each else None for n, each in missing.items()}
                if timeout is None and current != progress:
                    began, progress = now, current
                if now - told >= TELL_SECONDS:
                    told, names = now, self._names(missing)
                    logger.info("waiting for %s to %s, %.0f s", names, what, now - first)
                if now - began >= limit:
                    break
                self._changed.wait(min(_LOOK_SECONDS, limit - (now - began)))
            names = self._names(missing)
            refused = "".join(f"; {text}" for text in self._refused[-3:])
            since = " of the last progress" if timeout is None else ""
            raise EngineFailedError(f"{names}: did not {what} within {limit:g} s{since}{refused}")

    def _names(self, missing: dict[int, FollowerSession | None]) -> str:
        """Names processes that are waited for, with their problems."""
        names = []
        for process, each in missing.items():
            role = f" ({self._roles[process]})" if self._roles else ""
            name = f"process {process}{role}" if each is None else str(each.identity)
            names.append(each.describe() if each and each.problem else name)
        return ", ".join(names)

    def _missing(
        self, done: Callable[[FollowerSession], bool]
    ) -> dict[int, FollowerSession | None]:
        """Returns the followers for which `done` is false, by process; None: not registered."""
        everyone = range(1, self.identity.processes)
        found = {process: self._followers.get(process) for process in everyone}
        return {process: each for process, each in found.items() if each is None or not done(each)}

    # --------------------------------------------------- one follower's session (own threads)
    def admit(self, follower: FollowerSession, identity: control.Identity) -> control.Accepted:
        """Takes a follower whose facts fit; raises Refusal."""
        number, most = identity.process_id, self.identity.processes - 1
        if not 0 < number <= most:
            raise Refusal(f"process id {number} is not among those of followers: 1 to {most}")
        with self._changed:
            if (taken := self._followers.get(number)) is not None:
                raise Refusal(f"process id {number} is taken by {taken.identity}")
            if self._closing:
                raise Refusal("the deployment is ending")
            others = [*self._followers.values()]
            hosts = [each.identity.host for each in others]
            parent = parent_of(identity.host, self.identity.host, hosts)
            follower.identity, follower.advanced_at = identity, self._clock.now
            follower.relayed = parent is not None
            self._followers = {**self._followers, number: follower}
            self._changed.notify_all()
        if parent is None:
            return control.Accepted(self.identity)
        above = others[parent]
        return control.Accepted(self.identity, above.address, str(above.identity))

    def joined(self, follower: FollowerSession) -> None:
        """Begins to send the messages for all to a follower."""
        if not follower.relayed:
            self._below.append(follower)

    def received(self, follower: FollowerSession, message: object) -> None:
        """Books a follower's message."""
        with self._changed:
            follower.update(message, self._clock.now)
            self._changed.notify_all()
        if isinstance(message, control.MessageArrived):
            self.on_report(follower.identity.process_id, message.data)
        elif isinstance(message, control.FollowerState) and message.error:
            follower.send(control.FailureReceived())

    def ended(self, follower: FollowerSession) -> None:
        """Notes the end of a session, perhaps of one that was not admitted."""
        with self._changed:
            if not follower.name:
                self._refused.append(f"{follower.failure}")
            elif not follower.problem and not (follower.state.leaving and self._closing):
                left = "left unasked" if follower.state.leaving else ""
                follower.lost = left or f"{follower.failure}"
            self._changed.notify_all()

    # ---------------------------------------------------------------- watching (own thread)
    def _watch(self) -> None:
        """Looks for followers that are gone, silent or stuck, until the deployment ends."""
        tick = min(control.heartbeat_interval(self.cluster), _LOOK_SECONDS)
        drain_told = False
        while not self._closing:
            now = self._clock.tick()
            with self._changed:
                followers = list(self._followers.values())
                for follower in followers:
                    if doubt := follower.doubt(self.cluster.suspect_seconds):
                        logger.warning("%s", doubt)
                drain = next((each for each in followers if each.state.drain), None)
                failed = self._find_failure(now)
                if (drain is None or drain_told) and not failed:
                    self._changed.wait(tick)
                    continue
            if drain is not None and not drain_told:
                drain_told = True
                self._on_drain(f"{drain.identity}: {drain.state.drain}")
            if failed and self.failure is not None:
                logger.error("%s; all followers: %s", self.failure, self.describe())
                self._on_failure(self.failure)

    def _find_failure(self, now: float) -> bool:
        """Looks for the first failure; returns whether one was found. Needs the lock."""
        if self._closing or self.failure is not None:
            return False
        text = find_failure(
            self._followers.values(),
            now,
            last=self._next - 1,
            cluster=self.cluster,
            step_error=self._step_error,
        )
        if text:
            self.failure = EngineFailedError(text)
            self._changed.notify_all()
        return bool(text)
