"""The Hopper kernel replayed in NumPy: results, order of copies, and coverage."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.rotate_and_write import mosaic_gpu, rotate_and_write
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay
from tests.pallas_kernels.rotate_and_write.suite import RotateAndWriteSuite, check, make_case


class TestMosaicGpu(RotateAndWriteSuite):
    def run(self, case):
        return replay(functools.partial(rotate_and_write, **case.options), *case.arguments)


def test_queries_come_as_attention_multiplies_them():
    for cache, dtypes in (("int8", ["bfloat16"]), ("fp8", ["float8_e4m3fn", "float32"])):
        case = make_case(cache)
        with use_target(Target("mosaic_gpu", "NVIDIA H200")):
            function = functools.partial(rotate_and_write, **case.options)
            queries, written = jax.eval_shape(function, *case.arguments)
        assert [array.dtype for array in jax.tree.leaves(queries)] == dtypes
        assert [array.dtype for array in written] == [array.dtype for array in case.pages]


@golden.table("pallas_kernels/rotate_orders.yaml")
def test_an_order_that_is_taken_for_granted(old, new, said, monkeypatch):
    changed = mutated(mosaic_gpu._rotated_key, (old, new))
    monkeypatch.setattr(mosaic_gpu, "_rotated_key", changed)
    with pytest.raises(Unordered, match=said):
        TestMosaicGpu().run(make_case("bfloat16", normed=True))


PLACES_CHECKED = (
    "(place >= 0) & ",
    " & (column < columns)",
    " & (sequence >= 0)",
    " & (sequence < sequences)",
    "(page >= 0) & ",
    " & (page < pool)",
)
"""Conditions of `place_of`, whose lack the suites notice by what is then written."""


@pytest.mark.parametrize("old", PLACES_CHECKED)
def test_a_place_that_is_not_checked(old, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "place_of", mutated(mosaic_gpu.place_of, (old, "")))
    case = make_case("int8")
    with pytest.raises(AssertionError):
        check(case, *TestMosaicGpu().run(case), "int8")


def test_what_the_kernel_covers():
    def call(tokens, heads, width, v_width, dtype):
        pages = (jnp.zeros((2, 1, 8, width), dtype),)
        query = jnp.zeros((tokens, heads, width), jnp.bfloat16)
        return mosaic_gpu.gap(pages, query, jnp.zeros((tokens, 1, v_width), jnp.bfloat16))

    golden.check_values("pallas_kernels/hopper_rotate_gaps.txt", call, globals())
