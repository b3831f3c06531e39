"""One weight for all rows: kernels, interpreted or replayed, against NumPy; what is not theirs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.dense import (
    MOST_TILES,
    TILE,
    covers,
    dense_matmul,
    dense_swiglu,
    normed_matmul,
    swiglu_steps_of_fp8,
)
from pallas_kernels.quantize import QuantArray, StackEntry
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.grouped_matmul.suite import Weight, assert_near, rounded_numpy
from tests.pallas_kernels.hopper_replay import replay
from tests.pallas_kernels.nightly import nightly

TARGETS = {
    "tpu": Target("mosaic_tpu", "TPU7x", interpret=True),
    "gpu": Target("mosaic_gpu", "NVIDIA H200"),
}
ROWS, D_IN, D_FF, D_OUT = 9, 256, 256, 192  # of columns no multiple of 128


def dense_weight(rng, d_out, d_in, format):
    """With NumPy's definition, and without the axis of groups."""
    weight = Weight(rng, (1, d_out, d_in), format, jnp.bfloat16, [1])
    return weight, jax.tree.map(lambda array: array[0], weight.jax)


def in_stack(weight, swapped=True):
    """The weight as the middle one of a stack; others' scales are poison."""

    def entry(array):
        other = jnp.full_like(array, jnp.nan) if array.dtype == jnp.float32 else array
        stack = jnp.stack([other, array, other])
        return StackEntry(stack.mT if swapped else stack, jnp.int32(1), swapped)

    return jax.tree.map(entry, weight)


def products_numpy(rows, gate, up, down, row_format=None, scales_of_hidden=0):
    """Products with the gate, and through the network: `row_format` is that of both rows in blocks;
    `scales_of_hidden`: columns of a scale of hidden rows in FP8, from BF16."""
    gated, upper = (np.stack([w.product(row, 0, row_format) for row in rows]) for w in (gate, up))
    with np.errstate(over="ignore"):
        hidden = gated / (1 + np.exp(-gated)) * upper
    hidden = hidden if row_format else hidden.astype(jnp.bfloat16)
    if scales_of_hidden:
        hidden = [rounded_numpy(row, "fp8", scales_of_hidden) for row in hidden]
    return gated, np.stack([down.product(row, 0, row_format) for row in hidden])


def rows_of(rng):
    return (rng.normal(size=(ROWS, D_IN)) / 16).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("target", "format"), [("tpu", "int8"), ("gpu", "fp8_block"), *nightly(("tpu", "fp8_block"))]
)
def test_as_numpy(target, format):
    rng = np.random.default_rng(0)
    rows = rows_of(rng)
    (gate, gate_array), (up, up_array) = (dense_weight(rng, D_FF, D_IN, format) for _ in range(2))
    down, down_array = dense_weight(rng, D_OUT, D_FF, format)

    def both(rows, gate, up, down):
        assert covers(rows, gate, up, down)
        return dense_matmul(rows, gate), dense_swiglu(rows, (gate, up, down))

    arguments = jnp.asarray(rows), gate_array, up_array, down_array
    if target == "tpu":
        arguments = arguments[0], *map(in_stack, arguments[1:], (False, False, True))
    with use_target(TARGETS[target]):
        product, network = (
            replay(both, *arguments) if target == "gpu" else jax.jit(both)(*arguments)
        )
    rounded = "fp8" if target == "gpu" else None
    gated, expected = products_numpy(rows, gate, up, down, rounded)
    np.testing.assert_allclose(
        np.asarray(product, np.float64), gated, 1e-2, 1e-2 * np.abs(gated).max() / 30
    )
    assert_near(network, expected, 2e-2)


