"""The command: `python -m pallas_kernels.estimate`.

Without options it prints the committed counts as microseconds. `--count` compiles everything again
and writes the counts, for one platform or for both kinds.
"""

import argparse
import json
import os
import sys

from pallas_kernels.estimate import model
from pallas_kernels.estimate.assumptions import ASSUMPTIONS, SOURCES


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.estimate")
    parser.add_argument("--count", choices=("h200", "tpu"), action="append", default=[])
    parser.add_argument("--case", action="append", default=[], help="with --count; default: all")
    parser.add_argument("--json", action="store_true", help="a line for each call")
    parser.add_argument("--assumptions", action="store_true", help="what is taken for granted")
    arguments = parser.parse_args()
    if arguments.assumptions:
        for name, (value, unit, source) in ASSUMPTIONS.items():
            print(f"{name:<22} {value:>12.5g} {unit:<11} {source}")
        print("cycles of instructions: " + "; ".join(SOURCES))
        return
    for platform in arguments.count:
        try:
            _count(platform, arguments.case)
        except RuntimeError as error:
            sys.exit(str(error))
    found = model.estimates(model.read_counts())
    if arguments.json:
        for one in found:
            print(json.dumps({"source": "estimate"} | one._asdict()))
        return
    print(model.table(found))


def _count(platform: str, names: list[str]) -> None:
    """Counts the named calls again, one by one, and keeps the counts of the others."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from pallas_kernels.estimate import count

    if platform == "h200":
        found = count.count_hopper(names or [*count.ATTENTION, *count.GROUPED])
    else:
        found = count.count_tpu(names or count.TPU)
    for one in found:
        counts = model.read_counts() if model.COUNTS.exists() else {"h200": [], "tpu": []}
        key = ("platform", "op", "case")
        rest = [
            other
            for other in counts[platform]
            if any(other.get(name) != one.get(name) for name in key)
        ]
        order = sorted([*rest, one], key=lambda each: [str(each.get(name)) for name in key])
        counts[platform] = order
        model.COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
        print(f"counted {one['op']} {one['case']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
