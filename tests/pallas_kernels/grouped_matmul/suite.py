"""Tests of every backend of `grouped_matmul`, against NumPy. Backends' tests inherit it.

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
import yaml

from pallas_kernels.activation import Activation
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.quantize import QuantArray
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.nightly import nightly
from tests.pallas_kernels.quantize.definition import quantize_numpy

TABLE = yaml.safe_load(golden.text("pallas_kernels/blocks_of_formats.yaml"))
FORMATS = {name: one and (one[0], tuple(one[1:])) for name, one in TABLE.items()}
"""Names of formats: dtype of the values and block (block_out, block_in)."""

# Interpreted kernels have these in `make nightly` alone, plain XLA always (`test_reference.py`).
PLAIN_ROWS = [
    *((f"fp8_{kind}", jnp.bfloat16) for kind in ("bits", "large_block", "small_block")),
    *((format, jnp.bfloat16) for format in ("int8_block", "int4_small_zeros")),
    *((format, jnp.float32) for format in ("fp8_block", "int8", "int4_zeros", "mxfp4")),
]
ROWS_IN_BLOCKS = [
    ("fp8_bits", jnp.float32),
    *((format, jnp.bfloat16) for format in ("fp8_large_block", "int8_block", "int4_zeros")),
]
ROWS_AS_THEY_ARE = [
    ("int8", jnp.float32),
    *((format, jnp.bfloat16) for format in ("int8_block", "fp8_bits")),
]

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def scale_counts(shape, block):
    """Blocks along d_out and d_in of weights [groups, d_out, d_in]."""
    return [
        1 if not size else -(-axis // size) for axis, size in zip(shape[1:], block, strict=True)
    ]


def quantised(dtype, shape, block):
    """Shapes of weights with a scale for each block, without values."""
    scales = (shape[0], *scale_counts(shape, block))
    return QuantArray(
        jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(scales, jnp.float32), block
    )


def spread_numpy(scales, block, shape):
    """Every scale repeated over its block, float64."""
    spread = np.asarray(scales, np.float64)
    for axis, size in zip((-2, -1), block, strict=True):
        spread = np.repeat(spread, size or shape[axis], axis)
        spread = np.take(spread, range(shape[axis]), axis)
    return spread


def rounded_numpy(row, kind, columns=128):
    """One row in 8 bits, with a scale for every so many columns, multiplied by them again."""
    parts = [
        quantize_numpy(part, kind) for part in np.split(row, range(columns, len(row), columns))
    ]
    return np.concatenate([values.astype(np.float64) * scale for values, scale in parts])


class Weight:
    """Random weights [groups, d_out, d_in] of one format, as JAX has them and as NumPy does.

    Args:
      format: A name of `FORMATS`, or a dtype and a block.
    """

    def __init__(self, rng, shape, format, dtype, sizes):
        empty = np.asarray(sizes) == 0
        self.format = FORMATS[format] if isinstance(format, str) else format
        if self.format is None:
            values = rng.normal(size=shape).astype(dtype)
            self.numpy = values.astype(np.float64)
            values[empty] = np.nan
            self.jax = jnp.asarray(values)
            return
        kind, block = self.format
        scales = rng.uniform(0.5, 2, (shape[0], *scale_counts(shape, block))).astype(np.float32)
        zeros = None
        if kind == "int8":
            values = rng.integers(-127, 128, shape).astype(np.int8)
        elif kind == "int4":
            values = rng.integers(-8, 8, shape).astype(ml_dtypes.int4)
            if format.endswith("zeros"):
                zeros = rng.integers(-8, 8, scales.shape).astype(np.int8)
        elif kind == "mxfp4":
            values = rng.integers(0, 16, shape).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
            scales = (2.0 ** rng.integers(-3, 2, scales.shape)).astype(ml_dtypes.float8_e8m0fnu)
        else:
            values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        self.numpy = values.astype(np.float64)
        if zeros is not None:
            self.numpy -= spread_numpy(zeros, block, shape)
            zeros = jnp.asarray(zeros)
        self.numpy *= spread_numpy(scales, block, shape)
        scales[empty] = np.nan
        if kind not in ("int8", "int4", "mxfp4"):
            values[empty] = np.nan
        values = jnp.asarray(values)
        if kind == "fp8_bits":
            values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        self.jax = QuantArray(values, jnp.asarray(scales), block, zeros)

    def forget(self, column):
        """Zeros in place of a column of quantised weights."""
        self.numpy[:, :, column] = 0
        values = self.jax.values.at[:, :, column].set(0)
        self.jax = dataclasses.replace(self.jax, values=values)

    def product(self, row, group, row_format=None):
        """A row [d_in] times a group's weights."""
        if row_format in ("fp8", "int8"):
            row = rounded_numpy(row, row_format)
        elif row_format is None and self.format is not None and self.format[0] == "int8":
            row = rounded_numpy(row, "int8", len(row))
        return row.astype(np.float64) @ self.numpy[group].T


