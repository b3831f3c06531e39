"""Spares: processes that have imported what workers share, and wait for the arguments of one.

    python -u -m jaxserve.launch.local.spare jaxserve.serve

Any worker of a deployment can take one when a process has died; until then a spare has no devices
and has started no JAX backend. It gets arguments, variables and outputs in one message over a
socket, its standard input, and then runs the module as `python -m` would. It ends when the socket
closes without one. `children.py` starts processes from it, and `supervisor.py` replaces those that
were taken.
"""

import contextlib
import importlib
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import SIGTERM

import msgspec

from jaxserve.commands import priority
from jaxserve.commands.children import started

PARTS = ("jaxserve.fleet.ffn_group", "jaxserve.fleet.ffn_runtime", "jaxserve.link.transports.pull")
"""Modules that a worker of any role imports. With those of the engine and of servers, 0.4 s more,
an ffn worker would hold 23 MB more than one that was started without a spare."""
PIECE = 1 << 16
NICENESS = 5
"""Niceness of a spare: while it imports, it gets a third of the CPU share of a serving process."""
MOST_ENDED = 3
"""Spares that may end by themselves before no more are started."""

Part = tuple[list[str], dict[str, str]]
"""Arguments of the process that a spare becomes, and the variables that it alone has."""


class Spares:
    """Keeps spares for a supervisor, which must call all methods from its main thread.

    Args:
      command: common command line of the processes: `python -u -m MODULE ARGUMENT…`.
      environment: common variables of the processes.
      count: number of spares: processes of the largest runtime that may be started again.
      niced: whether a spare may be nicer than the process that it becomes.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], count: int, niced: bool
    ):
        self._common, self._environment = list(command[4:]), environment
        self._command = [*command[:3], __name__, command[3]]
        self._count, self._nicer = count, NICENESS if niced else 0
        self._waiting: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._ended = 0

    def fill(self) -> Sequence[subprocess.Popen[bytes]]:
        """Starts the spares that are missing. Returns spares that have ended by themselves."""
        ended = [(child, own) for child, own in self._waiting if child.poll() is not None]
        for one in ended:
            one[1].close()
            self._waiting.remove(one)
            self._ended += 1
        if len(self._waiting) < self._count and self._ended < MOST_ENDED:
            own, theirs = socket.socketpair()
            with theirs:
                child = started(
                    self._command,
                    SIGTERM,
                    nicer=self._nicer,
                    env=self._environment,
                    stdin=theirs.fileno(),
                )
            self._waiting.append((child, own))
        return [child for child, _ in ended]

    def take(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: Sequence[int],
        core: int | None,
        nicer: int,
    ) -> subprocess.Popen[bytes] | None:
        """Makes a spare the process with these arguments; None if no spare lives.

        Args:
          environment: all variables of the process.
          outputs: file descriptors of its standard output and standard error.
          core, nicer: as for `commands.children.started`.
        """
        differing = environment.items() - self._environment.items()
        part: Part = [*self._common, *arguments], dict(differing)
        while self._waiting:
            child, own = self._waiting.pop(0)
            with own, contextlib.suppress(OSError):  # it has ended
                if core is not None:
                    os.sched_setaffinity(child.pid, {core})
                if self._nicer:
                    priority.renice(child.pid, os.nice(0) + nicer, nicer)
                socket.send_fds(own, [msgspec.json.encode(part)], outputs)
                return child
        return None

    def close(self) -> None:
        """Ends the spares, which hold nothing."""
        for child, own in self._waiting:
            own.close()
            child.kill()
            child.wait()
        self._waiting.clear()


def main(module: str) -> None:
    """Imports, waits for a part, and plays it; returns if the socket closes first."""
    for name in PARTS:
        importlib.import_module(name)
    with socket.socket(fileno=os.dup(0)) as waiting:
        message, outputs, _, _ = socket.recv_fds(waiting, PIECE, 2)
        while piece := waiting.recv(PIECE):
            message += piece
    if not message:
        return
    arguments, environment = msgspec.json.decode(message, type=Part)
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *outputs), range(3), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    # A worker that becomes a stand-in runs its own command line again.
    sys.orig_argv[1:] = ["-u", "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
