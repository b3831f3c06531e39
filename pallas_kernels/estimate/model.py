"""From counts of compiled programs to microseconds: plain arithmetic, no JAX.

Called by the command and by the planner's estimate. `counts.json` has the counts.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.estimate.assumptions import assumed
from pallas_kernels.estimate.sass import Cost

COUNTS = Path(__file__).parent / "counts.json"
"""Written by `python -m pallas_kernels.estimate --count`."""


class Estimate(NamedTuple):
    """The time of one kernel at one size, in seconds."""

    platform: str
    op: str
    case: str
    seconds: float
    bound: str
    """The resource, or chain, that takes longest."""
    floor: float
    """Roofline: its bytes at the memory's rate, or its FLOPs at the peak, whichever is longer."""
    parts: dict[str, float]
    """Seconds of every resource by itself."""


def read_counts(path: Path = COUNTS) -> dict[str, Any]:
    """Returns the committed counts."""
    return json.loads(path.read_text())


def costs(kernel: dict[str, Any]) -> list[Cost]:
    """Returns the loops of a kernel."""
    return [Cost(**loop) for loop in kernel["loops"]]


def turn(costs: Sequence[Cost]) -> tuple[float, str]:
    """Cycles of one turn of the loops that run side by side on a multiprocessor, and what takes
    them: the longest chain, or what they share."""
    shared: dict[str, float] = {
        "issue": float(sum(one.issued for one in costs)),
        "tensor cores": sum(one.tensor for one in costs),
    }
    for one in costs:
        for unit, taken in one.pipes.items():
            if unit != "issue":
                shared[unit] = shared.get(unit, 0.0) + taken
    shared["chain"] = max(one.chain for one in costs)
    bound = max(shared, key=shared.__getitem__)
    return shared[bound], bound


def hopper_seconds(op: str, kernel: dict[str, Any]) -> dict[str, float]:
    """Seconds that a kernel occupies each resource of an H200; "memory" is one of them.

    Attention is never faster than published kernels: the count of a loop's instructions leaves out
    what keeps real kernels below it.
    """
    hertz, units = assumed("h200.hertz"), kernel["multiprocessors"]
    cycles, what = turn(costs(kernel))
    published = kernel["flops"] / assumed("h200.attention") if op == "attention" else 0.0
    return {
        "published": published,
        what: (kernel["turns"] * cycles + kernel["overhead"]) / hertz,
        "memory": kernel["bytes"] / assumed("h200.memory"),
        "L2": kernel["l2_bytes"] / units / assumed("h200.l2") / hertz,
    }


def beyond_memory(one: dict[str, Any]) -> list[float]:
    """Returns the seconds that each of a call's kernels takes beyond the time of its bytes, which
    the caller charges itself."""
    every = [hopper_seconds(one["op"], kernel) for kernel in one["kernels"]]
    return [max(seconds.values()) - seconds["memory"] for seconds in every]


def estimate_hopper(one: dict[str, Any]) -> Estimate:
    """Estimates one call on an H200: its kernels run one after another.

    Args:
      one: op, case, and kernels: loops side by side (`Cost`), `turns` of them on the busiest of the
        `multiprocessors` that a kernel takes, `overhead` cycles beside them, bytes from memory and
        through the L2 cache, and FLOPs without padding.
    """
    hertz, units = assumed("h200.hertz"), assumed("h200.multiprocessors")
    total, floor = 0.0, 0.0
    parts: dict[str, float] = {}
    for kernel in one["kernels"]:
        seconds = hopper_seconds(one["op"], kernel)
        bound = max(seconds, key=seconds.__getitem__)
        total += seconds[bound]
        parts[bound] = parts.get(bound, 0.0) + seconds[bound]
        peak = assumed("h200.flops_a_cycle") * units * hertz * kernel["rate"]
        floor += max(seconds["memory"], kernel["flops"] / peak)
    bound = max(parts, key=parts.__getitem__)
    return Estimate("h200", one["op"], one["case"], total, bound, floor, parts)


def estimate_tpu(one: dict[str, Any]) -> Estimate:
    """Estimates one call on a TPU core from bundles, bytes and DMAs of its units of work."""
    parts = {
        "bundles": one["units"] * one["bundles"] / one["hertz"],
        "memory": one["units"] * one["bytes"] / one["bandwidth"],
        "descriptors": one["units"] * one["copies"] * assumed("tpu.descriptor"),
    }
    bound = max(parts, key=parts.__getitem__)
    return Estimate(
        one["platform"], one["op"], one["case"], parts[bound], bound, parts["memory"], parts
    )


def estimates(counts: dict[str, Any]) -> list[Estimate]:
    """Estimates all counted calls."""
    hopper = [estimate_hopper(one) for one in counts["h200"]]
    return [*hopper, *(estimate_tpu(one) for one in counts["tpu"])]


def table(found: Sequence[Estimate]) -> str:
    """Formats estimates as a table for people."""
    lines = [
        "ESTIMATES, read from compiled programs; nothing was measured.",
        f"{'op':<15} {'case':<34} {'for':<5} {'µs':>8} {'roofline':>8} {'ratio':>6}  bound",
    ]
    for one in found:
        ratio = one.seconds / one.floor if one.floor else math.inf
        lines.append(
            f"{one.op:<15} {one.case:<34} {one.platform:<5} {one.seconds * 1e6:8.1f} "
            f"{one.floor * 1e6:8.1f} {ratio:6.2f}  {one.bound}"
        )
    return "\n".join(lines)
