"""Ranks tile sizes for TPUs that are not there: `--tune --topology v6e:2x2`.

Candidates are compiled, and their cost is the bundles of the kernel's inner loop over its DMA floor
(`bundles.py`). Nothing is timed or checked here: what it writes is marked "static".
"""

import math
import time
from typing import Any

import jax

from pallas_kernels import aot, bundles
from pallas_kernels.bench.search import (
    Found,
    OutOfTime,
    Settings,
    Sizes,
    Trials,
    report,
    search,
    to_sizes,
)
from pallas_kernels.target import Target, use_target
from pallas_kernels.tuned import recording, use_tiles


def tune_static(
    ops: list[str], names: list[str] | None, generation: str, settings: Settings
) -> int:
    """Rank by bundles over the DMA floor; calls that are below it already are left as they are."""
    about, trials = aot.GENERATIONS[generation], Trials(settings.trials)
    end = time.monotonic() + settings.seconds
    unfinished = 0
    for op in ops:
        for case in aot.cases(op, generation):
            if case.loop is None or (names and case.name.split()[0] not in names):
                continue
            with use_target(Target("mosaic_tpu", about.device_kind)), recording() as asked:
                jax.eval_shape(lambda *x, case=case: case.function(*x), *case.arguments)
            call = next(call for call in asked if call.startswith(case.loop.kernel))
            entry = asked[call]._asdict()

            def cost(tiles: Sizes, op: str = op, name: str = case.name, call: str = call) -> float:
                def run() -> dict[str, Any]:
                    limit = settings.candidate_seconds
                    if end - time.monotonic() < limit:
                        raise OutOfTime
                    with use_tiles({call: tiles}):
                        made = next(c for c in aot.cases(op, generation) if c.name == name)
                    assert made.loop is not None
                    try:
                        floor = bundles.measure(
                            op, name, made.loop, generation, {call: tiles}, limit
                        )
                    except (RuntimeError, ValueError) as error:
                        return {"failed": str(error)[-300:]}
                    return {"ratio": floor.ratio()}

                trial: dict[str, Any] = {"generation": generation, "jax": jax.__version__}
                trial |= {"case": name, "call": call, "tiles": tiles}
                result = trials.get(trial, run)
                if "failed" in result:
                    print(f"  {name} {tiles}: {result['failed']}")
                # Below the floor all are as fast as the memory.
                return max(1.0, result.get("ratio", math.inf))

            start = to_sizes(entry["tiles"])
            # Of what is read from the dump, rows that share a read of the weights change nothing.
            fields = {k: v for k, v in entry["choices"].items() if k != "tile_rows"}
            try:
                fine = cost(start) == 1.0
            except OutOfTime:
                fine = False
            found = Found(start, 1.0, 1.0, True) if fine else search(start, fields, cost)
            report(call, entry, found, about.device_kind, "static", "of the DMA floor", settings)
            unfinished += not found.finished
    if unfinished:
        print(f"time is up: the same command goes on from {settings.trials}")
    return 1 if unfinished else 0
