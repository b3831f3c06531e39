"""The simulator against what papers measured; jaxserve/planner/README.md has the same numbers."""

import json
import subprocess
import sys

import pytest
import yaml

from jaxserve.planner.models import load_model
from tests import golden
from tests.jaxserve.planner.making import Compared
from tests.jaxserve.planner.paper_systems import STEP3, step3, upcycled, xdeepserve_colocated

ROWS = yaml.safe_load(golden.text("planner/paper_errors.yaml"))
ERRORS = {(system, quantity): error for system, quantity, error in ROWS}


def check(found: list[Compared]) -> None:
    for one in found:
        assert one.error == pytest.approx(ERRORS[one.system, one.quantity], abs=0.015), one


def test_one_disaggregated_and_one_colocated():
    check(step3(cases=STEP3[:1]))
    check(xdeepserve_colocated())


@pytest.mark.nightly
def test_all_systems():
    """Runs the command, in a process of its own: checked annotations would take minutes."""
    command = [sys.executable, "-m", "tests.jaxserve.planner.paper_systems"]
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
