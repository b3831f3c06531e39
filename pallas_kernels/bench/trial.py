"""Tries tiles on the device, in a process of its own, which may hang or break the device.

`python -m pallas_kernels.bench.trial --op OP ... [--case NAME ...] [--quick]`, which `tune.py`
starts, prints what there is to tune, a line of JSON; then for every line of JSON that it reads, a
case and tiles, a line with the seconds or with what went wrong.
"""

import argparse
import json
import sys
from typing import Any

import jax

from pallas_kernels.bench import correctness, timing
from pallas_kernels.bench.cases import INTERPRETED, MODULES, Case, cases
from pallas_kernels.target import Target, current_target, use_target
from pallas_kernels.tuned import recording, use_tiles


def describe(known: list[Case], target: Target) -> dict[str, Any]:
    """Returns the device kind, the calls of the cases, their tiles and choices, and skipped
    cases."""
    calls: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for case in known if target.backend != "reference" else []:
        module = MODULES[case.op]
        function = module.call(case.step)
        shapes = jax.eval_shape(lambda module=module, case=case: module.inputs(case.step))
        try:
            with recording() as asked:
                jax.eval_shape(lambda *x, function=function: function(*x), *shapes)
        except NotImplementedError as error:
            skipped[case.label()] = str(error)
            continue
        for call, one in asked.items():
            entry = calls.setdefault(call, {**one._asdict(), "cases": []})
            entry["cases"].append(case.label())
    return {
        "device_kind": target.device_kind,
        "backend": target.backend,
        "jax": jax.__version__,
        "calls": calls,
        "skipped": skipped,
    }


class Bench:
    """Keeps the inputs of the last case, and the reference's results."""

    def __init__(self, effort: timing.Effort):
        self.effort = effort
        self.label = ""
        self.arguments: tuple[Any, ...] = ()
        self.right: Any = None

    def attempt(self, case: Case, tiles: dict[str, Any]) -> dict[str, Any]:
        """Returns the seconds of a case with these tiles, by call, or why it has none."""
        module = MODULES[case.op]
        function = module.call(case.step)
        try:
            if self.label != case.label():
                self.label, self.arguments, self.right = "", (), None
                self.arguments = module.inputs(case.step)
                self.right = correctness.expected(function, module.checked(self.arguments))
                self.label = case.label()
            with use_tiles(tiles):
                seconds, output = timing.timed(function, self.effort, *self.arguments)
                error = correctness.distance(output, self.right)
                if error > correctness.TOLERANCE[case.step.format]:
                    return {"failed": f"wrong by {error:.2g}"}
                return {"seconds": seconds}
        except Exception as error:  # of a compiler, of a device: the next candidate may do
            return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench.trial")
    parser.add_argument("--op", nargs="+", required=True)
    parser.add_argument("--case", nargs="+")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    target = current_target()
    if options.quick and target.backend == "reference":
        target = INTERPRETED
    with use_target(target):
        known = cases(options.op, options.case, options.quick)
        print(json.dumps(describe(known, target)), flush=True)
        by_label = {case.label(): case for case in known}
        bench = Bench(timing.Effort(1, 1) if options.quick else timing.Effort(20, 5))
        for line in sys.stdin:
            request = json.loads(line)
            found = bench.attempt(by_label[request["case"]], request["tiles"])
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
