"""Grouped products with 8-bit weights against literal expectations and a NumPy definition."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.quantize import QuantArray, as_bits, quantize_weight

# None: weights as they are. Blocks of 4 x 4 leave a partial block in d_in and in d_out.
FORMATS = [("fp8", (1, 0)), ("fp8_block", (4, 4)), ("int8", (1, 0))]
ROWS, GROUPS, D_MODEL, D_FF = 48, 4, 6, 9

compiled_matmul = jax.jit(grouped_matmul)
compiled_swiglu = jax.jit(grouped_swiglu)


def quantise_row_numpy(x):
    """One INT8 row and its scale, with the products by reciprocals of `quantize_rows`."""
    x = x.astype(np.float32)
    scale = np.abs(x).max() * (np.float32(1) / np.float32(127))
    scale = np.float32(1) if scale < np.float32(2.0**-100) else scale
    return np.rint(np.clip(x * (np.float32(1) / scale), -127, 127)), scale


def row_product_numpy(x, w, group):
    """One row [d_in] times the weights of its group."""
    if not isinstance(w, QuantArray):
        return x.astype(np.float64) @ np.asarray(w[group], np.float64).T
    spread = np.asarray(w.scales[group], np.float64)
    values = np.asarray(w.values[group], np.float64)
    for axis in (0, 1):
        spread = np.repeat(spread, w.block[axis] or values.shape[axis], axis)
        spread = np.take(spread, range(values.shape[axis]), axis)
    if w.dtype == jnp.int8:
        row, scale = quantise_row_numpy(x)
        return (row * np.float64(scale)) @ (values * spread).T
    return x.astype(np.float64) @ (values * spread).T


def grouped_numpy(rows, sizes, d_out, function):
    """`function(row, group)` for every row of a group; zeros for the others."""
    output, groups = np.zeros((len(rows), d_out)), np.repeat(np.arange(len(sizes)), sizes)
    for index, group in enumerate(groups):
        output[index] = function(rows[index], group)
    return output


def swiglu_numpy(gate, up, down, dtype):
    def apply(row, group):
        gated = row_product_numpy(row, gate, group)
        hidden = gated / (1 + np.exp(-gated)) * row_product_numpy(row, up, group)
        return row_product_numpy(hidden.astype(dtype), down, group)

    return apply


def quantised(rng, shape, format, block):
    return quantize_weight(jnp.asarray(rng.normal(size=shape), jnp.float32), format, block)


def test_literal_int8():
    """Each row has its own scale, 1 and 2, and each group its own weights."""
    rows = jnp.asarray([[127.0, 1.0], [254.0, 4.0], [7.0, 7.0]])
    weights = QuantArray(
        jnp.asarray([[[1, 2]], [[3, -1]]], jnp.int8), jnp.asarray([[[1.0]], [[0.5]]]), (1, 0)
    )
    output = grouped_matmul(rows, weights, jnp.asarray([1, 1], jnp.int32))
    np.testing.assert_array_equal(output, [[129], [379], [0]])


def test_literal_fp8_blocks():
    weights = QuantArray(
        jnp.asarray([[[9.0, 9.0]], [[1.0, 2.0]]], jnp.float8_e4m3fn),
        jnp.asarray([[[1.0, 1.0]], [[10.0, 100.0]]]),
        (1, 1),
    )
    output = grouped_matmul(jnp.asarray([[1.0, 2.0]]), weights, jnp.asarray([0, 1], jnp.int32))
    np.testing.assert_array_equal(output, [[410]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("format", "block"), FORMATS)
@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS),
    seed=st.integers(0, 2**32 - 1),
)
def test_matmul(format, block, dtype, sizes, seed):
    """Ragged and empty groups; what lies past them is poisoned, and gives zeros."""
    rng = np.random.default_rng(seed)
    weights = quantised(rng, (GROUPS, D_FF, D_MODEL), format, block)
    rows = rng.normal(size=(ROWS, D_MODEL)).astype(dtype)
    rows[sum(sizes) :] = np.nan
    output = compiled_matmul(jnp.asarray(rows), weights, jnp.asarray(sizes, jnp.int32))
    assert output.dtype == dtype
    expected = grouped_numpy(rows, sizes, D_FF, lambda row, g: row_product_numpy(row, weights, g))
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(output.astype(jnp.float32), expected, tolerance, tolerance)


@pytest.mark.parametrize(
    "formats", [*((one, one, one) for one in FORMATS), (None, FORMATS[2], FORMATS[1])]
)
@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS),
    seed=st.integers(0, 2**32 - 1),
)
def test_swiglu(formats, sizes, seed):
    rng = np.random.default_rng(seed)
    shapes = [(GROUPS, D_FF, D_MODEL)] * 2 + [(GROUPS, D_MODEL, D_FF)]
    weights = [
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        if format is None
        else quantised(rng, shape, *format)
        for shape, format in zip(shapes, formats, strict=True)
    ]
    rows = rng.normal(size=(ROWS, D_MODEL)).astype(np.float32)
    rows[sum(sizes) :] = np.nan
    output = compiled_swiglu(jnp.asarray(rows), *weights, jnp.asarray(sizes, jnp.int32))
    expected = grouped_numpy(rows, sizes, D_MODEL, swiglu_numpy(*weights, np.float32))
    # A hidden value half way between two integers may be rounded to either, since silu differs in
    # its last bit: that is one of 127 steps of the row's largest, times the largest weights.
    step = 0.05 * (formats[2] is not None and formats[2][0] == "int8")
    difference = np.abs(np.asarray(output) - expected)
    assert np.all(difference <= 1e-4 + 1e-4 * np.abs(expected) + step * np.abs(expected).max())
    assert np.mean(difference > 1e-4 + 1e-4 * np.abs(expected)) < 0.05


@pytest.mark.parametrize(("format", "block"), FORMATS)
def test_a_row_does_not_depend_on_the_batch(format, block):
    rng = np.random.default_rng(0)
    weights = quantised(rng, (2, 32, 64), format, block)
    rows = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    alone = grouped_matmul(rows[:1], weights, jnp.asarray([1, 0], jnp.int32))
    together = grouped_matmul(rows, weights, jnp.asarray([20, 12], jnp.int32))
    np.testing.assert_array_equal(alone[0], together[0])


@pytest.mark.parametrize(("format", "block"), FORMATS)
def test_values_may_be_bits(format, block):
    rng = np.random.default_rng(0)
    weights = quantised(rng, (2, 8, 16), format, block)
    bits = dataclasses.replace(weights, values=as_bits(weights.values))
    rows, sizes = jnp.asarray(rng.normal(size=(9, 16)), jnp.float32), jnp.asarray([4, 3], jnp.int32)
    expected = grouped_matmul(rows, weights, sizes)
    np.testing.assert_array_equal(grouped_matmul(rows, bits, sizes), expected)


@pytest.mark.parametrize(("format", "block"), FORMATS)
def test_inside_shard_map(format, block):
    """Experts on two devices, their inner dimension on two more."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    rng = np.random.default_rng(0)
    gate, up = (quantised(rng, (4, 16, 8), format, block) for _ in range(2))
    down = quantised(rng, (4, 8, 16), format, block)
    rows = jnp.asarray(rng.normal(size=(24, 8)), jnp.float32)
    sizes = np.asarray([3, 9, 5, 1], np.int32)
    d_out, d_in = PartitionSpec("ep", "tp"), PartitionSpec("ep", None, "tp")
    scales_of_down = d_in if format == "fp8_block" else PartitionSpec("ep")
    sharded = jax.shard_map(
        lambda *arguments: jax.lax.psum(grouped_swiglu(*arguments), "tp"),
        mesh=mesh,
        in_specs=(
            PartitionSpec(),
            *[QuantArray(d_out, d_out, block)] * 2,
            QuantArray(d_in, scales_of_down, block),
            PartitionSpec("ep"),
        ),
        out_specs=PartitionSpec("ep"),
    )
    output = np.asarray(jax.jit(sharded)(rows, gate, up, down, sizes))

    def share(w, groups, axis, part):
        """The slices of one device."""
        values = np.split(np.asarray(w.values)[groups], 2, axis)[part]
        scales = np.asarray(w.scales)[groups]
        if scales.shape[axis] > 1:
            scales = np.split(scales, 2, axis)[part]
        return QuantArray(values, scales, block)

    for ep in (0, 1):
        groups = slice(2 * ep, 2 * ep + 2)
        expected = sum(
            grouped_numpy(
                np.asarray(rows),
                sizes[groups],
                8,
                swiglu_numpy(
                    share(gate, groups, 1, tp),
                    share(up, groups, 1, tp),
                    share(down, groups, 2, tp),
                    np.float32,
                ),
            )
            for tp in (0, 1)
        )
        mine = output[24 * ep : 24 * ep + 24]
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            QuantArray(jnp.zeros((2, 5, 3), jnp.int8), jnp.ones((2, 5)), (1, 0)),
            r"weights.scales is float32\(2, 5\), .* need float32\(2, 5, 1\)",
        ),
        (
            QuantArray(jnp.zeros((2, 5, 4), jnp.int8), jnp.ones((2, 5, 1)), (1, 0)),
            r"weights has shape \(2, 5, 4\), needs \(2, 'any', 3\)",
        ),
        (
            QuantArray(jnp.zeros((5, 3), jnp.int8), jnp.ones((5, 1)), (1, 0)),
            r"weights has shape \(5, 3\), needs \(2, 'any', 3\)",
        ),
    ],
)
def test_bad_calls(weights, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(grouped_matmul)(jnp.zeros((4, 3)), weights, jnp.zeros(2, jnp.int32))


class TestRowFormat:
    """What `row_format` means; 127 and 448 are the largest values, where scales are to be 1."""

    def test_literal_int8(self):
        """Two blocks of 128 columns, the second one of two: scales 1 and 2."""
        row = np.zeros((1, 130), np.float32)
        row[0, :2], row[0, 128:] = [127, 0.4], [254, 3.2]
        weights = np.zeros((1, 1, 130), np.int8)
        weights[0, 0, :2], weights[0, 0, 128:] = [2, 100], [1, 10]
        weights = QuantArray(jnp.asarray(weights), jnp.full((1, 1, 1), 0.5), (1, 0))
        sizes = jnp.asarray([1], jnp.int32)
        output = grouped_matmul(jnp.asarray(row), weights, sizes, row_format="int8")
        # 0.5 * (127 * 2 + 0 * 100) + 0.5 * 2 * (127 * 1 + 2 * 10)
        np.testing.assert_array_equal(output, [[127 + 147]])

    def test_literal_fp8(self):
        """448 and 3.3 (between 3.25 and 3.5, nearer to 3.25), then 896 and 3.3 in a scale of 2."""
        row = np.zeros((1, 256), np.float32)
        row[0, :2], row[0, 128:130] = [448, 3.3], [896, 3.3]
        weights = np.zeros((1, 1, 256), np.float32)
        weights[0, 0, :2], weights[0, 0, 128:130] = [1, 2], [0.5, 4]
        values = jnp.asarray(weights).astype(jnp.float8_e4m3fn)
        weights = QuantArray(values, jnp.asarray([[[1.0, 0.25]]]), (128, 128))
        sizes = jnp.asarray([1], jnp.int32)
        output = grouped_matmul(jnp.asarray(row), weights, sizes, row_format="fp8")
        # 448 + 2 * 3.25, and 0.25 * 2 * (448 * 0.5 + 4 * 1.625): 1.65 is nearest to 1.625
        np.testing.assert_array_equal(output, [[454.5 + 0.5 * (224 + 6.5)]])

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    def test_literal_rows_as_they_are(self, dtype):
        """INT8, and two scales along d_in: rows in INT8 would make 0.25 of 200 a zero."""
        rows = jnp.asarray([[200, 0.25, 0.5, -2], [1, 2, 3, 4], [7, 7, 7, 7]], dtype)
        values = jnp.asarray([[[1, 100, -128, 127]], [[3, -1, 2, 0]]], jnp.int8)
        weights = QuantArray(values, jnp.asarray([[[2.0, 1.0]], [[0.5, 4.0]]]), (1, 2))
        sizes = jnp.asarray([1, 1], jnp.int32)
        output = grouped_matmul(rows, weights, sizes, row_format="float")
        assert output.dtype == dtype
        # 2 * (200 + 25) + (-64 - 2 * 127), 0.5 * (3 - 2) + 4 * 6, padding
        np.testing.assert_array_equal(output.astype(jnp.float32), [[132], [24.5], [0]])

    @pytest.mark.parametrize(("format", "block"), [("fp8", (1, 0)), ("fp8_block", (4, 4))])
    def test_fp8_has_rows_as_they_are_anyway(self, format, block):
        rng = np.random.default_rng(0)
        weights = quantised(rng, (2, 8, 6), format, block)
        rows = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32)
        sizes = jnp.asarray([2, 3], jnp.int32)
        expected = grouped_matmul(rows, weights, sizes)
        output = grouped_matmul(rows, weights, sizes, row_format="float")
        np.testing.assert_array_equal(output, expected)

    def test_literal_swiglu_of_rows_as_they_are(self):
        """silu(x) is x where it is large, and 128.5 is one of the hidden numbers."""

        def weight(values, scale):
            values = jnp.asarray([values], jnp.int8)
            return QuantArray(values, jnp.full((1, values.shape[1], 1), scale), (1, 0))

        rows, sizes = jnp.asarray([[64.0, 0.25]]), jnp.asarray([1], jnp.int32)
        # gate: 128.5 and 64; up: 1 and 64
        arguments = weight([[2, 2], [1, 0]], 1.0), weight([[0, 16], [4, 0]], 0.25)
        down = weight([[1, 0], [4, 1]], 0.5)
        output = grouped_swiglu(rows, *arguments, down, sizes, row_format="float")
        np.testing.assert_array_equal(output, [[64.25, 257 + 2048]])

    def test_hidden_rows_are_not_rounded_before(self):
        """126 / 207 of 127 is 77.3; rounded to BF16, the two hidden values would give 77.8."""
        rows = jnp.asarray([[127.0, 127.0]], jnp.bfloat16)

        def weight(values, scale):
            values = jnp.asarray([values], jnp.int8)
            return QuantArray(values, jnp.full((1, values.shape[1], 1), scale), (1, 0))

        gate, up = weight([[127, 0], [127, 0]], 1e-2), weight([[127, 80], [126, 0]], 1.0)
        sizes = jnp.asarray([1], jnp.int32)
        output = grouped_swiglu(rows, gate, up, weight([[0, 1]], 1.0), sizes, row_format="int8")
        largest = 127 * 127 * 1e-2 * 127 * 207  # where silu is the number itself
        np.testing.assert_allclose(output.astype(jnp.float32), [[77 * largest / 127]], rtol=4e-3)

    @pytest.mark.parametrize(
        ("row_format", "weight", "message"),
        [
            ("fp4", ("fp8", (1, 0)), "row_format is 'fp4'"),
            ("int8", ("fp8", (1, 0)), "weights is float8_e4m3fn"),
            ("fp8", ("int8", (1, 0)), "weights is int8"),
            ("fp8", ("fp8", (1, 96)), "blocks of 96 of d_in"),
            ("fp8", ("int4", (1, 128)), "weights is int4"),
            ("int8", ("int4", (1, 96)), "blocks of 96 .* multiple of 128, or to divide it"),
            ("fp8", None, "not in 8 or 4 bits"),
            ("float", None, "row_format is 'float', weights is float32, not in 8 or 4 bits"),
            ("bfloat16", ("int8", (1, 0)), "row_format is 'bfloat16', needs None or .*'float'"),
        ],
    )
    def test_what_does_not_fit(self, row_format, weight, message):
        floats = jnp.ones((2, 8, 256), jnp.float32)
        weights = floats if weight is None else quantize_weight(floats, weight[0], weight[1])
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(grouped_matmul)(
                jnp.ones((3, 256), jnp.float32),
                weights,
                jnp.asarray([1, 2], jnp.int32),
                row_format=row_format,
            )
