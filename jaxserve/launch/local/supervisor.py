"""Runs the processes of a deployment on this host, and starts those again that die, as a service
manager does on a cluster. The processes of one runtime die and start together. Children report that
they are ready as to systemd.
"""

import contextlib
import itertools
import math
import os
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxserve.commands import cores
from jaxserve.launch.local.children import STOP_SECONDS, describe, end, say, start
from jaxserve.launch.local.members import Member
from jaxserve.launch.local.spare import PartCommand, Spare, Spares

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, which the system adds (unix(7))."""


class Readiness:
    """A socket to which processes report as to systemd (sd_notify(3)).

    Attributes:
      address: value of `NOTIFY_SOCKET` for the children: a name without a file (unix(7)), on Linux
        alone.
    """

    def __init__(self) -> None:
        self.address = f"@jaxserve-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if sys.platform == "linux":  # elsewhere no process reports
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{self.address[1:]}")

    def reports(self) -> Iterator[int]:
        """Yields the ids of processes that have become ready since the last call."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        with contextlib.suppress(BlockingIOError):  # nothing is left
            while True:
                message, ((*_, sender),), *_ = self._socket.recvmsg(64, room)
                if message == b"READY=1":
                    yield _CREDENTIALS.unpack(sender)[0]

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


MOST_RESTARTS_A_MINUTE = 120
LAST_WORDS_SECONDS = 10.0
"""Seconds for the other processes of a runtime to report, after one of them has died."""
LOOK_SECONDS = 0.02
START_SECONDS = 120.0
"""Seconds after which a start no longer keeps spares from being prepared."""
RETRY_SECONDS = 1.0
"""Seconds before another try if a process could not be created."""
START_NICENESS = 5
"""Niceness added during a restart of a process whose work other processes do meanwhile: it gets a
third of the CPU share of a serving process."""
PATIENCE_SECONDS = 10.0
"""Seconds after which any start counts as awaited: next to busy streams it could take minutes."""
CAP_SYS_NICE = 23
"""Number of the capability that lowers a niceness (capabilities(7))."""


class Rules(NamedTuple):
    """Rules for the supervisor to follow when a process ends.

    Attributes:
      restarted: numbers of the processes that are started again.
      seconds: delay between a death and the restart.
      hopeless: exit codes after which a restart would fail in the same way.
      grace: seconds that the first process has to end after another one that is not started again;
        infinite: it need not.
      followers: seconds that the others have to end after the first.
      spares: spares that become the processes that are started again, except the first: those of
        the largest runtime, which have "imported" what any role needs, or those of a runtime of
        each role, which are "warm" (`fleet/prepared.py`).
    """

    restarted: Collection[int] = ()
    seconds: float = 0.5
    hopeless: Collection[int] = (2,)
    grace: float = math.inf
    followers: float = 0.0
    spares: Literal["none", "imported", "warm"] = "none"


