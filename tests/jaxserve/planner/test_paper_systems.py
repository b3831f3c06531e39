"""The simulator against what papers measured; jaxserve/planner/README.md has the same numbers."""

import json
import subprocess
import sys

import pytest

from jaxserve.planner.models import load_model
from tests.jaxserve.planner.paper_systems import STEP3, step3, upcycled, xdeepserve_colocated
from tests.jaxserve.planner.published import Compared

ERRORS = {
    ("Step-3 2A2F, 4K, FP8", "tokens/s/GPU"): -0.04,
    ("Step-3 3A2F, 4K, BF16 attention", "tokens/s/GPU"): -0.07,
    ("Step-3 4A2F, 8K, FP8", "tokens/s/GPU"): -0.02,
    # Not measured by the paper: it takes for granted that 3072 rows an FFN instance, one and a half
    # times 2A2F's, still move within the instance in time.
    ("Step-3 3A4F, upcycled to 600 B", "tokens/s/GPU"): -0.30,
    # 69 % of them are what an instance has experts for.
    ("Step-3 3A4F, upcycled, needed rows alone", "tokens/s/GPU"): -0.05,
    ("xDeepServe 3 x 160 + 288", "iteration ms"): -0.01,
    ("xDeepServe 3 x 160 + 288", "TPOT ms"): -0.01,
    ("xDeepServe colocated EP288", "dispatch µs, mean"): 0.0,
    ("xDeepServe colocated EP288", "combine µs, mean"): -0.03,
    ("xDeepServe colocated EP288", "iteration ms with gap"): 0.0,
    ("xDeepServe colocated EP288", "TPOT ms"): 0.0,
    # With a lognormal spread alone -0.75 and -0.82: the paper's tails are from pauses.
    ("xDeepServe colocated EP288", "dispatch µs, most"): -0.10,
    ("xDeepServe colocated EP288", "combine µs, most"): -0.17,
}


def check(found: list[Compared]) -> None:
    for one in found:
        assert one.error == pytest.approx(ERRORS[one.system, one.quantity], abs=0.015), one


def test_one_disaggregated_and_one_colocated():
    check(step3(cases=STEP3[:1]))
    check(xdeepserve_colocated())


@pytest.mark.nightly
def test_all_systems():
    """Runs the command, in a process of its own: checked annotations would take minutes."""
    command = [sys.executable, "-m", "tests.jaxserve.planner.paper_systems", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = [Compared(**one) for one in json.loads(done.stdout)]
    assert {(one.system, one.quantity) for one in found} == set(ERRORS)
    check(found)


def test_the_upcycled_model_is_twice_as_large():
    """Step-3 §7.3: in the 600B region."""
    model = load_model("step3")
    large = upcycled(model)
    assert large.parameters == pytest.approx(600e9, rel=0.03)
    assert large.ffn_activated == model.ffn_activated
