"""`python -m jaxserve.bench fleet`: what prefill workers, hand-off and domains gain and cost."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.bench import domains, hand_off
from jaxserve.bench.report import (
    Part,
    Report,
    describe_machine,
    missed,
    table,
    this_machine,
    write_json,
)

PARTS: dict[str, Callable[[bool], Part]] = {
    "hand-off": hand_off.measure,
    "domains": domains.measure,
}


def run(names: Sequence[str], quick: bool, json_file: Path | None) -> int:
    """Measures the parts one after the other; 1 if a target is missed."""
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    parts = []
    for name in names:
        part = PARTS[name](quick)
        print(f"\n{table(part)}", flush=True)
        parts.append(part)
    if json_file is not None:
        write_json(json_file, Report("fleet", quick, machine, parts))
    if late := missed(parts):
        print(f"\nmissed: {', '.join(late)}", file=sys.stderr)
    return int(bool(late))
