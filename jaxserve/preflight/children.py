"""Processes that a preflight starts for checks on devices, each with a deadline."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.bench.workers import end
from jaxserve.commands.children import started
from jaxserve.commands.host import start
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.preflight.outcomes import Failed, Outcome, Skipped

WORKER = "jaxserve.preflight.worker"
_LOOK_SECONDS = 0.05
_LAST_LINES = 12


class Child:
    """A started process and its output.

    Args:
      arguments: of Python.
      environment: on top of this process's own.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ):
        self.output = folder / f"output-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as target:
            self._process = started(
                [sys.executable, *arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float, until: Path | None = None) -> int | None:
        """Waits for the end of the process, or for a file; returns the exit code, if it ended.

        Raises:
          Failed: neither happened in time.
        """
        limit = time.monotonic() + seconds
        while (code := self._process.poll()) is None:
            if until is not None and until.exists():
                return None
            if time.monotonic() > limit:
                raise Failed(f"no end within {seconds:g} s; {self.last_words()}")
            time.sleep(_LOOK_SECONDS)
        return code

    def end(self) -> None:
        """Kills the process and its children."""
        end(self._process)

    def last_words(self) -> str:
        """The end of the output."""
        lines = self.output.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.strip()][-_LAST_LINES:]
        return "\n".join(["its last lines:", *said]) if said else "it printed nothing"


def run_on_devices(process: ProcessArguments, given: Sequence[str]) -> int:
    """Runs a preflight in each of `--host-processes`; returns the largest exit code."""
    children = start(process, "jaxserve.preflight", given, start_new_session=False)
    return max(child.wait() for child in children)


def run_part(check: str, arguments: Sequence[str], seconds: float) -> tuple[str, dict[str, Any]]:
    """Runs one check of `parts.py` in a process of its own.

    Args:
      arguments: of `worker.py`: those of `serve`, and its own.

    Raises:
      Failed, Skipped: as the check says, or the process failed or was late.
    """
    words = [WORKER, check, *arguments, "--result"]
    return said(msgspec.json.decode(run_module(words, seconds), type=Outcome))


def run_module(
    words: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> bytes:
    """Runs a module of Python that writes a file of JSON, and returns the file.

    Args:
      words: the module and its arguments; the file's name comes behind them.
      environment: on top of this process's own.

    Raises:
      Failed: the module wrote no file, or was late; with everything that it had written by then.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-preflight-") as name:
        result = Path(name, "result.json")
        child = Child(["-m", *words, str(result)], Path(name), environment)
        try:
            code = child.wait(seconds)
        except Failed as late:
            found = msgspec.json.decode(result.read_bytes()) if result.exists() else {}
            details = found if isinstance(found, dict) else {"measurements": found}
            raise Failed(str(late), details) from None
        finally:
            child.end()
        if not result.exists():
            raise Failed(f"the process ended with {code}; {child.last_words()}")
        return result.read_bytes()


def said(outcome: Outcome) -> tuple[str, dict[str, Any]]:
    """The outcome of another process as that of this one."""
    if outcome.state == "failed":
        raise Failed(outcome.text, outcome.details)
    if outcome.state == "skipped":
        raise Skipped(outcome.text)
    return outcome.text, outcome.details
