"""Published deployments; jaxserve/planner/README.md has the same numbers.

What was read back must agree, and is called so; the others move with the rooflines, within bounds.
"""

import json
import subprocess
import sys

import pytest

from tests.jaxserve.planner.paper_deployments import Compared


@pytest.fixture(scope="module")
def found():
    # In a process of its own: checking the types of every call takes long here.
    command = [sys.executable, "-m", "tests.jaxserve.planner.paper_deployments", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    every = [Compared(**one) for one in json.loads(done.stdout)]
    return {(one.system.split()[0], one.quantity): one for one in every}


def test_what_was_read_back(found):
    nodes = found["DeepSeek's", "nodes, from the published tokens/s a node"]
    assert nodes.planned == pytest.approx(226.86, abs=0.01)
    assert abs(nodes.error) < 0.001
    pace = found["xDeepServe", "TPOT ms"]
    assert abs(pace.error) < 0.05
    for one in (nodes, pace):
        assert one.told.startswith("READ BACK")


def test_deepseeks_day(found):
    for quantity in (
        "prefill tokens/s a node, hits included",
        "decode tokens/s a node",
        "nodes",
        "USD a day at 2 USD a GPU and hour",
    ):
        one = found["DeepSeek's", quantity]
        assert abs(one.error) < 0.35, one
        assert "READ BACK" not in one.told


def test_xdeepserves_prefill_is_predicted_too_slow(found):
    """Its inputs are short of what a prediction takes; the README says which are guesses."""
    for hits in ("0%", "56%"):
        assert found["xDeepServe", f"TTFT ms, mean, nobody else there, {hits} hits"].error > 0.5
        one = found["xDeepServe", f"prefill workers always busy, {hits} hits"]
        assert one.planned > 4
        assert "READ BACK" in one.told
