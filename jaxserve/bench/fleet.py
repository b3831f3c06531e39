"""`python -m jaxserve.bench fleet`: what prefill workers, hand-off and domains gain and cost."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.bench import domains, hand_off, interference
from jaxserve.bench.report import Part, run_parts

PARTS: dict[str, Callable[[bool], Part]] = {
    "hand-off": hand_off.measure,
    "interference": interference.measure,
    "domains": domains.measure,
}


def run(names: Sequence[str], quick: bool, json_file: Path | None) -> int:
    """Measures the parts one after the other; 1 if a target is missed."""
    return run_parts("fleet", PARTS, names, quick, json_file)
