"""Processes that a preflight starts for checks on devices, each with a deadline.

Attention and ffn may be runtimes of their own (`link.transport: pull`). Alone, a process starts
both on this host, which then share its devices. Of several processes, 0 starts the attention worker
and 1 the ffn worker, unless `--role` says otherwise.
"""

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.commands.children import Child
from jaxserve.commands.host import start
from jaxserve.config.deployment import Deployment
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.ports import free_port
from jaxserve.preflight.meeting import Meeting
from jaxserve.preflight.outcomes import Failed, Outcome, Skipped

WORKER = "jaxserve.preflight.worker"
_LOOK_SECONDS = 0.05


def _wait(child: Child, seconds: float, until: Path | None = None) -> int | None:
    """Waits for the end of a process, or for a file; returns the exit code, if it ended.

    Raises:
      Failed: neither happened in time.
    """
    limit = time.monotonic() + seconds
    while (code := child.code) is None:
        if until is not None and until.exists():
            return None
        if time.monotonic() > limit:
            raise Failed(f"no end within {seconds:g} s; {_last_words(child)}")
        time.sleep(_LOOK_SECONDS)
    return code


def _last_words(child: Child) -> str:
    said = child.last_words()
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
        child = Child(["-m", *words, str(result)], Path(name, "said.txt"), environment=environment)
        try:
            code = _wait(child, seconds)
        except Failed as late:
            found = msgspec.json.decode(result.read_bytes()) if result.exists() else {}
            details = found if isinstance(found, dict) else {"measurements": found}
            raise Failed(str(late), details) from None
        finally:
            child.end()
        if not result.exists():
            raise Failed(f"the process ended with {code}; {_last_words(child)}")
        return result.read_bytes()


def said(outcome: Outcome) -> tuple[str, dict[str, Any]]:
    """The outcome of another process as that of this one."""
    if outcome.state == "failed":
        raise Failed(outcome.text, outcome.details)
    if outcome.state == "skipped":
        raise Skipped(outcome.text)
    return outcome.text, outcome.details


Found = tuple[str, dict[str, Any]]


def pull_steps(
    deployment: Deployment,
    process: ProcessArguments,
    meeting: Meeting,
    words: Sequence[str],
    seconds: float,
) -> Found:
    """Runs the ffn worker, the attention worker, or both, until attention's steps are done.

    Args:
      words: options of `worker.py` that name the deployment.

    Raises:
      Failed: a worker did not start, or the steps failed.
      Skipped: this process plays neither role.
    """
    role = role_of(process, meeting)
    words = [*words, f"--set=link.absent_seconds={seconds}"]
    if role == "both":
        words.append(f'--set=link.addresses=["127.0.0.1:{free_port()}"]')
    with tempfile.TemporaryDirectory(prefix="jaxserve-preflight-") as name:
        ready, result = Path(name, "ready.json"), Path(name, "outcome.json")
        children: list[Child] = []
        try:
            outcome: Outcome | Failed | None = None
            try:
                if role in ("ffn", "both"):
                    children.append(_start("ffn", words, ready, Path(name)))
                    if _wait(children[0], seconds, until=ready) is not None:
                        raise Failed(f"the ffn worker has ended; {_last_words(children[0])}")
                if role in ("attention", "both"):
                    children.append(_start("attention", words, result, Path(name)))
                    code = _wait(children[-1], seconds)
                    if not result.exists():
                        last = _last_words(children[-1])
                        raise Failed(f"the attention worker ended with {code}; {last}")
                    outcome = msgspec.json.decode(result.read_bytes(), type=Outcome)
                if role == "ffn" and meeting.count == 1:
                    with contextlib.suppress(Failed):  # answers until the deadline
                        _wait(children[0], seconds)
            except Failed as failed:
                outcome = failed
            meeting.gather(None, 2 * seconds)  # the ffn worker answers until then
        finally:
            for child in children:
                child.end()
    if isinstance(outcome, Failed):
        raise outcome
    if outcome is not None:
        return said(outcome)
    if role != "ffn":
        raise Skipped("attention and ffn are processes 0 and 1")
    return "ffn answered", {}


def role_of(process: ProcessArguments, meeting: Meeting) -> str:
    """The role that a process plays in the steps: "attention", "ffn", "both", or none."""
    roles = {0: "attention", 1: "ffn"} if meeting.count > 1 else {0: "both"}
    return process.role or roles.get(process.process_id, "")


def _start(role: str, words: Sequence[str], result: Path, folder: Path) -> Child:
    arguments = ["-m", WORKER, f"{role}-steps", *words, "--role", role, "--result", str(result)]
    return Child(arguments, folder / f"{role}.txt")
