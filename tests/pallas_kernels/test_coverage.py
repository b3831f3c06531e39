"""No silent fallback: what has no kernel is said once, or refused."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import coverage
from pallas_kernels.attention.api import chunk_attention, paged_attention
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.dense import dense_matmul
from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.quantize import QuantArray
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.shapes import H200, V6E, shape

A100 = Target("triton_gpu", "NVIDIA A100-SXM4-80GB")
V100 = Target("reference", "Tesla V100-SXM2-16GB")
PAGES_OF_TOKENS = shape(4, 4, dtype=jnp.int32), *[shape(4, dtype=jnp.int32)] * 2


def attend(target, head_dim=128, page_size=64, cache=jnp.bfloat16, **options):
    """Traces a decode step of eight query heads."""
    pages = shape(16, 1, page_size, head_dim, dtype=cache)

    def call(*arrays):
        return paged_attention(*arrays, scale=1.0, **options)

    with use_target(target), coverage.collect_fallbacks() as found:
        jax.eval_shape(call, shape(4, 8, head_dim), pages, pages, *PAGES_OF_TOKENS)
    return [str(fallback) for fallback in found]


def test_attention():
    """The text gives the fallback's cost, too: at least 5 and 9 times the bytes."""

    def call(target, **options):
        (said,) = attend(target, **options)
        return said

    golden.check_values("pallas_kernels/attention_fallbacks.txt", call, globals())


def test_what_has_a_kernel_and_what_needs_none():
    assert attend(H200) == attend(A100, page_size=48) == attend(V6E) == []
    assert attend(Target("reference", "cpu"), head_dim=80) == []


def test_latents_without_their_rotated_part():
    """TPUs have a kernel."""

    def call(queries, latents, rotated, scales, *places):
        options = {"scale": 1.0, "v_width": 512, "k_scales": scales, "rope_pages": rotated}
        return paged_attention(queries, latents, None, *places, **options)

    pages = shape(16, 1, 128, 512, dtype=jnp.int8), shape(16, 1, 128, 64)
    arrays = (shape(4, 8, 576), *pages, shape(16, 1, 128, dtype=jnp.float32), *PAGES_OF_TOKENS)
    reason = "latents in int8 with their rotated part in an array of its own"
    assert traced(call, *arrays) == [("paged_attention", reason)]
    assert traced(call, *arrays, target=V6E) == []


def test_a_tpu_refuses_by_itself():
    with pytest.raises(NotImplementedError, match=r"pages of 8 tokens.*multiple of 16"):
        attend(V6E, page_size=8)


def test_a_kernel_that_small_pages_slow_down_is_said_too():
    (said,) = attend(V6E, page_size=16)
    assert (
        said == "paged_attention: slow on TPU v6 lite for pages of 16 tokens; the kernel starts "
        "8 times the copies of pages of 128, 4096 bytes each"
    )


def traced(call, *arrays, target=H200):
    with use_target(target), coverage.collect_fallbacks() as found:
        jax.eval_shape(functools.partial(call), *arrays)  # traced anew: JAX knows no target
    return [(fallback.op, fallback.reason) for fallback in found]


def quantised(*sizes, block):
    blocks = [-(-size // (step or size)) for size, step in zip(sizes[1:], block, strict=True)]
    return QuantArray(
        shape(*sizes, dtype=jnp.float8_e4m3fn), shape(sizes[0], *blocks, dtype=jnp.float32), block
    )


SIZES = shape(4, dtype=jnp.int32)
INT4 = QuantArray(shape(4, 256, 256, dtype=jnp.int4), shape(4, 256, 2, dtype=jnp.float32), (1, 128))
PLACES = shape(8, dtype=jnp.int32), shape(8, dtype=jnp.int32)
prompts = functools.partial(chunk_attention, scale=1.0)
norm = functools.partial(rms_norm_quantize, epsilon=1e-5, format="fp8")


def test_what_gpus_have_no_kernel_for():
    """TPUs have one, or need none."""

    def said(call):
        function, *arrays = eval(f"({call})", globals() | {"grouped_swiglu": grouped_swiglu})
        assert traced(function, *arrays, target=V6E) == []
        return "\n".join(map(": ".join, traced(function, *arrays)))

    golden.check_each("pallas_kernels/uncovered.txt", said)


def test_products_of_one_weight():
    whole = quantised(1, 192, 256, block=(96, 128))
    weight = jax.tree.map(lambda array: shape(*array.shape[1:], dtype=array.dtype), whole)
    found = traced(dense_matmul, shape(8, 256), weight)
    assert found == [("dense_matmul", "scales of blocks of 96 x 128")]
    odd = QuantArray(shape(461, 256, dtype=jnp.int8), shape(461, 1, dtype=jnp.float32), (1, 0))
    found = traced(dense_matmul, shape(8, 256), odd, target=V6E)
    assert found == [("dense_matmul", "d_out 461, not a multiple of 8")]
    found = traced(grouped_matmul, shape(32, 256), shape(4, 461, 256), SIZES, target=V6E)
    assert found == [("grouped_matmul", "d_out 461, not a multiple of 8")]
    narrow = shape(4, 256, 96), SIZES
    assert traced(grouped_matmul, shape(32, 96), *narrow, target=A100)[0][0] == "grouped_matmul"


def test_it_is_said_once_and_can_be_refused(caplog, monkeypatch):
    monkeypatch.setattr(coverage, "_said", set())
    fallback = coverage.Fallback("op", "a device", "sizes", "takes longer")
    with caplog.at_level(logging.WARNING):
        coverage.fall_back(fallback)
        coverage.fall_back(fallback)
    assert caplog.messages == ["op: no kernel on a device for sizes; plain XLA takes longer"]
    coverage.refuse_fallbacks()
    try:
        with pytest.raises(NotImplementedError, match="no kernel on a device"):
            coverage.fall_back(fallback)
    finally:
        coverage.refuse_fallbacks(False)
