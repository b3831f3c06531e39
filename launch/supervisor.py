"""Starts processes of this host again when they die, as a service manager does on a cluster.

The processes of one runtime die and start together.

Used by `fleet.py` and `runtimes.py`.
"""

import os
import resource
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from processes import STOP_SECONDS, describe, end, free_ports, print_output, say, start

from jaxserve.commands import priority

MOST_RESTARTS_A_MINUTE = 120
LAST_WORDS_SECONDS = 10.0
"""Seconds for the other processes of a runtime to report, after one of them has died."""
LOOK_SECONDS = 0.02
RETRY_SECONDS = 1.0
"""Seconds before another try if a process could not be created."""
START_NICENESS = 5
"""Niceness added during a restart of a process whose work other processes do meanwhile: it gets a
third of the CPU share of a serving process."""
AWAITED_NICENESS = 1
"""Niceness added during a restart for which requests wait. Small, but not 0: a process that serves
is recognised by having taken this niceness back."""
PATIENCE_SECONDS = 10.0
"""Seconds after which any start counts as awaited: next to busy streams it could take minutes."""
CAP_SYS_NICE = 23
"""Number of the capability that lowers a niceness (capabilities(7))."""


class Member(NamedTuple):
    """A process that the supervisor runs.

    Attributes:
      name: name for human readers.
      arguments: its own arguments, after the common command.
      runtime: number of its runtime; processes of one runtime share it.
      listens: address on which it listens, if that differs from the dialled address.
      dialled: address that other processes dial.
      pages: both addresses of a prefill worker's pages server.
      role: role of a worker.
      spared_by: role of the workers that do its work while it is gone; empty: requests wait for it.
    """

    name: str
    arguments: list[str]
    runtime: int
    listens: str = ""
    dialled: str = ""
    pages: tuple[str, ...] = ()
    role: str = ""
    spared_by: str = ""


