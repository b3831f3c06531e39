"""Plans a deployment of `golden/fleet/scenarios.txt`, for prompts and rates 1 % apart, too.

`python -m tests.jaxserve.fleet.scenarios LINE` prints it as JSON, for `test_deploy_command.py`.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxserve.fleet.deploy_command import _simulate, _simulation, _write, read_sizer
from jaxserve.planner.options import Parser, add_command


def planned(line: str, folder: Path) -> dict[str, Any]:
    """A plan in USD an hour, beside its neighbours, and times over what was asked for."""
    parser = Parser()
    add_command(parser, "deploy")
    options = parser.parse_args([*line.split(), "--write", str(folder / "plan.yaml")])
    sizer, hardware = read_sizer(options)
    plan, near = sizer.plan(), []
    for field in ("prompts", "rate"):
        value = getattr(options, field)
        for factor in (0.99, 1.01):
            setattr(options, field, type(value)(value * factor))
            near.append(read_sizer(options)[0].plan().best.dollars)
        setattr(options, field, value)
    best, asked = _write(options, sizer, plan, hardware).best, sizer.asked
    of_file = _simulate(_simulation(options, sizer, best), asked)
    late = of_file.ttft_asked / asked.ttft.seconds, of_file.tpot_asked / asked.tpot.seconds
    machine = max(best.fleet.worker.dollars, best.fleet.unit.dollars)
    return {"dollars": plan.best.dollars, "machine": machine, "near": near, "late": late}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(planned(sys.argv[1], Path(folder))))
