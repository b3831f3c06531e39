"""Gradients and vmap of the ops: alike on every platform, or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import chunk_attention, merge, paged_attention, write_rows
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.dense import dense_swiglu
from pallas_kernels.norm_quantize import rms_norm, rms_norm_quantize
from pallas_kernels.quantize import dequantize_rows, quantize_rows
from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.nightly import nightly

CPU, V7X = Target("reference", "cpu"), Target("mosaic_tpu", "TPU7x", interpret=True)
H200 = Target("mosaic_gpu", "NVIDIA H200", interpret=True)
PLACES = jnp.asarray([0, 1], jnp.int32), jnp.asarray([1, 9], jnp.int32)
TABLE = jnp.asarray([[0, 1], [2, 3]], jnp.int32)
SIZES = jnp.asarray([3, 1], jnp.int32)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


PAGES = normal(4, 1, 8, 128)
HEADS, WEIGHTS, NORM = normal(2, 4, 128), normal(2, 128, 128), normal(128)
TURN = normal(2, 64)
OPS = {
    "paged_attention": lambda rows: paged_attention(
        rows.reshape(2, 4, 128), PAGES, PAGES, TABLE, *PLACES, scale=0.1
    )[0],
    "chunk_attention": lambda rows: chunk_attention(
        rows.reshape(2, 4, 128), HEADS, HEADS, *PLACES, scale=0.1
    )[0],
    "write_rows": lambda rows: write_rows((PAGES,), (rows[:2, None],), TABLE, *PLACES)[0],
    "rotate_and_write": lambda rows: rotate_and_write(
        (PAGES, PAGES), HEADS, rows[:2, None], rows[2:4, None], TURN, TURN, TABLE, *PLACES
    )[1][0],
    "grouped_matmul": lambda rows: grouped_matmul(rows[:4], WEIGHTS, SIZES),
    "grouped_swiglu": lambda rows: grouped_swiglu(rows[:4], WEIGHTS, WEIGHTS, WEIGHTS, SIZES),
    "rms_norm_quantize": lambda rows: rms_norm_quantize(rows, NORM, 1e-5, "int8")[0],
}
"""Each with a kernel on some platform; all take [8, 128]."""


@pytest.mark.parametrize("target", [CPU, H200, V7X], ids=lambda target: target.device_kind)
@pytest.mark.parametrize("op", OPS)
def test_a_gradient_is_refused_by_name(op, target):
    with use_target(target), pytest.raises(NotImplementedError, match=f"^{op} has no gradient"):
        jax.eval_shape(jax.grad(lambda rows: jnp.sum(OPS[op](rows))), normal(8, 128))


def test_plain_ops_have_gradients():
    rows = normal(8, 128)

    def plain(rows):
        normed = rms_norm(rows, NORM, 1e-5)
        again = dequantize_rows(*quantize_rows(jax.lax.stop_gradient(rows), "int8"), jnp.float32)
        dense = dense_swiglu(normed, (WEIGHTS[0],) * 3)
        return jnp.sum(merge([dense[:, None], again[:, None]], [rows[:, :1], rows[:, 1:2]]))

    assert jax.eval_shape(jax.grad(plain), rows).shape == (8, 128)


@pytest.mark.parametrize(
    ("op", "target"),
    [("write_rows", CPU), ("grouped_matmul", CPU), *nightly(("paged_attention", V7X))],
)
def test_vmap_is_one_call_after_the_other(op, target):
    several, call = normal(2, 8, 128), OPS[op]
    with use_target(target):
        found = jax.jit(jax.vmap(functools.partial(call)))(several)
    wanted = jax.jit(lambda several: jnp.stack([call(rows) for rows in several]))(several)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