def with_peers(workers: Sequence[Member]) -> list[Member]:
    """Adds arguments so that each worker serves its weights, and loads from the others on start."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(workers))]
    given = []
    for worker, address in zip(workers, addresses, strict=True):
        own = [f"weights.address={address}", f"weights.peers={addresses}"]
        arguments = [word for setting in own for word in ("--set", setting)]
        given.append(worker._replace(arguments=[*worker.arguments, *arguments]))
    return given


class Restarts(NamedTuple):
    """Rules for restarting processes.

    Attributes:
      members: numbers of the processes that are restarted.
      seconds: delay between a death and the restart.
      hopeless: exit codes after which a restart would fail in the same way.
    """

    members: Collection[int]
    seconds: float
    hopeless: Collection[int] = (2,)


class Supervisor:
    """Runs processes until the first one, which the others serve, has ended.

    Args:
      command: common command line, before each process's own arguments.
      members: the processes.
      restarts: rules for restarting them.
      pin: bind process i to the i-th allowed core.
      logs: folder for their output, one file each (`0.log`); None: output is printed here.
    """

    def __init__(
        self,
        command: Sequence[str],
        members: Sequence[Member],
        restarts: Restarts,
        *,
        pin: bool = False,
        logs: Path | None = None,
    ):
        self._command, self._members, self._restarts = command, members, restarts
        self._pin, self._logs = pin, logs
        self._environment: Mapping[str, str] = {
            **os.environ,
            "JAXSERVE_CLUSTER_TOKEN": secrets.token_hex(16),
        }
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()  # for good
        self._due: dict[int, float] = {}  # runtime → when it is started again
        self._kill_at: dict[int, float] = {}  # runtime → when the rest of it is ended
        self._starting: dict[int, float] = {}  # those that are nicer → until when they may be
        self._recent: deque[float] = deque()
        self._signals: list[int] = []

    def run(self) -> int:
        """Starts all, and returns the exit code of the first."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda n, frame: self._signals.append(n))
        try:
            for number in range(len(self._members)):
                self._begin(number)
            told = False
            while not self._over(told):
                if self._signals:
                    told = True
                    self._children[0].send_signal(self._signals.pop(0))
                if not told:
                    if not self._look():
                        return 1
                    self._start_due()
                    self._hurry()
                time.sleep(LOOK_SECONDS)
            code = self._children[0].returncode
            return 128 - code if code < 0 else code
        finally:
            end([child for _, child in sorted(self._children.items())])
            time.sleep(STOP_SECONDS / 50)  # for the last lines

    def _over(self, told: bool) -> bool:
        first = self._children[0].poll()
        return first is not None and (told or first == 0 or 0 not in self._restarts.members)

    def _begin(self, number: int, again: bool = False) -> None:
        member = self._members[number]
        environment, nicer = self._environment, 0
        if again and member.spared_by and may_become_less_nice():
            environment = {**environment, priority.VARIABLE: f"{os.nice(0)}"}
            nicer = START_NICENESS
            self._starting[number] = time.monotonic() + PATIENCE_SECONDS
        child = start(
            [*self._command, *member.arguments],
            environment,
            number,
            self._pin,
            None if self._logs is None else self._logs / f"{number}.log",
            nicer,
        )
        self._children[number] = child
        if self._logs is None:
            print_output({number: child})
        place = f", listens on {member.listens} for {member.dialled}" if member.listens else ""
        if member.pages:
            place += ", pages on {} for {}".format(*member.pages)
        say(f"process {number}: {member.name}, pid {child.pid}{place}")

    def _serves(self, number: int) -> bool:
        """Whether a process is ready, as far as its priority shows."""
        child = self._children[number]
        if child.poll() is not None:
            return False
        return os.getpriority(os.PRIO_PROCESS, child.pid) <= os.nice(0)

    def _hurry(self) -> None:
        """Raises the priority of starts for which requests wait, or which take long."""
        for number, until in list(self._starting.items()):
            member = self._members[number]
            others = [
                n
                for n, other in enumerate(self._members)
                if other.role == member.spared_by and other.runtime != member.runtime
            ]
            if any(map(self._serves, others)) and time.monotonic() < until:
                continue
            del self._starting[number]
            if self._children[number].poll() is None and not self._serves(number):
                niceness = os.nice(0) + AWAITED_NICENESS
                priority.renice(self._children[number].pid, niceness, AWAITED_NICENESS)

    def _look(self) -> bool:
        """Notices processes that have ended; False if all is to end."""
        for number, child in self._children.items():
            code = child.poll()
            runtime = self._members[number].runtime
            if code is None or number in self._ended:
                continue
            if number not in self._restarts.members:
                said = self._said(number, code)
                say(f"{said}; it is not started again (--restart)" if number else said)
                self._ended.add(number)
            elif runtime not in self._due:
                say(f"{self._said(number, code)}; starting it again")
                now = time.monotonic()
                while self._recent and self._recent[0] < now - 60.0:
                    self._recent.popleft()
                if len(self._recent) >= MOST_RESTARTS_A_MINUTE or code in self._restarts.hopeless:
                    say(f"process {number} does not stay; ending everything")
                    return False
                self._recent.append(now)
                self._due[runtime] = now + self._restarts.seconds
                self._kill_at[runtime] = now + LAST_WORDS_SECONDS
        return True

    def _said(self, number: int, code: int) -> str:
        return f"process {number} ({self._members[number].name}) ended with {describe(code)}"

    def _start_due(self) -> None:
        """Starts runtimes again whose time has come, and of which nothing is left."""
        now = time.monotonic()
        for runtime, due in list(self._due.items()):
            own = [n for n, member in enumerate(self._members) if member.runtime == runtime]
            left = [n for n in own if self._children[n].poll() is None]
            if left and now > self._kill_at[runtime]:
                for number in left:
                    self._children[number].kill()
            if not left and now >= due:
                del self._due[runtime]
                try:
                    for number in own:
                        self._begin(number, again=True)
                except (OSError, subprocess.SubprocessError) as error:  # no process can be made
                    say(f"runtime {runtime} could not be started: {error}; trying again")
                    self._due[runtime] = self._kill_at[runtime] = now + RETRY_SECONDS


def may_become_less_nice() -> bool:
    """Whether a process of this user that has been nicer may go back to the niceness of this one:
    by a capability, or by the limit that the system gives (`ulimit -e`)."""
    status = Path("/proc/self/status")
    if not status.exists():  # no Linux
        return False
    fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
    capable = int(fields["CapEff"], 16) >> CAP_SYS_NICE & 1
    return bool(capable) or 20 - resource.getrlimit(resource.RLIMIT_NICE)[0] <= os.nice(0)
