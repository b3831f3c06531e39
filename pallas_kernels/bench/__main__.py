"""`python -m pallas_kernels.bench`: ops at real models' sizes, beside a copy and a dense product
measured in the same run, and beside what a user would call instead.

A result that is not the reference's fails the run (exit 1). `--layer step3 --json F` writes the
entries that `plan calibrate --measured` reads. `--tune` searches tile sizes. `--quick` compares
results at tiny shapes, and times no op.
"""

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.bench import baselines, correctness, layer, timing
from pallas_kernels.bench.cases import MODULES, NAMES, TILED, Case, cases, page_size
from pallas_kernels.bench.search import Settings
from pallas_kernels.bench.tune import tune_on_device
from pallas_kernels.target import current_target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="named shapes; default: all")
    parser.add_argument("--layer", choices=["step3"], help="whole layers instead of ops")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tune", action="store_true", help="search tile sizes; see tune.py")
    parser.add_argument(
        "--trials", type=Path, default=Path("build/tune.jsonl"), help="what a search has tried"
    )
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="default: the package's")
    parser.add_argument("--candidate-seconds", type=float, default=120.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="for all")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, no times: is it right?")
    options = parser.parse_args(arguments)
    known = [name for op in options.op for name in NAMES[op]]
    for name in options.case or []:
        if name not in known:
            parser.error(f"no case {name!r}; known: {', '.join(known)}")
    if options.tune:
        return _tune(parser, options)
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.quick:
        parser.error("a CPU takes hours for real sizes; --quick compares the results of tiny ones")
    effort = timing.Effort(2, 1) if options.quick else timing.Effort(20, 7)
    found: Any
    if options.layer:
        # The planner knows no such hardware: times of tiny layers must not calibrate it.
        kind = f"{'quick run on ' if options.quick else ''}{device.device_kind}"
        found, wrong = _layers(options.quick, effort, kind, options.json)
    else:
        found = {
            "device_kind": device.device_kind,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "jax": jax.__version__,
            "quick": options.quick,
        }
        rates = None
        if not options.quick:
            rates = Rates(timing.copy_rate(2**30, effort), timing.dense_rate(8192, effort))
            print(
                f"{device.device_kind}: copy {rates.copied / 1e9:.4g} GB/s, dense BF16 "
                f"{rates.dense / 1e12:.4g} TFLOP/s (medians of {effort.rounds} rounds, "
                f"{effort.iterations} iterations chained in one jit)"
            )
            found["copy_bytes_per_second"], found["dense_flops_per_second"] = rates
        chosen = cases(options.op, options.case, options.quick)
        found["results"] = []
        for case in chosen:
            found["results"].append(_measure(case, effort, rates))
            _write(options.json, found)
        wrong = any(result.get("correct") is False for result in found["results"])
    return 1 if wrong else 0


def _write(path: Path | None, found: Any) -> None:
    """Writes what was found so far, so that a run that is ended leaves it."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(found, indent=2) + "\n")
        part.replace(path)


def _tune(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.seconds < options.candidate_seconds or options.candidate_seconds <= 0:
        parser.error(
            f"--seconds {options.seconds:g} is less than a candidate's: "
            f"--candidate-seconds {options.candidate_seconds:g}, which must be positive"
        )
    ops = [op for op in options.op if op in TILED]
    if not ops:
        parser.error(f"--op {' '.join(options.op)}: no tiles to tune; there are for {TILED}")
    limits = (options.candidate_seconds, options.seconds)
    settings = Settings(options.trials, options.tables, *limits, options.quick)
    return tune_on_device(ops, options.case, settings)  # in processes that have the device


def backend(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Returns the backend whose kernel the function runs; `reference`: plain XLA runs."""
    traced = str(jax.make_jaxpr(functools.partial(function))(*arguments))
    # A kernel for TPUs or of Triton is a pallas_call, one for Hopper an mpmd_map.
    kernel = any(word in traced for word in ("pallas_call", "mpmd_map"))
    return current_target().backend if kernel else "reference"


class Rates(NamedTuple):
    """Bytes a second of a copy and FLOP a second of a dense product, of this device."""

    copied: float
    dense: float


def _measure(case: Case, effort: timing.Effort, rates: Rates | None) -> dict[str, Any]:
    """Compares a case with the reference; with rates, times it and its baselines as well."""
    op, step, module = case.op, case.step, MODULES[case.op]
    result: dict[str, Any] = {"op": op, "case": case.name, "format": step.format, **case.size()}
    arguments, function = module.inputs(step), module.call(step)
    try:
        if rates is None:
            output = correctness.run(function, arguments)
        else:
            result["seconds"], output = timing.timed(function, effort, *arguments)
        right = correctness.expected(function, module.checked(arguments))
    except NotImplementedError as error:
        print(f"{case.label()}: skipped: {error}")
        return result | {"skipped": str(error)}
    result["backend"] = backend(function, arguments)
    result["error"] = correctness.distance(output, right)
    result["correct"] = bool(result["error"] <= correctness.TOLERANCE[step.format])
    name = f"{case.label()} ({result['backend']})"
    wrong = "" if result["correct"] else f"WRONG by {result['error']:.2g}"
    if rates is None:
        print(f"{name}: {wrong or 'right'}")
        return result
    seconds = result["seconds"]
    result |= {"bytes": step.bytes(), "flops": step.flops()}
    result["of_copy"] = step.bytes() / seconds / rates.copied
    result["of_dense"] = step.flops() / seconds / rates.dense
    result["baselines"] = baselines.measured(op, step, arguments, right, effort)
    print(
        f"{name}: {seconds * 1e6:.1f} µs, "
        f"{step.bytes() / seconds / 1e9:.4g} GB/s ({result['of_copy']:.0%} of copy), "
        f"{step.flops() / seconds / 1e12:.4g} TFLOP/s ({result['of_dense']:.0%} of dense)"
        + (f"; {wrong}" if wrong else "")
    )
    for other, found in result["baselines"].items():
        if "skipped" in found:
            print(f"    {other}: {found['skipped']}")
            continue
        same = found["error"] <= correctness.TOLERANCE[step.format]
        what = "" if same else f"; another result, by {found['error']:.2g}"
        print(f"    {other}: {found['seconds'] * 1e6:.1f} µs{what}")
    return result


def _layers(
    quick: bool, effort: timing.Effort, device_kind: str, path: Path | None
) -> tuple[list[Any], bool]:
    """Measures whole layers, and writes every right one. Returns the entries for the planner, and
    True if a result was wrong."""
    found, wrong = [], False
    for entry, build, sizes in layer.stages(quick, page_size()):
        cache = f" with cache {entry['cache']}" if "cache" in entry else ""
        what = (
            f"{entry['op']} {entry['format']}{cache}, batch {entry['batch']}, "
            f"context {entry['context']}"
        )
        try:
            function, arguments, last = build(*sizes)
            seconds, output = timing.timed(function, effort, *arguments)
            error = correctness.distance(output, correctness.expected(function, last))
        except NotImplementedError as reason:
            print(f"{what}: skipped: {reason}")
            continue
        limit = correctness.TOLERANCE[layer.FORMATS[entry["format"]]] * layer.PRODUCTS**0.5
        correct = error <= limit
        print(f"{what}: {seconds * 1e6:.1f} µs" + ("" if correct else f"; WRONG by {error:.2g}"))
        if correct:
            found.append({"device_kind": device_kind, **entry, "seconds": seconds})
            _write(path, found)
        wrong = wrong or not correct
    return found, wrong


if __name__ == "__main__":
    sys.exit(main())
