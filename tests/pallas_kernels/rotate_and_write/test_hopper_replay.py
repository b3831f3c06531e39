"""The Hopper kernels as they ship, replayed in NumPy: their results, and the order of copies."""

import functools

import pytest

from pallas_kernels.rotate_and_write import (
    mosaic_gpu,
    mosaic_gpu_latents,
    norm_and_write,
    rotate_and_write,
)
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay
from tests.pallas_kernels.rotate_and_write import latents_suite
from tests.pallas_kernels.rotate_and_write.suite import check, make_case


def run(case):
    return replay(functools.partial(rotate_and_write, **case.options), *case.arguments)


def run_and_check(cache, **sizes):
    case = make_case(cache, **sizes)
    check(case, *run(case), cache)


def run_and_check_latents(cache, **sizes):
    case = latents_suite.make_case(cache, **sizes)
    function = functools.partial(norm_and_write, **case.options, stored=True)
    latents_suite.check(case, replay(function, *case.arguments), cache)


@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
def test_what_ships_gives_what_it_should(cache):
    run_and_check(cache, normed=cache == "fp8", kv_heads=2)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("plgpu.barrier_wait(smem.loaded)", "pass", "a load before a copy"),
        ("for start in (0, size)", "for start in (0,)", "wait for ever"),
        ('"k" in norms:\n        copies', '"k" in norms and 0:\n        copies', "wait for ever"),
    ],
)
def test_an_order_that_is_taken_for_granted(old, new, said, monkeypatch):
    changed = mutated(mosaic_gpu._rotated_key, (old, new))
    monkeypatch.setattr(mosaic_gpu, "_rotated_key", changed)
    with pytest.raises(Unordered, match=said):
        run(make_case("bfloat16", normed=True))


@pytest.mark.parametrize(
    ("cache", "sizes"), [("bfloat16", {"q_latent": 0}), ("int8", {"split": True}), ("fp8", {})]
)
def test_what_ships_of_latents_gives_what_it_should(cache, sizes):
    """All of a token is in registers: there is nothing to order."""
    run_and_check_latents(cache, **sizes)


@pytest.mark.parametrize(
    "old",
    [
        "(place >= 0) & ",
        " & (column < columns)",
        " & (sequence >= 0)",
        " & (sequence < sequences)",
        "(page >= 0) & ",
        " & (page < pool)",
    ],
)
@pytest.mark.parametrize("module", [mosaic_gpu, mosaic_gpu_latents])
def test_a_place_that_is_not_checked(old, module, monkeypatch):
    """The suites notice what is then written."""
    changed = mutated(mosaic_gpu.place_of, (old, ""))
    monkeypatch.setattr(module, "place_of", changed)
    with pytest.raises(AssertionError):
        (run_and_check if module is mosaic_gpu else run_and_check_latents)("int8")
