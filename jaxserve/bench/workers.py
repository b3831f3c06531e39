"""Runs the workers of a bench: processes that measure and write their result to a file.

JAX fixes the number of devices once per process, so every setting gets its own process. No worker
outlives its deadline or the bench.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.commands.children import ending_with_parent
from jaxserve.errors import JaxserveError

LAUNCHER = Path(__file__).resolve().parents[2] / "launch" / "local.py"
"""What starts a deployment's processes on this host; in a checkout alone."""
_LOOK_SECONDS = 0.05
_BARRIER_SECONDS = 60.0


class BenchError(JaxserveError):
    """A worker failed or was late; the message holds the end of its output."""


class Worker(msgspec.Struct, frozen=True):
    """One process of a bench."""

    module: str
    """Run as `python -m module arguments --result FILE`."""
    arguments: list[str] = []
    environment: Mapping[str, str] = {}
    """On top of this process's own."""
    core: int | None = None
    """The one core it runs on; None: all that this process may use."""


def run_worker(worker: Worker, seconds: float) -> Any:
    """Runs one worker and returns its result.

    Raises:
      BenchError: it failed, or did not end within `seconds`.
    """
    return run_workers([worker], seconds)[0]


def run_workers(workers: Sequence[Worker], seconds: float) -> list[Any]:
    """Runs workers concurrently; returns each one's result, or None where it wrote none.

    Raises:
      BenchError: one failed, or they did not all end within `seconds`. None is left running.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder, _Group() as group:
        results = [Path(folder, f"{number}.json") for number in range(len(workers))]
        outputs = [Path(folder, f"{number}.txt") for number in range(len(workers))]
        for worker, result, output in zip(workers, results, outputs, strict=True):
            command = [sys.executable, "-m", worker.module, *worker.arguments]
            group.start([*command, "--result", str(result)], worker, output)
        while (codes := group.poll()).count(None):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        for number, code in enumerate(codes):
            if code:
                raise BenchError(_failure(workers[number], f"ended with {code}", outputs[number]))
        if None in codes:
            number = codes.index(None)
            late = f"took more than {seconds:g} s"
            raise BenchError(_failure(workers[number], late, outputs[number]))
        return [msgspec.json.decode(r.read_bytes()) if r.exists() else None for r in results]


class _Group:
    """Starts processes that are ended when the block is left."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "_Group":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            end(process)

    def start(self, command: list[str], worker: Worker, output: Path) -> None:
        with output.open("wb") as target:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={"JAX_PLATFORMS": "cpu", **os.environ, **worker.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=prepare(worker.core),  # noqa: PLW1509  (no thread runs here)
                )
            )

    def poll(self) -> list[int | None]:
        return [process.poll() for process in self._processes]


def end(process: subprocess.Popen[Any]) -> None:
    """Kills a process that leads its own session, and all its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(core: int | None = None) -> Callable[[], None]:
    """Run by a child before exec: pins it to its core, and has it die with its parent."""
    end_with_parent = ending_with_parent(signal.SIGKILL)

    def run() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        end_with_parent()

    return run


def barrier(name: str, seconds: float = _BARRIER_SECONDS) -> None:
    """In a worker: waits for the others of its runtime; JAX's public one wants equal device counts.

    Raises:
      JaxRuntimeError: they did not come within so many seconds: a minute.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier(name, int(seconds * 1000))


@contextlib.contextmanager
def writing(path: str) -> Iterator[dict[str, Any]]:
    """For workers: yields a dictionary that is written to the result file at the end."""
    result: dict[str, Any] = {}
    yield result
    Path(path).write_bytes(msgspec.json.encode(result))


def _failure(worker: Worker, what: str, output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()[-20:]
    name = " ".join([worker.module, *worker.arguments])
    return "\n".join([f"{name} {what}:", *(f"  {line}" for line in lines)])
