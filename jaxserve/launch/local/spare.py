"""Spares: processes that have done in advance what workers do at their start, and wait.

    python -u -m jaxserve.launch.local.spare jaxserve.serve
    python -u -m jaxserve.launch.local.spare jaxserve.serve --config demo-fleet-afd --role ffn

The first imports the modules of a worker of any role. It has no devices and starts no JAX backend.
The second is warm: one of the processes of a runtime in reserve, with their arguments. It also does
the work of `fleet/prepared.py`.

A spare says over a socket, its standard input, when it is ready. It gets arguments, variables and
outputs in one message, and then calls `main` of the module. It ends when the socket closes without
a message. `children.py` starts processes from it, and `supervisor.py` replaces spares that were
taken.
"""

import contextlib
import importlib
import itertools
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import SIGTERM
from typing import NamedTuple

import msgspec

from jaxserve.commands import cores
from jaxserve.commands.children import started
from jaxserve.ports import free_port

PARTS = ("jaxserve.fleet.ffn_group", "jaxserve.fleet.ffn_runtime", "jaxserve.link.transports.pull")
"""Modules that a worker of any role imports. With those of the engine and of servers, 0.4 s more,
an ffn worker would hold 23 MB more than one that was started without a spare."""
PIECE = 1 << 16
READY = b"1"
"""Word of a spare that has prepared everything."""
NICENESS, MOST_NICENESS = 5, 19
"""Niceness added to a spare. While it prepares, it gets a third of the CPU share of a serving
process, and a seventieth while another process starts for which requests may wait."""
MOST_ENDED = 3
"""Spares that may end by themselves before no more are started."""

PartCommand = tuple[list[str], dict[str, str]]
"""Arguments of a process, and variables."""


class Spare(NamedTuple):
    """A process in reserve.

    Attributes:
      child: the process.
      own: this end of its socket, which never blocks.
      common: arguments of every process.
      variables: variables whose values it keeps: processes of a warm runtime have joined JAX's
        coordination service at an address of their own.
      niced: what was added to its niceness.
    """

    child: subprocess.Popen[bytes]
    own: socket.socket
    common: list[str]
    variables: dict[str, str]
    niced: int

    @property
    def is_ready(self) -> bool:
        """True once it has prepared everything, while it lives."""
        with contextlib.suppress(OSError):  # nothing has come, or it has ended
            word = self.own.recv(1, socket.MSG_PEEK)
            return word == READY and self.child.poll() is None
        return False

    def become(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: Sequence[int],
        core: int | None,
        nicer: int,
    ) -> subprocess.Popen[bytes] | None:
        """Makes the spare, which is ready, the process with these arguments; None if it has ended.

        Args:
          environment: all variables of the process.
          outputs: file descriptors of its standard output and standard error.
          core, nicer: as for `commands.children.started`.
        """
        part: PartCommand = [*self.common, *arguments], {**environment, **self.variables}
        with self.own, contextlib.suppress(OSError):
            if core is not None:
                for thread in os.listdir(f"/proc/{self.child.pid}/task"):
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.sched_setaffinity(int(thread), {core})
            if self.niced:
                cores.renice(self.child.pid, os.nice(0) + nicer, nicer)
            self.own.recv(1)  # its word: with bytes unread, closing would reset the connection
            message = msgspec.json.encode(part)
            if socket.send_fds(self.own, [message], outputs) == len(message):
                return self.child
        self.child.kill()
        return None

    def end(self) -> None:
        """Ends the process, which holds nothing."""
        self.own.close()
        self.child.kill()


