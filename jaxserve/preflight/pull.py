"""Steps of a deployment whose attention and ffn are runtimes of their own (`link.transport: pull`).

Alone, a process starts both on this host, which then share its devices. Of several processes, 0
starts the attention worker and 1 the ffn worker, unless `--role` says otherwise.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.ports import free_port
from jaxserve.preflight.children import WORKER, Child, said
from jaxserve.preflight.meeting import Meeting
from jaxserve.preflight.outcomes import Failed, Outcome, Skipped

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
                    if children[0].wait(seconds, until=ready) is not None:
                        raise Failed(f"the ffn worker has ended; {children[0].last_words()}")
                if role in ("attention", "both"):
                    children.append(_start("attention", words, result, Path(name)))
                    code = children[-1].wait(seconds)
                    if not result.exists():
                        raise Failed(
                            f"the attention worker ended with {code}; {children[-1].last_words()}"
                        )
                    outcome = msgspec.json.decode(result.read_bytes(), type=Outcome)
                if role == "ffn" and meeting.count == 1:
                    with contextlib.suppress(Failed):  # answers until the deadline
                        children[0].wait(seconds)
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
    return Child(arguments, folder)
