"""Runs the local launcher with a small deployment, and checks that all of its processes end."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
MODULE = "tests.jaxserve.fleet.process"
DEADLINES = ("cluster.start_seconds=60", "cluster.step_seconds=30", "cluster.heartbeat_seconds=1")
PATIENCE = 90.0


class Launched:
    """A running launcher and what it has printed."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._more:
                    self.output += line
                    self._more.notify_all()

    def wait_for(self, pattern: str, timeout: float = PATIENCE) -> re.Match[str]:
        with self._more:
            self._more.wait_for(lambda: re.search(pattern, self.output, re.MULTILINE), timeout)
            found = re.search(pattern, self.output, re.MULTILINE)
        assert found, f"no {pattern!r} within {timeout:g} s in:\n{self.output}"
        return found

    def pid(self, process: int) -> int:
        return int(self.wait_for(rf"^\[{process}\] pid (\d+)")[1])

    def end(self, timeout: float = PATIENCE) -> int:
        """Waits for the launcher; returns its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code


@contextlib.contextmanager
def started(command: Sequence[str], environment: dict[str, str]) -> Iterator[Launched]:
    """A launcher, which is killed if it has not ended."""
    run = Launched(command, environment)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.end(5.0)


def output_of(
    *arguments: str, cwd: Path = REPOSITORY, timeout: float = 120, **environment: str | None
) -> str:
    """Returns what a fresh interpreter prints, which has to end well; None removes a variable."""
    changed = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def python(code: str, **environment: str | None) -> Any:
    """Returns what a program prints in its last line, as JSON."""
    return json.loads(output_of("-c", code, **environment).splitlines()[-1])


@contextlib.contextmanager
def launched(
    *arguments: str,
    deadlines: Sequence[str] = DEADLINES,
    module: str = MODULE,
    followers_end_in: float = 5.0,
) -> Iterator[Launched]:
    """Two processes, unless `--processes` says otherwise; none of them is left at the end.

    Args:
      followers_end_in: seconds after the leader's end, after which the launcher ends them.
    """
    launcher = "tests.jaxserve.fleet.quick_local"
    command = ["-m", launcher, str(followers_end_in), "--module", module, *arguments]
    for deadline in deadlines:
        command += ["--set", deadline]
    with started(command, {"JAX_PLATFORMS": "cpu"}) as run:
        yield run
        pids = [int(pid) for pid in re.findall(r"^\[\d+\] pid (\d+)", run.output, re.MULTILINE)]
        run.end(5.0)
        assert not [pid for pid in pids if alive(pid, 5.0)], run.output


def alive(pid: int, timeout: float) -> bool:
    """Whether a process is still there after `timeout`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True
