"""Advice where no layout meets a target."""

from jaxserve.planner.advice import why_not
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.layouts import Target
from tests.jaxserve.planner.making import calculator, searcher


def advice(model: str, hardware: str, context: int, tpot: float, devices: int, **formats) -> str:
    found = searcher(model, hardware, context=context, **formats).search(
        target := Target(tpot=tpot, max_devices=devices)
    )
    assert found.plans == []
    named = {hardware: load_hardware(hardware)}
    return why_not(calculator(model, context, **formats), named, named, target, found)


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


def test_the_tpot_that_it_names_can_be_met():
    text = advice("qwen3-30b-a3b", "h100", 4096, 0.003, 8)
    named = float(text.rpartition("a TPOT of ")[2].partition(" ms")[0]) * 1e-3
    target = Target(tpot=named + 1e-4, max_devices=8)
    assert searcher("qwen3-30b-a3b", "h100").search(target).plans
