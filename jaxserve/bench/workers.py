"""Runs functions of a benchmark in processes of their own.

JAX fixes the number of devices once per process, so every setting gets its own process. No process
outlives its deadline or the benchmark.
"""

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.commands.children import Child
from jaxserve.errors import JaxserveError

_LOOK_SECONDS = 0.05
_BARRIER_SECONDS, _LEADER_STAYS_SECONDS = 60.0, 3.0


class BenchError(JaxserveError):
    """A measurement failed or was late; for a process, the message has the end of its output."""


class Task(msgspec.Struct, frozen=True):
    """Function to run in a process of its own.

    Attributes:
      function: function of a module; its result has to be representable in JSON.
      arguments: its keyword arguments, likewise.
      devices: number of simulated CPU devices; 0: as the environment says.
      core: the only core that the process may use; None: all cores of this process.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = {}
    devices: int = 0
    core: int | None = None

    def command(self, *result: str) -> list[str]:
        """Command line of the process. Without a result file, the function reads questions from
        standard input and prints answers (see `Helper`)."""
        given = msgspec.json.encode(self.arguments).decode()
        function = self.function.__module__, self.function.__name__
        return [sys.executable, "-m", "jaxserve.bench.workers", *function, given, *result]

    def environment(self) -> dict[str, str]:
        """Environment of the process: that of this one, on CPUs unless it names a platform."""
        found = {"JAX_PLATFORMS": "cpu", **os.environ}
        return found | ({"JAX_NUM_CPU_DEVICES": f"{self.devices}"} if self.devices else {})


def run_worker(worker: Task, seconds: float) -> Any:
    """Runs one worker and returns the function's result.

    Raises:
      BenchError: it failed, or did not end within `seconds`.
    """
    return run_workers([worker], seconds)[0]


def run_workers(workers: Sequence[Task], seconds: float) -> list[Any]:
    """Runs workers concurrently and returns the results of the functions that returned, else None.

    Raises:
      BenchError: one failed, or they did not all end within `seconds`. None is left running.
    """
    deadline = time.monotonic() + seconds
    with (
        tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        results = [Path(folder, f"{number}.json") for number in range(len(workers))]
        children = []
        for worker, result in zip(workers, results, strict=True):
            words, said = worker.command(str(result))[1:], result.with_suffix(".txt")
            child = Child(words, said, core=worker.core, environment=worker.environment())
            stack.callback(child.end)
            children.append(child)
        while (codes := [child.code for child in children]).count(None):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        # A failure first: it is why the others are late.
        for number in sorted(range(len(codes)), key=lambda number: not codes[number]):
            if (code := codes[number]) != 0:
                why = f"ended with {code}" if code else f"took more than {seconds:g} s"
                name = " ".join(workers[number].command()[3:])
                lines = [f"  {line}" for line in children[number].last_words(20)]
                raise BenchError("\n".join([f"{name} {why}:", *lines]))
        return [msgspec.json.decode(one.read_bytes()) if one.exists() else None for one in results]


class Helper:
    """Child process that reads questions and prints answers, one line of JSON each.

    It has to end when its standard input does. It may be started while threads run here.

    Args:
      command: command line; `Task.command` gives that of a function.
      seconds: deadline of the whole conversation.
    """

    def __init__(self, command: Sequence[str], seconds: float):
        self._command, self._seconds = " ".join(command[1:]), seconds
        # In the session of this process: schedulers share the cores between sessions.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._late = threading.Timer(seconds, self._process.kill)
        self._late.start()

    def __enter__(self) -> "Helper":
        return self

    def __exit__(self, *exception: object) -> None:
        self._late.cancel()
        self._process.kill()
        self._process.communicate()

    def ask(self, question: object) -> Any:
        """Sends a question and returns the answer; raises as `answer`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(msgspec.json.encode(question).decode() + "\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Returns the next answer.

        Raises:
          BenchError: the process ended instead, or was ended because it was late.
        """
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return msgspec.json.decode(line)
        raise BenchError(f"{self._command}: ended early, or after more than {self._seconds:g} s")


def say(answer: object) -> None:
    """In a helper: prints an answer."""
    print(msgspec.json.encode(answer).decode(), flush=True)


def asked() -> Iterator[Any]:
    """In a helper: yields the questions until the end of standard input."""
    yield from map(msgspec.json.decode, sys.stdin)


def two_cores(bench: str) -> list[int]:
    """Returns two cores, one for each process of a pair.

    Raises:
      BenchError: this process may use only one.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise BenchError(f"{bench}: needs two cores")
    return cores


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Waits until the condition is true. Raises BenchError with what was missing if it is late."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: waited for more than {seconds:g} s")
        time.sleep(_LOOK_SECONDS)


def barrier(name: str, seconds: float = _BARRIER_SECONDS) -> None:
    """In a worker: waits for the others of its runtime; JAX's public one wants equal device counts.

    Raises:
      JaxRuntimeError: they did not come in time.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier(name, int(seconds * 1000))


def leave_runtime(process: int) -> None:
    """In a worker of a runtime: waits for the others and leaves. Process 0 goes last, since JAX
    aborts a process whose coordination service is gone."""
    import jax

    barrier("measured")
    if process == 0:
        time.sleep(_LEADER_STAYS_SECONDS)
    jax.distributed.shutdown()


def _main(module: str, name: str, arguments: str, result: str = "") -> None:
    found = getattr(importlib.import_module(module), name)(**msgspec.json.decode(arguments))
    if result:
        Path(result).write_bytes(msgspec.json.encode(found))
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit would wait for threads of servers


if __name__ == "__main__":
    _main(*sys.argv[1:])
