"""Lower bounds for TPU kernels without a TPU: bundles per unit of work in the inner loop, and the
DMA floor.

`python -m pallas_kernels.bundles [--op OP] [--generation GENERATION] [--case NAME] [--json]`
compiles the cases of every op (`aot.py`) with libtpu's dumps on and reads those (`llo.py`). No TPU
is needed, and nothing is timed: a bundle takes a cycle at best, so that a kernel whose bundles are
below its DMA floor can be as fast as the memory, and one above it cannot.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pallas_kernels import aot, llo

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
        bundles = llo.parse(max(dumps).read_text())
    way = llo.shortest_round(bundles, loop.copies, about.branch_delay)
    memory = loop.bytes_per_unit / about.bytes_per_bundle()
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
