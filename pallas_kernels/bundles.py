"""Lower bounds for TPU kernels without a TPU: bundles per unit of work in the inner loop, and the
DMA floor.

`python -m pallas_kernels.bundles [--op OP] [--generation GENERATION] [--case NAME] [--json]`
compiles the cases of every op (`aot.py`) with libtpu's dumps on and reads the VLIW bundles in them.
No TPU is needed, and nothing is timed: a core issues at most one bundle per cycle, so that a kernel
whose bundles are below its DMA floor can be as fast as the memory, and one above it cannot.

Of the paths through a loop's branches the shortest that does a full iteration's work counts: it
starts the expected number of copies and has as many matrix products as the longest branch-free
stretch. In a program without products every bundle stands for one.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pallas_kernels import aot

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:(?P<depth>[> ]*)\{(?P<text>.*)")
_BRANCH = re.compile(r"sbr\.rel (?P<condition>\([^)]*\))? ?target = \$region(?P<target>\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_MATMUL = re.compile(r"\bvmatmul")
_COPY = re.compile(r"\bdma\.(?:hbm_to_vmem|general|strided|hbm_to_smem|local)")


class Bundle(NamedTuple):
    """One bundle; its index in the program is its address."""

    matmuls: int
    copies: int
    """Copies started."""
    target: int | None
    """Region to which it branches."""
    always: bool
    """Whether the branch has no condition."""
    regions: frozenset[int]
    """Regions that begin here."""
    header: bool
    """Whether a loop begins here."""


class Round(NamedTuple):
    """The counted path of a loop iteration."""

    bundles: int
    matmuls: int
    copies: int


def parse(text: str) -> list[Bundle]:
    """Parses the bundles of one program.

    Raises:
      ValueError: addresses do not follow each other, so that this is not such a dump.
    """
    bundles: list[Bundle] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        if int(match[1], 16) != len(bundles):
            raise ValueError(f"bundle {match[1]} follows bundle {len(bundles) - 1:#x}")
        body = match["text"]
        branch = _BRANCH.search(body)
        bundles.append(
            Bundle(
                matmuls=len(_MATMUL.findall(body)),
                copies=len(_COPY.findall(body)),
                target=int(branch["target"]) if branch else None,
                always=branch is not None and branch["condition"] is None,
                regions=frozenset(map(int, _REGION.findall(body))),
                header=bool(re.match(r"\s*\S+\s+L[BH]", line)),
            )
        )
    return bundles


def shortest_round(bundles: list[Bundle], copies: int, delay: int) -> Round:
    """Returns the shortest path of a loop iteration that multiplies and starts this many copies.

    Args:
      delay: bundles after a branch that are issued before it takes place.

    Raises:
      ValueError: no loop has such a path.
    """
    start_of = {region: at for at, bundle in enumerate(bundles) for region in bundle.regions}
    if not any(bundle.matmuls for bundle in bundles):
        bundles = [bundle._replace(matmuls=1) for bundle in bundles]
    loops = []
    for at, bundle in enumerate(bundles):
        back = None if bundle.target is None else start_of.get(bundle.target)
        if back is not None and back <= at and bundles[back].header:
            loops.append((back, at + delay))
    found = [way for loop in loops if (way := _round(bundles, start_of, *loop, copies, delay))]
    if not found:
        raise ValueError(f"of {len(loops)} loops none multiplies and starts {copies} copies")
    return min(found)


def _round(
    bundles: list[Bundle],
    start_of: dict[int, int],
    first: int,
    last: int,
    copies: int,
    delay: int,
) -> Round | None:
    """Returns the shortest path from `first` to `last`, forwards, that does enough."""
    stretches, length = [0], 0
    for bundle in bundles[first : last + 1]:
        length = 0 if bundle.regions or bundle.target is not None else length + bundle.matmuls
        stretches.append(length)
    enough = max(stretches)
    if not enough:
        return None
    # Fewest bundles so far, by the copies and matmuls on the way; ways only lead forwards.
    ways: dict[int, dict[tuple[int, int], int]] = {first: {(0, 0): 0}}
    for at in range(first, last + 1):
        bundle = bundles[at]
        leaps = []
        branch = bundles[at - delay] if at - delay >= first else None
        if branch is not None and branch.target is not None:
            target = start_of.get(branch.target)
            if target is not None and at < target <= last:
                leaps.append(target)
        if branch is None or not branch.always or not leaps:
            leaps.append(at + 1)
        for (started, multiplied), count in ways.pop(at, {}).items():
            key = (
                min(copies, started + bundle.copies),
                min(enough, multiplied + bundle.matmuls),
            )
            for leap in leaps:
                there = ways.setdefault(leap, {})
                there[key] = min(count + 1, there.get(key, count + 1))
    done = ways.get(last + 1, {}).get((copies, enough))
    return None if done is None else Round(done, enough, copies)


OPS = ("attention", "gated_delta", "grouped_matmul", "sparse_attention")
"""The ops that have a `cases.py`."""

COMPILE_SECONDS = 600


class Floor(NamedTuple):
    """Bounds of one case."""

    op: str
    case: str
    generation: str
    unit: str
    bundles: float
    """Bundles per unit of work, in the steady state of the inner loop."""
    memory: float
    """Bundles that pass while HBM delivers one unit of work."""

    def ratio(self) -> float:
        """Bundles over the DMA floor; above 1 the core is the bottleneck."""
        return self.bundles / self.memory


def measure(op: str, case: str, loop: aot.Loop, generation: str) -> Floor:
    """Compiles a case in a process of its own and reads what was dumped.

    Raises:
      RuntimeError: the case does not compile, not in time, or leaves no dump of the kernel.
    """
    about = aot.GENERATIONS[generation]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "pallas_kernels.aot", op, generation, case]
        try:
            done = subprocess.run(
                command,
                env=aot.environment(flags),
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{op} {case} on {generation}: over {COMPILE_SECONDS} s") from None
        if done.returncode:
            raise RuntimeError(f"{op} {case} on {generation}: {done.stderr[-2000:]}")
        dumps = [
            path
            for path in Path(folder).glob(f"*{loop.kernel}*-final_bundles.txt")
            if "schedule" not in path.name
        ]
        if not dumps:
            raise RuntimeError(f"{op} {case} on {generation}: no dump of {loop.kernel}")
        bundles = parse(max(dumps).read_text())
    way = shortest_round(bundles, loop.copies, about.branch_delay)
    memory = loop.bytes_per_unit * about.hertz / about.memory_bandwidth
    return Floor(op, case, generation, loop.unit, way.bundles / loop.units, memory)


def floors(ops: list[str], generations: list[str], names: list[str]) -> Iterator[Floor]:
    """Yields the bounds of all cases, or of the named ones."""
    for op in ops:
        for generation in generations:
            for case in aot.cases(op, generation):
                if case.loop is not None and (not names or case.name in names):
                    yield measure(op, case.name, case.loop, generation)


HEADER = f"{'op':<15} {'case':<22} {'TPU':<4} {'bundles':>8} {'DMA floor':>10} {'ratio':>6}"


def line(floor: Floor) -> str:
    """Formats one row of the table for people."""
    return (
        f"{floor.op:<15} {floor.case:<22} {floor.generation:<4} {floor.bundles:8.3f} "
        f"{floor.memory:10.3f} {floor.ratio():6.2f}  a {floor.unit}"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bundles")
    parser.add_argument("--op", choices=OPS, action="append", help="default: all")
    parser.add_argument("--generation", choices=aot.GENERATIONS, action="append")
    parser.add_argument("--case", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--json", action="store_true", help="a line for each case")
    arguments = parser.parse_args()
    if not arguments.json:
        print(HEADER)
    for floor in floors(
        arguments.op or list(OPS),
        arguments.generation or list(aot.GENERATIONS),
        arguments.case or [],
    ):
        if arguments.json:
            print(json.dumps(floor._asdict() | {"ratio": floor.ratio()}), flush=True)
        else:
            print(line(floor), flush=True)


if __name__ == "__main__":
    main()
