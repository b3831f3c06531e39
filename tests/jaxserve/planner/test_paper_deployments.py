"""Published deployments; jaxserve/planner/README.md has the same numbers.

What was read back must agree, and is called so; the others move with the rooflines, within bounds.
"""

import pytest

from tests.jaxserve.planner.making import Compared
from tests.jaxserve.planner.paper_deployments import deepseek, xdeepserve


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Compared]:
    return {(one.system.split()[0], one.quantity): one for one in [*deepseek(), *xdeepserve()]}


def test_what_was_read_back(found):
    nodes = found["DeepSeek's", "nodes, from the published tokens/s a node"]
    assert nodes.ours == pytest.approx(226.86, abs=0.01)
    assert abs(nodes.error) < 0.001


def test_deepseeks_day(found):
    day = [one for (system, _), one in found.items() if system == "DeepSeek's"]
    assert len(day) == 5
    for one in day[1:]:
        assert abs(one.error) < 0.35, one


def test_xdeepserves_prefill(found):
    """Hits and the spread of lengths are not published; the engine's form of latent attention is
    not the paper's."""

    def ttft(how: str) -> Compared:
        return found["xDeepServe", f"TTFT ms, mean, nobody else there, {how}"]

    assert abs(ttft("56% hits").error) < 0.2
    assert 0.4 < ttft("0% hits").error < 0.9
    for hits in ("0%", "56%"):
        engine = ttft(f"{hits} hits, as this engine")
        assert engine.ours > 1.7 * ttft(f"{hits} hits").ours


def test_xdeepserves_decoding_is_predicted_too_fast(found):
    """At any rate that its prefill workers carry: a third of a dispatch is explained."""
    for hits in ("0%", "56%"):
        one = found[
            "xDeepServe", f"TPOT ms, at the most that the prefill workers carry, {hits} hits"
        ]
        assert -0.5 < one.error < -0.25
