"""`python -m jaxserve.bench pipeline`: what AFD costs the host and what it gains, and what
counting tokens per expert costs, in six parts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.bench import experts, host, link, overlap, startup, tokens
from jaxserve.bench.report import Part, run_parts

PARTS: dict[str, Callable[[bool], Part]] = {
    "host": host.measure,
    "overlap": overlap.measure,
    "tokens": tokens.measure,
    "startup": startup.measure,
    "link": link.measure,
    "counting": experts.measure_counting,
}


def run(names: Sequence[str], quick: bool, json_file: Path | None) -> int:
    """Measures the parts one after the other; 1 if a target is missed."""
    return run_parts("pipeline", PARTS, names, quick, json_file)