def fresh(function, **options):
    """A function that JAX has not traced for another target yet."""

    def call(*arguments):
        return function(*arguments, **options)

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


def swiglu_numpy(rows, sizes, weights, dtype, row_format=None):
    """Networks of rows; hidden rows are rounded to `dtype`, if they are not to 8 bits."""
    gate, up, down = weights

    def network(row, group):
        gated = gate.product(row, group, row_format)
        # Large sums of INT8 products overflow exp, to an infinity that gives the right zero.
        with np.errstate(over="ignore"):
            hidden = gated / (1 + np.exp(-gated)) * up.product(row, group, row_format)
        hidden = hidden if row_format in ("fp8", "int8") else hidden.astype(dtype)
        return down.product(hidden, group, row_format)

    return by_group_numpy(rows, sizes, down.numpy.shape[1], network)


def assert_near(output, expected, tolerance):
    """Compares within `tolerance` of a row's largest: roundings may go either way."""
    scale = np.abs(expected).max(axis=1, keepdims=True)
    assert np.all(np.abs(np.asarray(output, np.float64) - expected) <= tolerance * scale)


def kind_of(format):
    """The 8 bits that rows have beside weights of a format."""
    return "int8" if format.startswith("int") else "fp8"


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

    def compiled(self, function, **options):
        """The call, for the target."""
        compiled = jax.jit(fresh(function, **options))

        def call(*arguments):
            with use_target(self.target):
                return compiled(*arguments)

        return call

    def run(self, function, rows, weights, sizes, **options):
        arrays = [weight.jax for weight in weights]
        sizes = jnp.asarray(sizes, jnp.int32)
        output = self.compiled(function, **options)(jnp.asarray(rows), *arrays, sizes)
        return np.asarray(output, np.float64)

    def check_matmul(self, format, dtype, row_format=None, factors=1.0, ignored=None):
        """A group over two tiles, two that share one, an empty one, and padding.

        Args:
          factors: What the columns of the rows are multiplied by.
          ignored: A column whose weights are zeros.
        """
        rng = np.random.default_rng(0)
        sizes = [self.rows - 15, 0, 3, 4]
        weights = Weight(rng, (4, self.d_out, self.d_in), format, dtype, sizes)
        if ignored is not None:
            weights.forget(ignored)
        rows = poisoned_rows(rng, self.rows, self.d_in, np.float32, sizes) * factors
        rows = rows.astype(dtype)
        output = self.run(grouped_matmul, rows, [weights], sizes, row_format=row_format)
        product = functools.partial(weights.product, row_format=row_format)
        expected = by_group_numpy(rows, sizes, self.d_out, product)
        least = TOLERANCE[dtype] * np.abs(expected).max() / 30
        np.testing.assert_allclose(output, expected, TOLERANCE[dtype], least)
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    def check_swiglu(self, formats, dtype, d_ff, tolerance, row_format=None, factors=(1, 1)):
        """Compares with networks in NumPy.

        Args:
          factors: What the rows of the first and of the last group are multiplied by.
        """
        rng = np.random.default_rng(0)
        sizes = [20, 0, self.rows - 30]
        shapes = [(3, d_ff, self.d_in)] * 2 + [(3, self.d_in, d_ff)]
        weights = [
            Weight(rng, shape, format, dtype, sizes)
            for shape, format in zip(shapes, formats, strict=True)
        ]
        rows = poisoned_rows(rng, self.rows, self.d_in, np.float32, sizes)
        rows[:20] *= factors[0]
        rows[20:] *= factors[1]
        rows = rows.astype(dtype)
        output = self.run(grouped_swiglu, rows, weights, sizes, row_format=row_format)
        assert_near(output, swiglu_numpy(rows, sizes, weights, dtype, row_format), tolerance)
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    @pytest.mark.parametrize(
        ("format", "dtype"),
        [
            *(
                (format, jnp.bfloat16)
                for format in ("fp8", "fp8_block", "int8", "int4_small_zeros")
            ),
            *nightly(*ROWS_IN_BLOCKS),
        ],
    )
    def test_matmul_of_rows_in_blocks(self, format, dtype):
        """Rows in 8 bits too, the columns from 128 on a thousand times smaller."""
        factors = np.where(np.arange(self.d_in) < 128, 1, 1e-3)
        self.check_matmul(format, dtype, kind_of(format), factors)

    @pytest.mark.parametrize(
        "format",
        # A scale a column, as INT8 here, and as FP8 in the test of one product.
        ["fp8_block", "int8", *nightly("fp8", "int4_small_zeros")],
    )
    def test_swiglu_of_rows_in_blocks(self, format):
        """The hidden rows are in 8 bits too; a group's are a thousand times larger."""
        factors = (1 / 16, 1000 / 16)
        kind = kind_of(format)
        self.check_swiglu((format,) * 3, jnp.bfloat16, self.d_ff, 2e-2, kind, factors)


