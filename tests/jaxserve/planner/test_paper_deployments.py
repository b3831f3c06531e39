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
    assert nodes.told.startswith("READ BACK")


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


def test_xdeepserves_prefill(found):
    """Hits and the spread of lengths are not published; the engine's form of latent attention is
    not the paper's."""

    def ttft(hits: str) -> Compared:
        return found["xDeepServe", f"TTFT ms, mean, nobody else there, {hits} hits"]

    assert abs(ttft("56%").error) < 0.2
    assert 0.4 < ttft("0%").error < 0.9
    for hits in ("0%", "56%"):
        engine = found[
            "xDeepServe", f"TTFT ms, mean, nobody else there, {hits} hits, as this engine"
        ]
        assert engine.planned > 1.7 * ttft(hits).planned
        assert "absorbed before them" in engine.told


def test_xdeepserves_decoding_is_predicted_too_fast(found):
    """At any rate that its prefill workers carry: a third of a dispatch is explained."""
    for hits in ("0%", "56%"):
        one = found[
            "xDeepServe", f"TPOT ms, at the most that the prefill workers carry, {hits} hits"
        ]
        assert -0.5 < one.error < -0.35
        assert "READ BACK" not in one.told