class Spares:
    """Keeps spares for a supervisor, which must call all methods from its main thread.

    Args:
      command: common command line of the processes: `python -u -m MODULE ARGUMENT…`.
      environment: common variables of the processes.
      reserves: role → arguments and variables of the processes of a runtime of that role; under ""
        spares for any role, without arguments. Spares of a role are taken and end together.
      niced: whether a spare may be nicer than the process that it becomes.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        reserves: Mapping[str, Sequence[PartCommand]],
        niced: bool,
    ):
        self._common, self._environment = list(command[4:]), environment
        self._command = [*command[:3], __name__, command[3]]
        self._reserves, self._nicer = reserves, NICENESS if niced else 0
        self._waiting: dict[str, list[Spare]] = {role: [] for role in reserves}
        self._ended = 0
        self._held = False

    def hold(self) -> None:
        """Leaves the cores to a worker that starts, until `fill`: slows spares down that still
        prepare, or ends them where they could not become faster again."""
        if self._nicer:
            self._held = True
            self._renice(MOST_NICENESS)
            return
        for role, waiting in self._waiting.items():
            if not all(spare.is_ready for spare in waiting):
                self._end(role)

    def _renice(self, nicer: int) -> None:
        for spare in itertools.chain(*self._waiting.values()):
            cores.renice(spare.child.pid, os.nice(0) + nicer, nicer)

    def fill(self) -> Sequence[subprocess.Popen[bytes]]:
        """Starts missing spares of one role. Returns spares that have ended by themselves."""
        ended = []
        if self._held:
            self._held = False
            self._renice(self._nicer)
        for role, waiting in self._waiting.items():
            if dead := [spare.child for spare in waiting if spare.child.poll() is not None]:
                ended += dead
                self._ended += 1
                self._end(role)
        for role, parts in self._reserves.items():
            waiting = self._waiting[role]
            if len(waiting) < len(parts) and self._ended < MOST_ENDED:
                apart = role and len(parts) > 1
                own = {"JAXSERVE_COORDINATOR": f"127.0.0.1:{free_port()}"} if apart else {}
                try:
                    for part in parts[len(waiting) :]:
                        waiting.append(self._start(part, own))
                except (OSError, subprocess.SubprocessError):  # no process can be made
                    self._end(role)
                    raise
                break
        return ended

    def _start(self, part: PartCommand, variables: dict[str, str]) -> Spare:
        arguments, environment = part
        own, theirs = socket.socketpair()
        own.setblocking(False)
        with theirs:
            child = started(
                [*self._command, *(self._common if arguments else []), *arguments],
                SIGTERM,
                nicer=self._nicer,
                env={**self._environment, **environment, **variables},
                stdin=theirs.fileno(),
            )
        return Spare(child, own, self._common, variables, self._nicer)

    def take(self, role: str, count: int) -> list[Spare]:
        """Takes ready spares for a runtime with this number of processes. Returns fewer where they
        are missing; spares of a role are taken together or not at all."""
        waiting = self._waiting.get(role, self._waiting.get("", []))
        taken = [spare for spare in waiting if spare.is_ready][:count]
        if role in self._waiting and len(taken) < count:
            return []
        waiting[:] = [spare for spare in waiting if spare not in taken]
        return taken

    def _end(self, role: str) -> None:
        for spare in self._waiting[role]:
            spare.end()
        for spare in self._waiting[role]:
            spare.child.wait()
        self._waiting[role].clear()

    def close(self) -> None:
        """Ends the spares, which hold nothing."""
        for role in self._waiting:
            self._end(role)


def main(module: str, *given: str) -> None:
    """Prepares, waits for a part, and plays it; returns if the socket closes first."""
    for name in PARTS:
        importlib.import_module(name)
    prepared = None
    if given:
        from jaxserve.fleet.prepared import prepare

        prepared = prepare(given)
    print(f"[local] a spare is ready, pid {os.getpid()}", file=sys.stderr, flush=True)
    with socket.socket(fileno=os.dup(0)) as waiting:
        waiting.send(READY)
        message, outputs, _, _ = socket.recv_fds(waiting, PIECE, 2)
        while piece := waiting.recv(PIECE):
            message += piece
    if not message:
        return
    arguments, environment = msgspec.json.decode(message, type=PartCommand)
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *outputs), range(3), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    # A worker that becomes a stand-in runs its own command line again.
    sys.orig_argv[1:] = ["-u", "-m", module, *arguments]
    run = pkgutil.resolve_name(f"{module}:main")
    sys.exit(run(arguments, prepared) if prepared else run())


if __name__ == "__main__":
    main(*sys.argv[1:])
