"""`python -m pallas_kernels.bench`: ops at real models' sizes, beside a copy and a dense product
measured in the same run, and beside what a user would call instead.

A result that is not the reference's fails the run (exit 1). `--layer step3 --json F` writes the
entries that `plan calibrate --measured` reads. `--quick` only shows that it runs: tiny shapes.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.model_batch import attend
from pallas_kernels.attention.shapes import DECODE
from pallas_kernels.attention.shapes import SHAPES as ATTENTION
from pallas_kernels.bench import attention, grouped_matmul, layer, timing
from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.shapes import DECODE_TOKENS, PREFILL_TOKENS
from pallas_kernels.grouped_matmul.shapes import SHAPES as EXPERTS
from pallas_kernels.target import Target, current_target, use_target

TOLERANCE = {"bf16": 0.02, "int8": 0.04, "fp8": 0.06, "fp8_block": 0.06}
"""Largest ‖result − reference‖ / ‖reference‖."""
CHECKED_SEQUENCES = 2
NAMES: dict[str, dict[str, Any]] = {"attention": {**ATTENTION}, "grouped_matmul": {**EXPERTS}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="named shapes; default: all")
    parser.add_argument("--layer", choices=["step3"], help="whole layers instead of ops")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run?")
    options = parser.parse_args(arguments)
    known = [name for op in options.op for name in NAMES[op]]
    for name in options.case or []:
        if name not in known:
            parser.error(f"no case {name!r}; known: {', '.join(known)}")
    device = jax.devices()[0]
    effort = timing.Effort(2, 1) if options.quick else timing.Effort(20, 7)
    if options.layer:
        # The planner knows no such hardware: times of tiny layers must not calibrate it.
        kind = f"{'quick run on ' if options.quick else ''}{device.device_kind}"
        found: Any = _layers(options.quick, effort, kind)
        wrong = False
    else:
        copied = timing.copy_rate(2**16 if options.quick else 2**30, effort)
        dense = timing.dense_rate(64 if options.quick else 8192, effort)
        print(
            f"{device.device_kind}: copy {copied / 1e9:.4g} GB/s, dense BF16 "
            f"{dense / 1e12:.4g} TFLOP/s (medians of {effort.rounds} rounds, {effort.iterations} "
            "iterations chained in one jit)"
        )
        results = [_measure(case, effort, copied, dense) for case in _cases(options, options.quick)]
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


Case = tuple[str, str, Any]
"""Op, name, and its `Step`."""


def _cases(options: argparse.Namespace, quick: bool) -> list[Case]:
    found: list[Case] = []
    for op in options.op:
        for name, shape in NAMES[op].items():
            if options.case and name not in options.case:
                continue
            if op == "attention":
                page, sizes = _page_size(), ((2, 256),) if quick else DECODE
                small = shape._replace(q_heads=shape.kv_heads * 2) if quick else shape
                for sequences, context in sizes:
                    for format in attention.FORMATS:
                        step = attention.Step(small, format, sequences, context, page)
                        found.append((op, name, step))
            else:
                small = shape
                if quick:
                    small = shape._replace(d_model=128, d_ff=128, groups=min(shape.groups, 4))
                for tokens in (8,) if quick else DECODE_TOKENS + PREFILL_TOKENS:
                    for format in grouped_matmul.FORMATS:
                        found.append((op, name, grouped_matmul.Step(small, format, tokens)))
    return found


def _page_size() -> int:
    return 128 if current_target().backend == "mosaic_tpu" else 64


def _measure(case: Case, effort: timing.Effort, copied: float, dense: float) -> dict[str, Any]:
    op, name, step = case
    result: dict[str, Any] = {"op": op, "case": name, "format": step.format}
    result |= {key: value for key, value in step._asdict().items() if isinstance(value, int)}
    module: Any = attention if op == "attention" else grouped_matmul
    arguments = module.inputs(step)
    ours: Callable[..., Any] = grouped_swiglu
    if op == "attention":

        def ours(*inputs: Any) -> Any:
            return attend(step.shape, *inputs)

    try:
        traced = str(jax.make_jaxpr(ours)(*arguments))
        own = any(word in traced for word in ("pallas_call", "core_map"))
        result["backend"] = current_target().backend if own else "reference"
        output = jax.jit(ours)(*arguments)
        result["error"] = _error(op, ours, output, arguments)
        result["correct"] = bool(result["error"] <= TOLERANCE[step.format])
        seconds = timing.seconds(ours, effort, *arguments)
    except NotImplementedError as error:
        print(f"{op} {name} {step.format}: skipped: {error}")
        return result | {"skipped": str(error)}
    result |= {"seconds": seconds, "bytes": step.bytes(), "flops": step.flops()}
    result["of_copy"] = step.bytes() / seconds / copied
    result["of_dense"] = step.flops() / seconds / dense
    result |= _baseline(op, step, effort, arguments)
    sizes = " ".join(
        f"{key} {value}"
        for key, value in step._asdict().items()
        if key[0] in "sct" and isinstance(value, int)
    )
    other = result.get("theirs_seconds")
    print(
        f"{op} {name} {step.format} {sizes} ({result['backend']}): {seconds * 1e6:.1f} µs, "
        f"{step.bytes() / seconds / 1e9:.4g} GB/s ({result['of_copy']:.0%} of copy), "
        f"{step.flops() / seconds / 1e12:.4g} TFLOP/s ({result['of_dense']:.0%} of dense); JAX's: "
        + (f"{other * 1e6:.1f} µs" if other else result["theirs_skipped"])
        + ("" if result["correct"] else f"; WRONG by {result['error']:.2g}")
    )
    return result


def _error(op: str, ours: Callable[..., Any], output: Any, arguments: tuple[Any, ...]) -> float:
    """Relative distance from the reference; of attention that of the first sequences."""
    if op == "attention":
        queries, pages, scales, where = arguments
        few = CHECKED_SEQUENCES
        arguments = (queries[:few], pages, scales, tuple(array[:few] for array in where))
        output = output[:few]
    with use_target(Target("reference", "cpu")):
        expected = jax.jit(ours)(*arguments)
    return _distance(output, expected)


def _distance(output: Any, expected: Any) -> float:
    got, right = (np.asarray(array.astype(jnp.float32)) for array in (output, expected))
    distance = float(np.linalg.norm(got - right) / np.linalg.norm(right))
    return distance if np.isfinite(distance) else 1e30


def _baseline(
    op: str, step: Any, effort: timing.Effort, arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Seconds of what a user would call instead, or why there are none."""
    try:
        if op == "attention":
            queries, pages, scales, where = arguments
            moved = tuple(jnp.swapaxes(array, 0, 1) for array in pages)

            def theirs(*inputs: Any) -> Any:
                return attention.theirs(step.shape, *inputs)

            return {"theirs_seconds": timing.seconds(theirs, effort, queries, moved, scales, where)}
        rows, *weights, sizes = arguments
        if step.format == "bf16":
            weights = [jnp.swapaxes(array, 1, 2) for array in weights]
        inputs = (rows, *weights, sizes)
        return {"theirs_seconds": timing.seconds(grouped_matmul.theirs, effort, *inputs)}
    except Exception as error:  # other people's code: whatever it raises, ours was measured
        return {"theirs_skipped": f"{type(error).__name__}: {str(error)[:200]}"}


def _layers(quick: bool, effort: timing.Effort, device_kind: str) -> list[dict[str, Any]]:
    found = []
    for entry, build, sizes in layer.stages(quick, _page_size()):
        try:
            function, arguments = build(*sizes)
            seconds = timing.seconds(function, effort, *arguments)
        except NotImplementedError as error:
            print(f"{entry}: skipped: {error}")
            continue
        what = f"{entry['op']} {entry['format']}, batch {entry['batch']}"
        print(f"{what}, context {entry['context']}: {seconds * 1e6:.1f} µs")
        found.append({"device_kind": device_kind, **entry, "seconds": seconds})
    return found


if __name__ == "__main__":
    sys.exit(main())