class Supervisor:
    """Runs processes until the first one, which the others serve, has ended.

    Args:
      command: common command line, before each process's own arguments.
      members: the processes.
      rules: what follows when one ends.
      pin: bind process i to the i-th allowed core.
      logs: folder for their output, one file each (`0.log`); None: output is printed here.
    """

    def __init__(
        self,
        command: Sequence[str],
        members: Sequence[Member],
        rules: Rules,
        *,
        pin: bool = False,
        logs: Path | None = None,
    ):
        self._command, self._members, self._rules = command, members, rules
        self._pin, self._logs = pin, logs
        self._environment: Mapping[str, str] = {
            **os.environ,
            "JAXSERVE_CLUSTER_TOKEN": secrets.token_hex(16),
            "NOTIFY_SOCKET": (readiness := Readiness()).address,
        }
        self._readiness = readiness
        self._ready: set[int] = set()
        reserves, niced = reserves_of(members, rules), may_become_less_nice()
        self._spares = Spares(command, self._environment, reserves, niced)
        self._calm = 0.0  # when spares may be prepared
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()  # for good
        self._due: dict[int, float] = {}  # runtime → when it is started again
        self._kill_at: dict[int, float] = {}  # runtime → when the rest of it is ended
        self._starting: dict[int, float] = {}  # those that are nicer → until when they may be
        self._recent: deque[float] = deque()
        self._signals: list[int] = []
        self._told = 0  # signals that have been passed on
        self._deadline = math.inf  # when those that are left are ended

    def run(self) -> int:
        """Starts all; returns the first one's exit code, 128 + its signal, or 1 if ended here."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda n, frame: self._signals.append(n))
        try:
            for number in range(len(self._members)):
                self._begin(number)
            while len(self._ended) < len(self._members):
                if self._signals and not self._tell(self._signals.pop(0)):
                    break
                if not self._look():
                    return 1
                if time.monotonic() > self._deadline:
                    self._name_late()
                    break
                self._hear()
                if not self._told:
                    self._start_due()
                    self._hurry()
                    self._prepare()
                time.sleep(LOOK_SECONDS)
            code = self._children[0].poll()
            return 1 if code is None else 128 - code if code < 0 else code
        finally:
            self._readiness.close()
            self._spares.close()
            end([child for _, child in sorted(self._children.items())])
            time.sleep(STOP_SECONDS / 50)  # for the last lines

    def _tell(self, number: int) -> bool:
        """Passes a signal to the first process, which ends the others; False after the third."""
        self._told += 1
        if self._told > 2:
            say("ending everything")
            return False
        say(f"{signal.Signals(number).name}: telling process 0")
        self._children[0].send_signal(number)
        return True

    def _name_late(self) -> None:
        late = [number for number, child in self._children.items() if child.poll() is None]
        if late and self._rules.followers:
            names = ", ".join(map(str, sorted(late)))
            say(f"still there: process {names}; ending what is left")

    def _begin(self, number: int, again: bool = False, spare: Spare | None = None) -> None:
        member = self._members[number]
        environment, nicer = {**self._environment, **member.environment}, 0
        self._ready.discard(number)
        if again and member.spared_by and may_become_less_nice():
            nicer = START_NICENESS
            self._starting[number] = time.monotonic() + PATIENCE_SECONDS
        log = None if self._logs is None else self._logs / f"{number}.log"
        own = member.arguments, environment, number
        child = start(self._command, *own, self._pin, log, nicer, spare)
        self._children[number] = child
        self._calm = time.monotonic() + START_SECONDS
        place = f", listens on {member.listens} for {member.dialled}" if member.listens else ""
        if member.pages:
            place += ", pages on {} for {}".format(*member.pages)
        if member.name:
            say(f"process {number}: {member.name}, pid {child.pid}{place}")

    def _hear(self) -> None:
        """Notices processes that have become ready, and gives them the priority of serving ones."""
        for pid in self._readiness.reports():
            for number, child in self._children.items():
                if child.pid == pid:
                    self._ready.add(number)
                    if self._starting.pop(number, None) is not None:
                        cores.renice(pid, os.nice(0), 0)
            if len(self._ready | self._ended) == len(self._members):
                self._calm = 0.0

    def _prepare(self) -> None:
        """Replaces spares that were taken or ended, while no start could compete with them."""
        if self._due or time.monotonic() < self._calm:
            return
        try:
            for spare in self._spares.fill():
                say(f"a spare, pid {spare.pid}, ended with {describe(spare.returncode)}")
        except (OSError, subprocess.SubprocessError) as error:  # no process can be made
            say(f"no spare: {error}")
            self._calm = time.monotonic() + RETRY_SECONDS

    def _hurry(self) -> None:
        """Raises the priority of starts for which requests wait, or which take long."""
        for number, until in list(self._starting.items()):
            member = self._members[number]
            others = [
                n
                for n, other in enumerate(self._members)
                if other.role == member.spared_by and other.runtime != member.runtime
            ]
            serve = (self._children[n].poll() is None for n in others if n in self._ready)
            if any(serve) and time.monotonic() < until:
                continue
            del self._starting[number]
            if self._children[number].poll() is None:
                cores.renice(self._children[number].pid, os.nice(0), 0)

    def _look(self) -> bool:
        """Notices processes that have ended; False if all is to end."""
        now = time.monotonic()
        for number, child in self._children.items():
            code = child.poll()
            runtime = self._members[number].runtime
            if code is None or number in self._ended:
                continue
            final = self._told or (code == 0 and not number)
            if final or number not in self._rules.restarted:
                stays = "; it is not started again (--restart)" if number else ""
                if self._rules.grace < math.inf:
                    stays = ""
                if code or (stays and not self._told):
                    say(self._said(number, code) + stays)
                self._ended.add(number)
                seconds = self._rules.grace if number else self._rules.followers
                self._deadline = min(self._deadline, now + seconds)
            elif runtime not in self._due:
                say(f"{self._said(number, code)}; starting it again")
                while self._recent and self._recent[0] < now - 60.0:
                    self._recent.popleft()
                if len(self._recent) >= MOST_RESTARTS_A_MINUTE or code in self._rules.hopeless:
                    say(f"process {number} does not stay; ending everything")
                    return False
                self._recent.append(now)
                self._due[runtime] = now + self._rules.seconds
                self._kill_at[runtime] = now + LAST_WORDS_SECONDS
                self._spares.hold()
        return True

    def _said(self, number: int, code: int) -> str:
        name = self._members[number].name
        return f"process {number}{f' ({name})' if name else ''} ended with {describe(code)}"

    def _start_due(self) -> None:
        """Starts each runtime whose restart is due and whose processes have all ended."""
        now = time.monotonic()
        for runtime, due in list(self._due.items()):
            own = [n for n, member in enumerate(self._members) if member.runtime == runtime]
            left = [n for n in own if self._children[n].poll() is None]
            if left and now > self._kill_at[runtime]:
                for number in left:
                    self._children[number].kill()
            if not left and now >= due:
                del self._due[runtime]
                role = self._members[own[0]].role
                spares = self._spares.take(role, len(own)) if own[0] else []
                try:
                    for number, spare in itertools.zip_longest(own, spares):
                        self._begin(number, again=True, spare=spare)
                except (OSError, subprocess.SubprocessError) as error:  # no process can be made
                    for spare in spares:
                        spare.end()
                    say(f"runtime {runtime} could not be started: {error}; trying again")
                    self._due[runtime] = self._kill_at[runtime] = now + RETRY_SECONDS


def reserves_of(members: Sequence[Member], rules: Rules) -> dict[str, list[PartCommand]]:
    """Returns what spares do in advance, as `Spares` takes it."""
    runtimes: dict[int, list[Member]] = {}
    for number in rules.restarted:
        if number and rules.spares != "none":
            runtimes.setdefault(members[number].runtime, []).append(members[number])
    if rules.spares == "warm":
        return {
            own[0].role: [(one.arguments, dict(one.environment)) for one in own]
            for own in runtimes.values()
        }
    return {"": [([], {})] * max(map(len, runtimes.values()), default=0)}


def may_become_less_nice() -> bool:
    """Whether a process of this user that has been nicer may go back to the niceness of this one:
    by a capability, or by the limit that the system gives (`ulimit -e`)."""
    status = Path("/proc/self/status")
    if not status.exists():  # no Linux
        return False
    fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
    capable = int(fields["CapEff"], 16) >> CAP_SYS_NICE & 1
    return bool(capable) or 20 - resource.getrlimit(resource.RLIMIT_NICE)[0] <= os.nice(0)
