"""Checks of Pallas kernels against their references, by `pallas_kernels.bench` on small shapes."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.planner.counts import Counts
from jaxserve.planner.estimate import ESTIMATES, measured_lines
from jaxserve.planner.hardware import read_struct
from jaxserve.planner.measurements import Measurement, expected
from jaxserve.preflight.children import run_module
from jaxserve.preflight.outcomes import Check, Failed, Skipped

SMALL = "jaxserve.preflight.small_kernels"
Found = tuple[str, dict[str, Any]]
OPS = ("attention", "grouped_matmul", "norm_quantize")
"""Operations that `pallas_kernels.bench` knows, each checked in a process of its own."""


def checks(probe: Callable[[], Mapping[str, Any]], seconds: float) -> Iterator[tuple[str, Check]]:
    """The checks by name: correctness of each operation, and the times of Step-3's layers.

    Args:
      probe: returns the result of `doctor.probe()`.
    """
    for op in OPS:
        yield f"kernels {op}", _check(probe, functools.partial(correctness, op, seconds))
    yield "kernels small", _check(probe, functools.partial(small, seconds))
    yield "kernel times", _check(probe, functools.partial(times, seconds))


def _check(probe: Callable[[], Mapping[str, Any]], check: Callable[[], Found]) -> Check:
    def run() -> Found:
        found = probe()
        if "error" in found:
            raise Skipped("JAX does not start")
        if found.get("kernels") == "reference":
            raise Skipped(f"no kernels for {found['kind']}: plain XLA runs, which is the reference")
        return check()

    return run


def correctness(op: str, seconds: float) -> Found:
    """Runs every shape and format of an operation at a small size.

    Raises:
      Failed: names each case whose result is not the reference's.
    """
    results = _bench(["--quick", "--op", op], seconds)["results"]
    return judged(results)


def small(seconds: float) -> Found:
    """Runs the engine's smaller operations; raises as `correctness`."""
    every = {"JAX_PLATFORMS": ""}  # the CPU computes what is right
    return judged(json.loads(run_module([SMALL], seconds, every))["results"])


def judged(results: list[dict[str, Any]]) -> Found:
    """Counts the right results of a bench, for one line of the table.

    Raises:
      Failed: a result is wrong.
    """
    details = {"results": results}
    wrong = [
        f"{one['case']} {one['format']}: off by {one['error']:.2g}"
        for one in results
        if one.get("correct") is False
    ]
    plain = sorted({one["format"] for one in results if one.get("backend") == "reference"})
    done = sum(one.get("correct") is True for one in results)
    text = f"{done} of {len(results)} cases as the reference"
    if plain:
        text += f"; plain XLA in {', '.join(plain)}"
    if wrong:
        raise Failed("\n".join([text, *wrong]), details)
    return text, details


def times(seconds: float) -> Found:
    """Times Step-3's layers at real sizes, for `plan calibrate --measured`."""
    return timed(_bench(["--layer", "step3"], seconds))


def timed(found: list[dict[str, Any]]) -> Found:
    """Sets the times of layers beside their rooflines, where the planner knows the device, and
    beside what was counted of equal layers for H200s (`configs/estimates`)."""
    text = f"{len(found)} layers of Step-3 timed"
    with contextlib.suppress(ConfigError):
        ones = msgspec.convert(found, list[Measurement])
        ratios = [one.seconds / expected(one).roofline for one in ones]
        text += f", {min(ratios):.2f} to {max(ratios):.2f} times their rooflines"
        for path in sorted(ESTIMATES.glob("*.json")):
            beside = measured_lines(read_struct(path, Counts, json=True), ones)
            text += "".join(f"\n{path.stem}: {line}" for line in beside)
    return text, {"measurements": found}


def _bench(arguments: list[str], seconds: float) -> Any:
    """Returns the JSON file of `python -m pallas_kernels.bench`."""
    return json.loads(run_module(["pallas_kernels.bench", *arguments, "--json"], seconds))
