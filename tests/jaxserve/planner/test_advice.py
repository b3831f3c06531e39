"""Advice where no layout meets a target."""

from jaxserve.planner.layouts import Target
from jaxserve.planner.search import why_not
from tests import golden
from tests.jaxserve.planner.making import searcher


def advice(model: str, hardware: str, context: int, tpot: float, devices: int, **formats) -> str:
    search = searcher(model, hardware, context=context, **formats)
    found = search.search(target := Target(tpot=tpot, max_devices=devices))
    assert found.plans == []
    return why_not(search, target, found)


def test_what_would_meet_a_target():
    """More devices, a smaller format, more time or a shorter context."""
    texts = [
        advice("kimi-k2", "h800", 8192, 0.05, 8),
        advice("qwen3-30b-a3b", "l20", 4096, 0.05, 1, weights="bfloat16"),
        advice("step3", "h800", 4096, 0.002, 32),
        advice("qwen3-32b", "l4", 524288, 0.05, 4),
    ]
    golden.check("planner/advice.txt", "\n\n".join(texts) + "\n")


def test_the_tpot_that_it_names_can_be_met():
    text = advice("qwen3-30b-a3b", "h100", 4096, 0.003, 8)
    named = float(text.rpartition("a TPOT of ")[2].partition(" ms")[0]) * 1e-3
    target = Target(tpot=named + 1e-4, max_devices=8)
    assert searcher("qwen3-30b-a3b", "h100").search(target).plans
