import pytest

from jaxserve.planner.advice import why_not
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.models import load_model
from jaxserve.planner.search import Searcher
from jaxserve.planner.stages import Calculator


def advice(model: str, hardware: str, context: int, tpot: float, devices: int, **formats) -> str:
    calculator = Calculator(load_model(model), context, Formats(**formats), Assumptions())
    named = {hardware: load_hardware(hardware)}
    target = Target(tpot=tpot, max_devices=devices)
    found = Searcher(calculator, named, named).search(target)
    assert found.plans == []
    return why_not(calculator, named, named, target, found)


def test_what_does_not_fit_takes_more_devices():
    text = advice("kimi-k2", "h800", 8192, 0.05, 8)
    assert "nothing fits on up to 8 devices" in text
    assert "needs 130.1 GB" in text
    assert "has 77.0 GB: bound by memory size" in text
    assert "what would meet it: up to 16 devices" in text


def test_or_a_smaller_format():
    text = advice("qwen3-30b-a3b", "l20", 4096, 0.05, 1, weights="bfloat16")
    assert "needs 61.3 GB" in text
    assert "weights in fp8" in text


def test_a_target_that_constants_alone_break():
    text = advice("step3", "h800", 4096, 0.002, 32)
    assert "no layout reaches 2 ms a token: the fastest, " in text
    assert "bound by overhead" in text
    assert "what would meet it: a TPOT of " in text


def test_a_context_too_long():
    text = advice("qwen3-32b", "l4", 524288, 0.05, 4)
    assert "a context of " in text


@pytest.mark.parametrize("tpot", [0.003])
def test_the_tpot_that_it_names_can_be_met(tpot):
    text = advice("qwen3-30b-a3b", "h100", 4096, tpot, 8)
    named = float(text.rpartition("a TPOT of ")[2].partition(" ms")[0]) * 1e-3
    calculator = Calculator(load_model("qwen3-30b-a3b"), 4096, Formats(), Assumptions())
    hardware = {"h100": load_hardware("h100")}
    found = Searcher(calculator, hardware, hardware).search(
        Target(tpot=named + 1e-4, max_devices=8)
    )
    assert found.plans
