"""Simulates systems that papers measured: docs/measurements/planner.md has the same numbers.

The docstring of every comparison says which inputs are the paper's, and which are calibrated
(fitted to something that the paper measured). `python -m tests.jaxserve.planner.test_paper_systems`
prints the comparison.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import yaml

from jaxserve.config.deployment import Deployment
from jaxserve.planner.demand import Lengths
from jaxserve.planner.models import CostModel, load_model
from jaxserve.planner.options import assumptions
from jaxserve.planner.results import Result
from jaxserve.planner.scenario import Roles, scenario
from jaxserve.planner.simulate import Conditions, Simulation
from jaxserve.planner.stage_times import StageTimes
from jaxserve.planner.view import json_text
from tests import golden
from tests.jaxserve.planner.making import H800, Compared, Given, deployment

STEP3 = yaml.safe_load(golden.text("planner/step3_systems.yaml"))
"""Cases of Step-3 §7.3: attention and FFN instances of 8 GPUs, sequences a GPU and lane, and
tokens/s/GPU: table 8, and for the upcycled model 50 ms, which the paper takes for granted."""


def step3(cases: Sequence[dict[str, Any]] = STEP3) -> list[Compared]:
    """Step-3 (arXiv 2507.19427), table 8 and §7.3.

    The paper's: model, GPUs (it says "Hopper", H800 is ours), 3 lanes and their batches, contexts,
    formats, both directions of the link independent (§7.1). Calibrated: compute 0.7, memory 0.9 and
    50 µs a stage, to table 9 (attention layers alone); network 0.8 (§5.4, of DeepEP). Guesses: 20
    µs a crossing, 10 µs a collective.
    """
    found = []
    for case in cases:
        model = load_model("step3")
        if "upcycled" in case["name"]:
            model = upcycled(model)
        rate = _afd_on_h800(model, case).tokens_per_device
        found.append(Compared(f"Step-3 {case['name']}", "tokens/s/GPU", case["measured"], rate))
    return found


def upcycled(model: CostModel) -> CostModel:
    """Twice the experts, the same top-k (Step-3 §7.3)."""
    return model._replace(ffn=[g._replace(experts=2 * g.experts) for g in model.ffn])


def _afd_on_h800(model: CostModel, case: dict[str, Any]) -> Result:
    context = case["context"]
    planned = deployment(
        *(3, case["batch"], context + 128, 64, case["batch"]),
        attention={"dp": 8 * case["attention"], "weights": "fp8"},
        ffn={"ep": case["ffn"], "tp": 8, "weights": "fp8"},
        link={"dispatch": "fp8", "route": "broadcast"},
    )
    cache = msgspec.structs.replace(planned.cache, format=case["cache"])
    planned = msgspec.structs.replace(planned, cache=cache)
    roles = Roles(H800, H800, ("h800", "h800"))
    made = scenario(planned, model, roles, context, assumptions(["paper"]))
    for role in ("attention", "ffn"):
        part = getattr(made, role)
        formats = msgspec.structs.replace(part.formats, compute="fp8")
        made = made._replace(**{role: part._replace(formats=formats)})
    lengths = Lengths(prompt=context - 6, output=100, longest=context + 128)
    return _run(planned, made.rooflines(), lengths)


def _xdeepserve_afd() -> list[Compared]:
    """xDeepServe §7.1: 3 domains × 160 DP groups + 288 experts.

    The paper's: times of the stages (it prints attend's 0.7 ms as 700 ns), 5 ms of MTP and 2 ms of
    scheduler a step of both lanes, 61 layers, acceptance 0.9. Calibrated: nothing. 4 sequences a
    lane stand for the paper's, since the times are given.
    """
    layers, lanes = 61, 2
    roles = {"attention": {"dp": 160}, "ffn": {"ep": 288}}
    times = Given(
        layers=layers,
        groups=160,
        attend=0.7e-3,
        dispatch=0.172e-3,
        ffn=0.12e-3,
        combine=0.193e-3,
        leave=(5e-3 + 2e-3) / lanes,
    )
    lengths = Lengths(prompt=256, output=200, longest=512)
    result = _run(
        deployment(lanes, 4, 512, 64, 4, **roles), times, lengths, domains=3, tokens_a_step=1.9
    )
    name, tpot = "xDeepServe 3 x 160 + 288", result.tpot.p50 * 1e3
    return [Compared(name, "iteration ms", 93.0, 1.9 * tpot), Compared(name, "TPOT ms", 49.0, tpot)]


def _run(
    deployment: Deployment, times: StageTimes, lengths: Lengths, **conditions: object
) -> Result:
    """A few steps with every slot taken."""
    how = Conditions(**{"steps": 6, "warm_up": 2, **conditions})  # type: ignore[arg-type]
    return Simulation(deployment, times, lengths, how).run()[0]


ROWS = yaml.safe_load(golden.text("planner/paper_errors.yaml"))
ERRORS = {(system, quantity): error for system, quantity, error in ROWS}


def check(found: list[Compared]) -> None:
    for one in found:
        assert one.error == pytest.approx(ERRORS[one.system, one.quantity], abs=0.015), one


def test_one_system():
    check(step3(cases=STEP3[:1]))


@pytest.mark.nightly
def test_all_systems():
    """Runs the command, in a process of its own: checked annotations would take minutes."""
    command = [sys.executable, "-m", "tests.jaxserve.planner.test_paper_systems"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = [Compared(**one) for one in json.loads(done.stdout)]
    assert {(one.system, one.quantity) for one in found} == set(ERRORS)
    check(found)


if __name__ == "__main__":
    found = [*step3(), *_xdeepserve_afd()]
    print(json_text([one._asdict() for one in found]))
