"""What every backend of `grouped_matmul` must do, against NumPy. Backends' tests inherit it.

Everything that must not be read is poison: rows that belong to no group, the weights and the scales
of groups without rows.
"""

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.quantize import QuantArray
from pallas_kernels.target import Target, use_target

FORMATS = {
    "float": None,
    "fp8": ("fp8", (1, 0)),
    "fp8_bits": ("fp8_bits", (1, 0)),
    "fp8_block": ("fp8", (128, 128)),
    "fp8_large_block": ("fp8", (256, 0)),
    "fp8_small_block": ("fp8", (64, 96)),
    "int8": ("int8", (1, 0)),
    "int8_block": ("int8", (128, 128)),
    "int4": ("int4", (1, 128)),
    "int4_zeros": ("int4", (1, 128)),
    "int4_small_zeros": ("int4", (1, 32)),
}
"""Names of formats: dtype of the values and block (block_out, block_in)."""

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def quantised(dtype, shape, block):
    """Shapes of weights with a scale for each block, without values."""
    counts = [
        1 if not size else -(-axis // size) for axis, size in zip(shape[1:], block, strict=True)
    ]
    return QuantArray(
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((shape[0], *counts), jnp.float32),
        block,
    )


def spread_numpy(scales, block, shape):
    """Every scale repeated over its block, float64."""
    spread = np.asarray(scales, np.float64)
    for axis, size in zip((-2, -1), block, strict=True):
        spread = np.repeat(spread, size or shape[axis], axis)
        spread = np.take(spread, range(shape[axis]), axis)
    return spread


def quantised_row_numpy(x):
    """One row in INT8 and its scale."""
    x = x.astype(np.float32)
    scale = np.abs(x).max() * (np.float32(1) / np.float32(127))
    scale = np.float32(1) if scale < np.float32(2.0**-100) else scale
    return np.rint(np.clip(x * (np.float32(1) / scale), -127, 127)).astype(np.float64), scale


def quantised_blocks_numpy(x, kind):
    """One row in 8 bits, with a scale for every 128 columns, multiplied by them again."""
    largest = 127 if kind == "int8" else 448
    x, parts = x.astype(np.float32), []
    for part in np.split(x, range(128, len(x), 128)):
        scale = np.abs(part).max() * (np.float32(1) / np.float32(largest))
        scale = np.float32(1) if scale < np.float32(2.0**-100) else scale
        values = np.clip(part * (np.float32(1) / scale), -largest, largest)
        values = np.rint(values) if kind == "int8" else values.astype(ml_dtypes.float8_e4m3fn)
        parts.append(values.astype(np.float64) * scale)
    return np.concatenate(parts)


class Weight:
    """Random weights [groups, d_out, d_in] of one format, as JAX has them and as NumPy does."""

    def __init__(self, rng, shape, format, dtype, sizes):
        empty = np.asarray(sizes) == 0
        self.format = FORMATS[format]
        if self.format is None:
            values = rng.normal(size=shape).astype(dtype)
            self.numpy = values.astype(np.float64)
            values[empty] = np.nan
            self.jax = jnp.asarray(values)
            return
        kind, block = self.format
        counts = [
            1 if not size else -(-axis // size) for axis, size in zip(shape[1:], block, strict=True)
        ]
        scales = rng.uniform(0.5, 2, (shape[0], *counts)).astype(np.float32)
        zeros = None
        if kind == "int8":
            values = rng.integers(-127, 128, shape).astype(np.int8)
        elif kind == "int4":
            values = rng.integers(-8, 8, shape).astype(ml_dtypes.int4)
            if format.endswith("zeros"):
                zeros = rng.integers(-8, 8, scales.shape).astype(np.int8)
        else:
            values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        self.values = values.astype(np.float64)
        if zeros is not None:
            self.values -= spread_numpy(zeros, block, shape)
            zeros = jnp.asarray(zeros)
        self.numpy = self.values * spread_numpy(scales, block, shape)
        scales[empty] = np.nan
        if kind not in ("int8", "int4"):
            values[empty] = np.nan
        values = jnp.asarray(values)
        if kind == "fp8_bits":
            values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        self.jax = QuantArray(values, jnp.asarray(scales), block, zeros)

    def product(self, row, group, row_format=None):
        """A row [d_in] times a group's weights."""
        if row_format in ("fp8", "int8"):
            return quantised_blocks_numpy(row, row_format) @ self.numpy[group].T
        if row_format is None and self.format is not None and self.format[0] == "int8":
            row, scale = quantised_row_numpy(row)
            return row @ self.numpy[group].T * scale
        return row.astype(np.float64) @ self.numpy[group].T


def fresh(function):
    """A function that JAX has not traced for another target yet."""

    def call(*arguments):
        return function(*arguments)

    return call


def by_group_numpy(rows, sizes, d_out, function):
    """`function(row, group)` for every row of a group; zeros for the others."""
    output = np.zeros((len(rows), d_out))
    for index, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        output[index] = function(rows[index], group)
    return output


def poisoned_rows(rng, rows, d_in, dtype, sizes):
    values = rng.normal(size=(rows, d_in)).astype(dtype)
    values[sum(sizes) :] = np.nan
    return values


class RowsInBlocksSuite:
    """Rows in 8 bits, too.

    Sizes are small, since interpreted kernels are slow; a backend may set its own.

    Attributes:
      target: what is tested.
      d_ff: of the networks whose hidden rows are quantised in blocks of 128.
    """

    target: ClassVar[Target]
    rows: ClassVar[int] = 70
    d_in: ClassVar[int] = 256
    d_out: ClassVar[int] = 256
    d_ff: ClassVar[int] = 256

    def with_row_format(self, function, row_format, *arguments):
        """The output."""
        with use_target(self.target):
            compiled = jax.jit(fresh(functools.partial(function, row_format=row_format)))
            return np.asarray(compiled(*arguments), np.float64)

    @pytest.mark.parametrize(
        ("format", "dtype"),
        [
            ("fp8", jnp.bfloat16),
            ("fp8_bits", jnp.float32),
            ("fp8_block", jnp.bfloat16),
            ("fp8_large_block", jnp.bfloat16),
            ("int8", jnp.bfloat16),
            ("int8_block", jnp.bfloat16),
            pytest.param("int4_zeros", jnp.bfloat16, marks=pytest.mark.nightly),
            ("int4_small_zeros", jnp.bfloat16),
        ],
    )
    def test_matmul_of_rows_in_blocks(self, format, dtype):
        """Rows in 8 bits too, the columns from 128 on a thousand times smaller."""
        rng = np.random.default_rng(0)
        sizes = [self.rows - 15, 0, 3, 4]
        weights = Weight(rng, (4, self.d_out, self.d_in), format, dtype, sizes)
        rows = poisoned_rows(rng, self.rows, self.d_in, np.float32, sizes)
        rows[:, 128:] /= 1000
        rows = rows.astype(dtype)
        kind = "int8" if format.startswith("int") else "fp8"
        arguments = jnp.asarray(rows), weights.jax, jnp.asarray(sizes, jnp.int32)
        output = self.with_row_format(grouped_matmul, kind, *arguments)
        expected = by_group_numpy(
            rows, sizes, self.d_out, functools.partial(weights.product, row_format=kind)
        )
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            output, expected, TOLERANCE[dtype], TOLERANCE[dtype] * scale / 30
        )
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    @pytest.mark.parametrize(
        "format",
        # A scale a column, as INT8 here, and as FP8 in the test of one product.
        [
            *(pytest.param(one, marks=pytest.mark.nightly) for one in ("fp8", "int4_small_zeros")),
            *("fp8_block", "int8"),
        ],
    )
    def test_swiglu_of_rows_in_blocks(self, format):
        """The hidden rows are in 8 bits too; some groups' are a thousand times larger."""
        rng = np.random.default_rng(0)
        sizes = [20, 0, self.rows - 30]
        shapes = [(3, self.d_ff, self.d_in)] * 2 + [(3, self.d_in, self.d_ff)]
        gate, up, down = (Weight(rng, shape, format, jnp.bfloat16, sizes) for shape in shapes)
        rows = poisoned_rows(rng, self.rows, self.d_in, np.float32, sizes) / 16
        rows[20:] *= 1000
        rows = rows.astype(jnp.bfloat16)
        kind = "int8" if format.startswith("int") else "fp8"

        def expected_row(row, group):
            gated = gate.product(row, group, kind)
            with np.errstate(over="ignore"):
                hidden = gated / (1 + np.exp(-gated)) * up.product(row, group, kind)
            return down.product(hidden, group, kind)

        arguments = jnp.asarray(rows), gate.jax, up.jax, down.jax, jnp.asarray(sizes, jnp.int32)
        output = self.with_row_format(grouped_swiglu, kind, *arguments)
        expected = by_group_numpy(rows, sizes, self.d_in, expected_row)
        # A hidden value near the middle of two roundings may go to either.
        scale = np.abs(expected).max(axis=1, keepdims=True)
        assert np.all(np.abs(output - expected) <= 2e-2 * scale)
        np.testing.assert_array_equal(output[sum(sizes) :], 0)


class GroupedMatmulSuite(RowsInBlocksSuite):
    """All of it.

    Attributes:
      counts: sizes of groups whose every combination is tested; around the backend's tiles.
    """

    counts: ClassVar[tuple[int, ...]] = (0, 1, 33)

    def matmul(self, rows, weights, sizes):
        with use_target(self.target):
            output = jax.jit(fresh(grouped_matmul))(
                jnp.asarray(rows), weights.jax, jnp.asarray(sizes, jnp.int32)
            )
            return np.asarray(output, np.float64)

    @pytest.mark.parametrize(
        ("format", "dtype"),
        [
            *((format, jnp.bfloat16) for format in FORMATS if "zeros" not in format),
            *((format, jnp.float32) for format in ("float", "fp8_block", "int8")),
            pytest.param("int4_zeros", jnp.float32, marks=pytest.mark.nightly),
            pytest.param("int4_small_zeros", jnp.bfloat16, marks=pytest.mark.nightly),
        ],
    )
    def test_matmul(self, format, dtype):
        """A group over two tiles, two that share one, an empty one, and padding."""
        rng = np.random.default_rng(0)
        sizes = [self.rows - 15, 0, 3, 4]
        weights = Weight(rng, (4, self.d_out, self.d_in), format, dtype, sizes)
        rows = poisoned_rows(rng, self.rows, self.d_in, dtype, sizes)
        output = self.matmul(rows, weights, sizes)
        expected = by_group_numpy(rows, sizes, self.d_out, weights.product)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            output, expected, TOLERANCE[dtype], TOLERANCE[dtype] * scale / 30
        )
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    def test_all_patterns(self):
        """Every combination of group sizes: of empty groups, of borders within and at tiles."""
        rng = np.random.default_rng(0)
        shape = (3, 384, 128)
        values = Weight(rng, shape, "float", jnp.bfloat16, [1, 1, 1])
        with use_target(self.target):
            compiled = jax.jit(fresh(grouped_matmul))
            for sizes in itertools.product(self.counts, repeat=3):
                if sum(sizes) > self.rows:
                    continue
                rows = poisoned_rows(rng, self.rows, shape[2], jnp.bfloat16, sizes)
                empty = jnp.asarray(sizes)[:, None, None] == 0
                weights = jnp.where(empty, jnp.asarray(np.nan, jnp.bfloat16), values.jax)
                output = compiled(jnp.asarray(rows), weights, jnp.asarray(sizes, jnp.int32))
                expected = by_group_numpy(rows, sizes, shape[1], values.product)
                np.testing.assert_allclose(
                    np.asarray(output, np.float64), expected, 1e-2, 1e-2, err_msg=str(sizes)
                )

    @pytest.mark.parametrize(
        ("formats", "dtype"),
        [
            (("float",) * 3, jnp.bfloat16),
            (("fp8_block",) * 3, jnp.bfloat16),
            (("int8",) * 3, jnp.bfloat16),
            (("int4_small_zeros",) * 3, jnp.bfloat16),
            (("float", "int8", "fp8"), jnp.float32),
        ],
        ids=str,
    )
    def test_swiglu(self, formats, dtype):
        rng = np.random.default_rng(0)
        sizes = [20, 0, self.rows - 30]
        shapes = [(3, self.d_out, self.d_in)] * 2 + [(3, self.d_in, self.d_out)]
        gate, up, down = (
            Weight(rng, shape, format, dtype, sizes)
            for shape, format in zip(shapes, formats, strict=True)
        )
        rows = poisoned_rows(rng, self.rows, self.d_in, dtype, sizes)
        rows = (rows.astype(np.float32) / 16).astype(dtype)

        def expected_row(row, group):
            gated = gate.product(row, group)
            # Large sums of INT8 products overflow exp, to an infinity that gives the right zero.
            with np.errstate(over="ignore"):
                hidden = gated / (1 + np.exp(-gated)) * up.product(row, group)
            return down.product(hidden.astype(dtype), group)

        with use_target(self.target):
            output = jax.jit(fresh(grouped_swiglu))(
                jnp.asarray(rows), gate.jax, up.jax, down.jax, jnp.asarray(sizes, jnp.int32)
            )
        output = np.asarray(output, np.float64)
        expected = by_group_numpy(rows, sizes, self.d_in, expected_row)
        # A hidden value near the middle of two roundings may go to either.
        tolerance = 2e-2 if dtype == jnp.bfloat16 or "int8" in formats else 1e-4
        scale = np.abs(expected).max(axis=1, keepdims=True)
        assert np.all(np.abs(output - expected) <= tolerance * scale)
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    @pytest.mark.parametrize(
        ("format", "dtype"),
        [
            ("int8", jnp.bfloat16),
            ("int8_block", jnp.bfloat16),
            ("int8", jnp.float32),
            ("fp8_bits", jnp.bfloat16),
        ],
    )
    def test_matmul_of_rows_as_they_are(self, format, dtype):
        """Every row has a large number, whose weights are zeros: INT8 would lose the others."""
        rng = np.random.default_rng(0)
        sizes = [self.rows - 15, 0, 3, 4]
        weights = Weight(rng, (4, self.d_out, self.d_in), format, dtype, sizes)
        weights.numpy[:, :, 5] = 0
        values = weights.jax.values.at[:, :, 5].set(0)
        weights.jax = dataclasses.replace(weights.jax, values=values)
        rows = poisoned_rows(rng, self.rows, self.d_in, np.float32, sizes)
        rows[:, 5] *= 1000
        rows = rows.astype(dtype)
        arguments = jnp.asarray(rows), weights.jax, jnp.asarray(sizes, jnp.int32)
        output = self.with_row_format(grouped_matmul, "float", *arguments)
        expected = by_group_numpy(
            rows, sizes, self.d_out, functools.partial(weights.product, row_format="float")
        )
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            output, expected, TOLERANCE[dtype], TOLERANCE[dtype] * scale / 30
        )
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    @pytest.mark.parametrize(
        "formats", [("int8",) * 3, ("int8_block", "int8_block", "fp8"), ("int8", "fp8", "int8")]
    )
    def test_swiglu_of_rows_as_they_are(self, formats):
        """The hidden rows are rounded to BF16, and no further."""
        rng = np.random.default_rng(0)
        sizes = [20, 0, self.rows - 30]
        shapes = [(3, self.d_out, self.d_in)] * 2 + [(3, self.d_in, self.d_out)]
        gate, up, down = (
            Weight(rng, shape, format, jnp.bfloat16, sizes)
            for shape, format in zip(shapes, formats, strict=True)
        )
        rows = poisoned_rows(rng, self.rows, self.d_in, np.float32, sizes) / 1024
        rows = rows.astype(jnp.bfloat16)

        def expected_row(row, group):
            gated = gate.product(row, group, "float")
            hidden = gated / (1 + np.exp(-gated)) * up.product(row, group, "float")
            return down.product(hidden.astype(jnp.bfloat16), group, "float")

        arguments = jnp.asarray(rows), gate.jax, up.jax, down.jax, jnp.asarray(sizes, jnp.int32)
        output = self.with_row_format(grouped_swiglu, "float", *arguments)
        expected = by_group_numpy(rows, sizes, self.d_in, expected_row)
        scale = np.abs(expected).max(axis=1, keepdims=True)
        assert np.all(np.abs(output - expected) <= 5e-3 * scale)
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    @pytest.mark.parametrize(
        ("format", "row_format"),
        [
            ("float", None),
            # As `test_swiglu` has them; that rows are picked is the same for every format.
            pytest.param("fp8", None, marks=pytest.mark.nightly),
            pytest.param("int8", None, marks=pytest.mark.nightly),
            ("fp8", "fp8"),
        ],
    )
    def test_swiglu_of_picked_rows(self, format, row_format):
        """As of rows that lie in their order; what none picks may be poison."""
        rng = np.random.default_rng(0)
        sizes = [13, 0, 6]
        shapes = [(3, 128, 128)] * 3
        gate, up, down = (Weight(rng, shape, format, jnp.bfloat16, sizes) for shape in shapes)
        rows = (rng.normal(size=(9, 128)) / 16).astype(jnp.bfloat16)
        rows[4] = np.nan
        source = rng.choice([0, 1, 2, 3, 5, 6, 7, 8], 21).astype(np.int32)
        rest = (gate.jax, up.jax, down.jax, jnp.asarray(sizes, jnp.int32))
        with use_target(self.target):
            picked, in_order = (
                jax.jit(fresh(functools.partial(grouped_swiglu, row_format=row_format, **options)))
                for options in ({"source": jnp.asarray(source), "zero_padding": False}, {})
            )
            output = np.asarray(picked(jnp.asarray(rows), *rest), np.float32)
            expected = np.asarray(in_order(jnp.asarray(rows[source]), *rest), np.float32)
        assert np.abs(expected[:19]).min(axis=1).max() > 0
        np.testing.assert_array_equal(output[:19], expected[:19])

    @pytest.mark.parametrize("format", ["float", "int8"])
    def test_a_row_does_not_depend_on_the_batch(self, format):
        rng = np.random.default_rng(0)
        weights = Weight(rng, (2, self.d_out, self.d_in), format, jnp.bfloat16, [1, 1])
        rows = poisoned_rows(rng, self.rows, self.d_in, jnp.bfloat16, [self.rows])
        with use_target(self.target):
            compiled = jax.jit(fresh(grouped_matmul))
            together = compiled(jnp.asarray(rows), weights.jax, jnp.asarray([40, self.rows - 40]))
            few = compiled(jnp.asarray(np.roll(rows, -39, 0)), weights.jax, jnp.asarray([1, 2]))
        np.testing.assert_array_equal(few[:3], together[39:42])

    def test_no_rows(self):
        rng = np.random.default_rng(0)
        weights = Weight(rng, (2, self.d_out, self.d_in), "float", jnp.float32, [0, 0])
        assert self.matmul(np.zeros((0, self.d_in), np.float32), weights, [0, 0]).shape == (
            0,
            self.d_out,
        )