@pytest.mark.parametrize(
    "format",
    [
        *("float", "fp8", "fp8_bits", "fp8_block", ("fp8", (7, 5)), ("fp8", (0, 0))),
        *("int8", ("int8", (4, 2))),
    ],
    ids=str,
)
def test_without_kernels(format):
    """Hidden rows and a network's results are rounded, those of one product are not."""
    rng = np.random.default_rng(0)
    rows = rows_of(rng)
    rows[0] = 0
    shapes = ((24, D_IN), (24, D_IN), (8, 24))
    (gate, up, down), arrays = zip(*(dense_weight(rng, *s, format) for s in shapes), strict=True)
    product = dense_matmul(jnp.asarray(rows), arrays[0])
    network = dense_swiglu(jnp.asarray(rows), arrays)
    assert (product.dtype, network.dtype) == (jnp.float32, jnp.bfloat16)
    gated, expected = products_numpy(rows, gate, up, down)
    np.testing.assert_allclose(product, gated, 1e-5, 1e-5 * np.abs(gated).max())
    assert_near(network, expected, 8e-3)
    if format != "float":
        np.testing.assert_array_equal(dense_matmul(jnp.asarray(rows), in_stack(arrays[0])), product)


@pytest.mark.parametrize(("target", "taken"), [("gpu", True), ("cpu", False)])
def test_rows_that_came_in_8_bits(target, taken):
    """On a GPU their values, here as bits, are multiplied, and the rows are not looked at."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, D_IN)).astype(jnp.float8_e4m3fn)
    scales = 2.0 ** rng.integers(-6, 0, (ROWS, 1)).astype(np.float32)
    kept = jnp.asarray(values.view(np.uint8) if taken else values)
    narrow = QuantArray(kept, jnp.asarray(scales), (1, 0))
    rows = (values.astype(np.float32) * scales).astype(jnp.bfloat16)  # exactly
    shapes = ((24, D_IN), (24, D_IN), (8, 24))
    weights, arrays = zip(*(dense_weight(rng, *s, "fp8") for s in shapes), strict=True)
    given = jnp.full_like(rows, jnp.nan) if taken else jnp.asarray(rows)
    with use_target(TARGETS.get(target, Target("reference", "cpu"))):
        found = dense_swiglu(given, arrays, narrow)
    _, expected = products_numpy(rows, *weights, scales_of_hidden=24 if taken else 0)
    assert_near(found, expected, 8e-3)


@pytest.mark.parametrize(
    ("format", "d_in"), [("fp8", D_IN), ("fp8_block", D_IN), ("fp8_block", 2048)]
)
def test_a_gpu_multiplies_rows_in_fp8(format, d_in):
    """Rows have a scale for each block of the weights, or one; the products are of FP8 alone. Of a
    long row parts are summed up apart."""
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(ROWS, d_in)) / 16).astype(jnp.bfloat16)
    weight, array = dense_weight(rng, D_OUT, d_in, format)
    with use_target(TARGETS["gpu"]):
        traced = str(jax.make_jaxpr(functools.partial(dense_matmul))(jnp.asarray(rows), array))
        found = replay(dense_matmul, jnp.asarray(rows), array)
        factors = jnp.full(d_in, 2.0**-4, jnp.bfloat16)
        joined = jnp.asarray(np.concatenate([rows, rows], axis=1))  # the first columns are normed
        normed = replay(lambda rows: normed_matmul(rows, (factors, 0.0), array), joined)
    squares = np.mean(np.square(rows.astype(np.float64)), axis=1, keepdims=True)
    columns = 128 if format == "fp8_block" else d_in
    rounded = [rounded_numpy(row, "fp8", columns) for row in rows]
    expected = np.stack([weight.product(row, 0) for row in rounded])
    assert_near(found, expected, 4e-3)
    assert_near(normed, expected / 16 / np.sqrt(squares), 4e-2)
    wide = np.stack([weight.product(row, 0) for row in rows])
    assert 5e-3 < np.abs(found - wide).max() / np.abs(wide).max() < 5e-2
    if format == "fp8_block":  # rows that came in FP8, here NaN, are not looked at
        came = QuantArray(jnp.asarray(rows, jnp.float8_e4m3fn), jnp.ones((ROWS, 1)), (1, 0))
        nothing = jnp.full(rows.shape, jnp.nan, jnp.bfloat16)
        with use_target(TARGETS["gpu"]):
            found = replay(lambda rows, came: dense_matmul(rows, array, came), nothing, came)
        exact = [weight.product(row, 0) for row in np.asarray(came.values, np.float32)]
        assert_near(found, np.stack(exact), 4e-3)
    assert "f16" not in "".join(re.findall(r"dot_general.*", traced)).replace("bf16", "")


@pytest.mark.parametrize("target", TARGETS)
def test_the_plan_is_constant(target):
    """A program does not make the list of one group again in every layer."""
    rng = np.random.default_rng(0)
    _, weight = dense_weight(rng, D_OUT, D_IN, "fp8_block")
    with use_target(TARGETS[target]._replace(interpret=False)):
        traced = jax.make_jaxpr(dense_matmul)(jnp.asarray(rows_of(rng)), weight)
    called = {equation.primitive.name for equation in traced.eqns}
    assert "grouped" in str(traced)
    assert not called & {"cumsum", "floor_divide", "argsort", "gather", "clamp"}


def test_what_is_covered():
    def call(target, dtype, weight):
        _, array = dense_weight(np.random.default_rng(0), *weight)
        rows = jnp.zeros((8, array.shape[1]), dtype)
        with use_target(Target("reference", "cpu")):
            assert not covers(rows, array)
        with use_target(TARGETS[target]):
            return covers(rows, array)

    golden.check_values("pallas_kernels/dense_covered.txt", call, globals())


@pytest.mark.parametrize("format", ["float", "fp8", "fp8_block", "int8"])
def test_a_row_is_the_same_alone_and_among_others(format):
    """Bit for bit, on CPU, where XLA has another product for a single row."""
    rng = np.random.default_rng(0)
    _, weights = dense_weight(rng, 64, 384, format)
    rows = jnp.asarray(rng.normal(size=(33, 384)), jnp.bfloat16)
    if format == "float":
        rows, weights = rows.astype(jnp.float32), weights.astype(jnp.float32)
    alone, few, many = (jax.jit(dense_matmul)(rows[:count], weights) for count in (1, 3, 33))
    assert np.abs(alone).max() > 0
    np.testing.assert_array_equal(alone, few[:1])
    np.testing.assert_array_equal(alone, many[:1])


@pytest.mark.parametrize("format", ["fp8", "fp8_block"])
def test_a_network_in_two_steps(format):
    """Gives what experts of a single group give: rows that came in FP8, the first columns of wider
    ones, and hidden rows in FP8 blocks."""
    rng = np.random.default_rng(0)
    wide = jnp.asarray(rng.normal(size=(16, D_IN + 128)), jnp.float8_e4m3fn)
    rows = jnp.zeros((16, D_IN), jnp.bfloat16)
    narrow = QuantArray(wide, jnp.asarray(rng.random((16, 1)) / 16, jnp.float32), (1, 0))
    (gate, gate_array), (up, up_array) = (dense_weight(rng, D_FF, D_IN, format) for _ in range(2))
    down, down_array = dense_weight(rng, D_OUT, D_FF, format)
    arrays = gate_array, up_array, down_array
    in_int8 = dataclasses.replace(narrow, values=jnp.zeros(wide.shape, jnp.int8))
    assert swiglu_steps_of_fp8(rows, narrow, arrays) is None
    with use_target(TARGETS["gpu"]):
        assert swiglu_steps_of_fp8(rows, in_int8, arrays) is None
        assert swiglu_steps_of_fp8(rows[:9], narrow, arrays) is None
        many = jnp.zeros((MOST_TILES * TILE[0] + 8, D_IN), rows.dtype)
        assert swiglu_steps_of_fp8(many, narrow, arrays) is None
        hidden, project = swiglu_steps_of_fp8(rows, narrow, arrays)
        found = replay(lambda narrow: project(hidden(narrow)), narrow)
        options = {"source": jnp.arange(16, dtype=jnp.int32), "narrow": narrow, "row_format": "fp8"}
        stacks = jax.tree.map(lambda array: array[None], arrays)
        same = replay(lambda rows: grouped_swiglu(rows, *stacks, jnp.array([16]), **options), rows)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, same)
    came = np.asarray(wide[:, :D_IN], np.float32) * np.asarray(narrow.scales)
    _, expected = products_numpy(came, gate, up, down)
    assert_near(found, expected, 5e-2)
