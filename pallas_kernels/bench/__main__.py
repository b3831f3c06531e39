"""`python -m pallas_kernels.bench`: ops at real models' sizes, beside a copy and a dense product
measured in the same run, and beside what a user would call instead.

A result that is not the reference's fails the run (exit 1). `--layer step3 --json F` writes the
entries that `plan calibrate --measured` reads. `--tune` searches tile sizes. `--quick` only shows
that it runs: tiny shapes.
"""

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench import baselines, correctness, layer, timing
from pallas_kernels.bench.cases import MODULES, NAMES, TILED, Case, cases, page_size
from pallas_kernels.bench.search import Settings
from pallas_kernels.target import current_target

TOPOLOGIES = {"v5e": "v5e", "v6e": "v6e", "v7x": "v7x", "tpu7x": "v7x"}
"""Generations by the first part of a topology's name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="named shapes; default: all")
    parser.add_argument("--layer", choices=["step3"], help="whole layers instead of ops")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tune", action="store_true", help="search tile sizes; see tune.py")
    parser.add_argument(
        "--topology", metavar="NAME", help="with --tune: a TPU that is not there, v6e:2x2"
    )
    parser.add_argument(
        "--trials", type=Path, default=Path("build/tune.jsonl"), help="what a search has tried"
    )
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="default: the package's")
    parser.add_argument("--candidate-seconds", type=float, default=120.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="for all")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run?")
    options = parser.parse_args(arguments)
    known = [name for op in options.op for name in NAMES[op]]
    for name in options.case or []:
        if name not in known:
            parser.error(f"no case {name!r}; known: {', '.join(known)}")
    if options.tune:
        return _tune(parser, options)
    device = jax.devices()[0]
    effort = timing.Effort(2, 1) if options.quick else timing.Effort(20, 7)
    if options.layer:
        # The planner knows no such hardware: times of tiny layers must not calibrate it.
        kind = f"{'quick run on ' if options.quick else ''}{device.device_kind}"
        found: Any
        found, wrong = _layers(options.quick, effort, kind)
    else:
        copied = timing.copy_rate(2**16 if options.quick else 2**30, effort)
        dense = timing.dense_rate(64 if options.quick else 8192, effort)
        print(
            f"{device.device_kind}: copy {copied / 1e9:.4g} GB/s, dense BF16 "
            f"{dense / 1e12:.4g} TFLOP/s (medians of {effort.rounds} rounds, {effort.iterations} "
            "iterations chained in one jit)"
        )
        chosen = cases(options.op, options.case, options.quick)
        results = [_measure(case, effort, copied, dense) for case in chosen]
        wrong = any(result.get("correct") is False for result in results)
        found = {
            "device_kind": device.device_kind,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "jax": jax.__version__,
            "quick": options.quick,
            "copy_bytes_per_second": copied,
            "dense_flops_per_second": dense,
            "results": results,
        }
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if wrong else 0


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
    # Neither starts a backend here: the device is for the process that tries.
    if options.topology is None:
        from pallas_kernels.bench.tune import tune_on_device

        return tune_on_device(ops, options.case, settings)
    from pallas_kernels.bench.tune_static import tune_static

    generation = TOPOLOGIES.get(options.topology.partition(":")[0])
    if generation is None:
        parser.error(f"no topology {options.topology!r}; known: {', '.join(TOPOLOGIES)}")
    return tune_static(ops, options.case, generation, settings)


def _measure(case: Case, effort: timing.Effort, copied: float, dense: float) -> dict[str, Any]:
    op, name, step = case
    result: dict[str, Any] = {"op": op, "case": name, "format": step.format, **case.size()}
    module = MODULES[op]
    arguments, function = module.inputs(step), module.call(step)
    try:
        traced = str(jax.make_jaxpr(functools.partial(function))(*arguments))
        own = any(word in traced for word in ("pallas_call", "core_map"))
        result["backend"] = current_target().backend if own else "reference"
        output = correctness.run(function, arguments)
        right = correctness.expected(function, module.checked(arguments))
        result["error"] = correctness.distance(output, right)
        result["correct"] = bool(result["error"] <= correctness.TOLERANCE[step.format])
        seconds = timing.seconds(function, effort, *arguments)
    except NotImplementedError as error:
        print(f"{case.label()}: skipped: {error}")
        return result | {"skipped": str(error)}
    result |= {"seconds": seconds, "bytes": step.bytes(), "flops": step.flops()}
    result["of_copy"] = step.bytes() / seconds / copied
    result["of_dense"] = step.flops() / seconds / dense
    result["baselines"] = baselines.measured(op, step, arguments, right, effort)
    print(
        f"{case.label()} ({result['backend']}): {seconds * 1e6:.1f} µs, "
        f"{step.bytes() / seconds / 1e9:.4g} GB/s ({result['of_copy']:.0%} of copy), "
        f"{step.flops() / seconds / 1e12:.4g} TFLOP/s ({result['of_dense']:.0%} of dense)"
        + ("" if result["correct"] else f"; WRONG by {result['error']:.2g}")
    )
    for other, found in result["baselines"].items():
        if "skipped" in found:
            print(f"    {other}: {found['skipped']}")
            continue
        same = found["error"] <= correctness.TOLERANCE[step.format]
        what = "" if same else f"; another result, by {found['error']:.2g}"
        print(f"    {other}: {found['seconds'] * 1e6:.1f} µs{what}")
    return result


def _layers(quick: bool, effort: timing.Effort, device_kind: str) -> tuple[list[Any], bool]:
    """Measures whole layers. Returns entries for the planner, and True if a result was wrong."""
    found, wrong = [], False
    for entry, build, sizes in layer.stages(quick, page_size()):
        cache = f" with cache {entry['cache']}" if "cache" in entry else ""
        what = (
            f"{entry['op']} {entry['format']}{cache}, batch {entry['batch']}, "
            f"context {entry['context']}"
        )
        try:
            function, arguments = build(*sizes)
            error = correctness.distance(
                correctness.run(function, arguments), correctness.expected(function, arguments)
            )
            seconds = timing.seconds(function, effort, *arguments)
        except NotImplementedError as reason:
            print(f"{what}: skipped: {reason}")
            continue
        correct = error <= correctness.TOLERANCE[layer.FORMATS[entry["format"]]]
        print(f"{what}: {seconds * 1e6:.1f} µs" + ("" if correct else f"; WRONG by {error:.2g}"))
        if correct:
            found.append({"device_kind": device_kind, **entry, "seconds": seconds})
        wrong = wrong or not correct
    return found, wrong


if __name__ == "__main__":
    sys.exit(main())