class GroupedMatmulSuite(RowsInBlocksSuite):
    """All of it.

    Attributes:
      counts: sizes of groups whose every combination is tested; around the backend's tiles.
    """

    counts: ClassVar[tuple[int, ...]] = (0, 1, 33)

    @pytest.mark.parametrize(
        ("format", "dtype"),
        [
            *((format, jnp.bfloat16) for format in ("float", "fp8", "fp8_block", "int8", "int4")),
            ("mxfp4", jnp.bfloat16),
            ("float", jnp.float32),
            *nightly(*PLAIN_ROWS),
        ],
    )
    def test_matmul(self, format, dtype):
        self.check_matmul(format, dtype)

    def test_all_patterns(self):
        """Every combination of group sizes: of empty groups, of borders within and at tiles."""
        rng = np.random.default_rng(0)
        shape = (3, 384, 128)
        values = Weight(rng, shape, "float", jnp.bfloat16, [1, 1, 1])
        compiled = self.compiled(grouped_matmul)
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
            (("mxfp4",) * 3, jnp.bfloat16),
            *nightly((("float", "int8", "fp8"), jnp.float32)),
        ],
        ids=str,
    )
    def test_swiglu(self, formats, dtype):
        self.check_swiglu(formats, dtype, self.d_out, 2e-2, factors=(1 / 16, 1 / 16))

    @pytest.mark.parametrize(
        ("format", "dtype"), [("int8", jnp.bfloat16), *nightly(*ROWS_AS_THEY_ARE)]
    )
    def test_matmul_of_rows_as_they_are(self, format, dtype):
        """Every row has a large number, whose weights are zeros: INT8 would lose the others."""
        factors = np.where(np.arange(self.d_in) == 5, 1000, 1)
        self.check_matmul(format, dtype, "float", factors, ignored=5)

    @pytest.mark.parametrize(
        "formats",
        [
            ("int8", "fp8", "int8"),
            *nightly((("int8",) * 3,), (("int8_block", "int8_block", "fp8"),)),
        ],
    )
    def test_swiglu_of_rows_as_they_are(self, formats):
        """The hidden rows are rounded to BF16, and no further."""
        factors = (1 / 1024, 1 / 1024)
        self.check_swiglu(formats, jnp.bfloat16, self.d_out, 5e-3, "float", factors)

    @pytest.mark.parametrize(
        ("format", "row_format"),
        [
            ("float", None),
            ("fp8", "fp8"),
            # As `test_swiglu` has them; that rows are picked is the same for every format.
            *nightly(("fp8", None), ("int8", None)),
        ],
    )
    def test_swiglu_of_picked_rows(self, format, row_format):
        """Rows that are picked give what rows in their order give; others may be poison."""
        rng = np.random.default_rng(0)
        sizes = [13, 0, 6]
        weights = [Weight(rng, (3, 128, 128), format, jnp.bfloat16, sizes) for _ in range(3)]
        rows = (rng.normal(size=(9, 128)) / 16).astype(jnp.bfloat16)
        rows[4] = np.nan
        source = rng.choice([0, 1, 2, 3, 5, 6, 7, 8], 21).astype(np.int32)
        picked = {"source": jnp.asarray(source), "zero_padding": False}
        output, expected = (
            self.run(grouped_swiglu, given, weights, sizes, row_format=row_format, **options)
            for given, options in ((rows, picked), (rows[source], {}))
        )
        assert np.abs(expected[:19]).min(axis=1).max() > 0
        np.testing.assert_array_equal(output[:19], expected[:19])

    @pytest.mark.parametrize("format", ["float", *nightly("int8")])
    def test_a_row_does_not_depend_on_the_batch(self, format):
        rng = np.random.default_rng(0)
        weights = Weight(rng, (2, self.d_out, self.d_in), format, jnp.bfloat16, [1, 1])
        rows = poisoned_rows(rng, self.rows, self.d_in, jnp.bfloat16, [self.rows])
        compiled = self.compiled(grouped_matmul)
        together = compiled(jnp.asarray(rows), weights.jax, jnp.asarray([40, self.rows - 40]))
        few = compiled(jnp.asarray(np.roll(rows, -39, 0)), weights.jax, jnp.asarray([1, 2]))
        np.testing.assert_array_equal(few[:3], together[39:42])

    @pytest.mark.parametrize("format", nightly("float", "fp8"))
    def test_swiglu_with_biases_and_another_activation(self, format):
        """gpt-oss's: limits before the sigmoid, a gain, 1 added to up, and biases of groups."""
        rng = np.random.default_rng(0)
        sizes, (d, d_ff) = [20, 0, self.rows - 30], (self.d_in, self.d_ff)
        shapes = [(3, d_ff, d)] * 2 + [(3, d, d_ff)]
        gate, up, down = (Weight(rng, shape, format, jnp.bfloat16, sizes) for shape in shapes)
        biases = [rng.normal(size=(3, width)).astype(np.float32) for width in (d_ff, d_ff, d)]
        rows = poisoned_rows(rng, self.rows, d, np.float32, sizes) / 16
        rows = rows.astype(jnp.bfloat16)
        activation = Activation(limit=0.7, clamp="before", alpha=1.702, plus=1.0)

        def network(row, group):
            opened, raised, added = (bias[group].astype(np.float64) for bias in biases)
            opened = np.minimum(gate.product(row, group) + opened, 0.7)
            raised = np.clip(up.product(row, group) + raised, -0.7, 0.7) + 1
            hidden = opened / (1 + np.exp(-1.702 * opened)) * raised
            return down.product(hidden.astype(jnp.bfloat16), group) + added

        options = {"activation": activation, "biases": tuple(map(jnp.asarray, biases))}
        output = self.run(grouped_swiglu, rows, [gate, up, down], sizes, **options)
        assert_near(output, by_group_numpy(rows, sizes, d, network), 2e-2)
        np.testing.assert_array_equal(output[sum(sizes) :], 0)

    def test_no_rows(self):
        rng = np.random.default_rng(0)
        weights = Weight(rng, (2, self.d_out, self.d_in), "float", jnp.float32, [0, 0])
        nothing = np.zeros((0, self.d_in), np.float32)
        assert self.run(grouped_matmul, nothing, [weights], [0, 0]).shape == (0, self.d_out)
