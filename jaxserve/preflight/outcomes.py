"""Results of checks, the table that shows them, and the deadline of one check."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

Verdict = Literal["passed", "failed", "skipped"]


class Outcome(msgspec.Struct, frozen=True):
    """The result of one check on one process."""

    name: str
    state: Verdict
    text: str
    """Measured values, or the reason of a failure or a skip, in one line."""
    seconds: float = 0.0
    process: int = 0
    details: dict[str, Any] = {}
    """Numbers that the check measured, by name."""


class Skipped(Exception):
    """Raised by a check that does not apply here; the message says why."""


class Failed(Exception):
    """Raised by a check that found a fault; the message says which.

    Args:
      details: everything that the check measured all the same.
    """

    def __init__(self, text: str, details: dict[str, Any] | None = None):
        super().__init__(text)
        self.details = details or {}


Check = Callable[[], tuple[str, dict[str, Any]]]
"""Returns one line for people and everything that was measured."""


def run(name: str, check: Check, clock: Callable[[], float], process: int = 0) -> Outcome:
    """Runs a check; whatever it raises becomes its outcome."""
    begun = clock()
    state: Verdict = "passed"
    details: dict[str, Any] = {}
    try:
        text, details = check()
    except Skipped as skipped:
        state, text = "skipped", str(skipped)
    except Failed as failed:
        state, text, details = "failed", str(failed), failed.details
    except Exception as error:
        state, text = "failed", f"{type(error).__name__}: {error}"
    return Outcome(name, state, text, round(clock() - begun, 1), process, details)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for every check; failed ones come last, with all lines of their reason.

    Equal outcomes of several processes share a line.
    """
    order = {"passed": 0, "skipped": 1, "failed": 2}
    lines: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: order[one.state]):
        lines.setdefault((one.name, one.state, one.text), []).append(one)
    several = len({one.process for one in outcomes}) > 1
    width = max(len(name) for name, _, _ in lines)
    rows = []
    for (name, state, text), same in lines.items():
        where = f"  [{', '.join(str(one.process) for one in same)}]" if several else ""
        slowest = max(one.seconds for one in same)
        first, *rest = text.splitlines() or [""]
        rows.append(f"{state:7}  {name.ljust(width)}  {slowest:6.1f} s{where}  {first}")
        if state == "failed":
            rows += [f"{'':9}{line}" for line in rest]
    return "\n".join(rows)


def count(outcomes: Sequence[Outcome], state: Verdict) -> int:
    """Number of checks with this state."""
    return sum(one.state == state for one in outcomes)
