"""The Hopper kernel as it ships, replayed in NumPy, and how it is called.

That it does not take the order of anything for granted is in `test_hopper_replay.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, mosaic_gpu, tiles
from pallas_kernels.grouped_matmul.api import fastest_row_format
from pallas_kernels.quantize import quantize_weight
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.grouped_matmul.suite import (
    GroupedMatmulSuite,
    RowsInBlocksSuite,
    fresh,
    quantised,
)
from tests.pallas_kernels.hopper_replay import replay
from tests.pallas_kernels.nightly import nightly

pytestmark = pytest.mark.unoptimised

H200 = Target("mosaic_gpu", "NVIDIA H200")


def rows_have_parts(monkeypatch, rows=96):
    """Makes tiles for few rows no larger than 16 of them, and gives all others one size."""
    _tiles_of(monkeypatch, some=(rows,), many=())


def rows_come_first(monkeypatch):
    """Makes tiles for few rows no larger than 16 of them, and leaves none for some."""
    _tiles_of(monkeypatch, some=(), many=(128,))


def _tiles_of(monkeypatch, some, many):
    sizes = {"rows in blocks": (16,), "some rows in blocks": some, "many rows in blocks": many}
    for key, kind in tiles.HOPPER_DEFAULT.items():
        if key[0] in sizes:
            monkeypatch.setitem(tiles.HOPPER_DEFAULT, key, kind._replace(rows=sizes[key[0]]))


FORMS = {"weights": lambda monkeypatch: None, "parts": rows_have_parts, "rows": rows_come_first}


class Shipped:
    """The kernel as compiled for the GPU, replayed with few blocks of threads and two stages."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        few_blocks(monkeypatch)

    def compiled(self, function, **options):
        return lambda *arguments: replay(fresh(function, **options), *arguments)


def few_blocks(monkeypatch, blocks=2):
    monkeypatch.setattr(mosaic_gpu, "processors", lambda target: blocks)
    pick = mosaic_gpu.pick_tiles
    monkeypatch.setattr(
        mosaic_gpu,
        "pick_tiles",
        lambda *arguments, **options: pick(*arguments, **options)._replace(stages=2),
    )


class TestMosaicGpu(Shipped, GroupedMatmulSuite):
    """Two output tiles, the second one half empty; row tiles of 16, which begin anywhere."""

    rows = 46
    d_out = 192
    counts = (0, 9)


class TestRowParts(Shipped, RowsInBlocksSuite):
    """A row tile of 96 in two parts; output tiles of three warpgroups, and of two that quantise."""

    rows = 120
    test_matmul_of_rows_in_blocks = None  # below, with other borders

    @pytest.fixture(autouse=True)
    def _some_rows(self, monkeypatch):
        rows_have_parts(monkeypatch)

    @pytest.mark.parametrize(
        ("format", "d_out"),
        [("fp8", 64), ("fp8_block", 256), *nightly(("fp8", 256), ("fp8_block", 64))],
    )
    def test_matmul(self, format, d_out):
        """Borders of groups within a block of 8, of a part and of a tile; one has two tiles."""
        expected = agrees_with_the_reference(format, (7, 0, 48, 97), 160, d_out)
        assert np.abs(expected[:152]).max(axis=1).min() > 1

    @pytest.mark.parametrize(("tile", "shared"), [(160, "rows"), (128, "weights")])
    def test_two_blocks_share(self, tile, shared, monkeypatch):
        """Rows, or weights for a tile each: groups end beside a tile's end, and after two tiles."""
        rows_have_parts(monkeypatch, tile)
        pick, picked = mosaic_gpu.pick_tiles, []

        def keep(*arguments, **options):
            picked.append(pick(*arguments, **options))
            return picked[-1]

        monkeypatch.setattr(mosaic_gpu, "pick_tiles", keep)
        sizes = (tile - 1, 0, tile + 1)
        expected = agrees_with_the_reference("fp8_block", sizes, 2 * tile + 6, 384, {"cluster": 2})
        assert np.abs(expected[: 2 * tile]).max(axis=1).min() > 1
        (tiles,) = picked
        assert (tiles.rows, tiles.shared, tiles.in_parts) == (tile, shared, True)


class TestRowsFirst(Shipped, RowsInBlocksSuite):
    """Row tiles of 128, of which a group has two; an output tile with columns that do not exist."""

    rows = 152
    d_out = 192

    @pytest.fixture(autouse=True)
    def _many_rows(self, monkeypatch):
        rows_come_first(monkeypatch)

    @pytest.mark.parametrize(
        "sizes", [(63, 65, 0), (0, 1, 135), *nightly(((64, 0, 64),), ((7, 8, 9),), ((0, 0, 0),))]
    )
    def test_borders(self, sizes):
        """Groups end at and beside the ends of the warpgroups' rows, and within a block of 8."""
        agrees_with_the_reference("fp8_block", sizes, 136, 192)


def product(rows, weights, sizes, tiles=None):
    return grouped_matmul(rows, weights, sizes, row_format="fp8", tiles=tiles)


def agrees_with_the_reference(format, sizes, rows, d_out, tiles=None):
    """Output of the reference, after it was compared."""
    rng = np.random.default_rng(0)
    weights = quantize_weight(jnp.asarray(rng.normal(size=(len(sizes), d_out, 256))), format)
    rows = rng.normal(size=(rows, 256)).astype(jnp.bfloat16)
    rows[sum(sizes) :] = np.nan
    arguments = jnp.asarray(rows), weights, jnp.asarray(sizes, jnp.int32)
    with use_target(Target("reference", "cpu")):
        expected = np.asarray(jax.jit(fresh(product))(*arguments), np.float32)
    found = np.asarray(replay(fresh(product, tiles=tiles), *arguments), np.float32)
    np.testing.assert_allclose(found, expected, 1e-2, 1e-2)
    return expected


def test_a_row_is_the_same_whichever_comes_first(monkeypatch):
    """A sequence does not depend on the number of others."""
    rng = np.random.default_rng(0)
    weights = quantize_weight(jnp.asarray(rng.normal(size=(2, 192, 256))), "fp8_block")
    rows = jnp.asarray(rng.normal(size=(32, 256)), jnp.bfloat16)
    sizes = jnp.asarray([20, 12], jnp.int32)
    few_blocks(monkeypatch)
    weights_first = replay(product, rows, weights, sizes)
    for form in (rows_have_parts, rows_come_first):
        form(monkeypatch)
        np.testing.assert_array_equal(replay(product, rows, weights, sizes), weights_first)


def test_what_the_kernel_covers():
    """The reference multiplies the others."""

    def call(shape, block, row_format):
        weights = quantised(jnp.float8_e4m3fn, shape, block)
        return not mosaic_gpu.gap(jnp.bfloat16, [weights], row_format)

    golden.check_values("pallas_kernels/hopper_covered.txt", call, globals())


class TestRowsInFloat16:
    def test_literal(self):
        rows = jnp.asarray([[1.0, -0.75], [3e38, 1.0], [0.0, 0.0], [2.0**-120, 0.0]], jnp.bfloat16)
        values, scales = mosaic_gpu._as_float16(rows)
        np.testing.assert_array_equal(scales, [2.0**-14, 2.0**113, 2.0**-114, 2.0**-114])
        expected = [[2.0**14, -0.75 * 2.0**14], [28928, 0], [0, 0], [2.0**-6, 0]]
        np.testing.assert_array_equal(values.astype(jnp.float32), expected)

    def test_only_the_smallest_numbers_change(self):
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(9, 64)) * np.exp2(rng.integers(-30, 30, (9, 1)))
        rows = jnp.asarray(rows * np.exp2(rng.integers(-12, 1, (9, 64))), jnp.bfloat16)
        values, scales = mosaic_gpu._as_float16(rows)
        product = values.astype(jnp.float32) * scales[:, None]
        np.testing.assert_array_equal(product, rows.astype(jnp.float32))

    def test_what_is_not_finite_stays_in_its_row(self):
        rows = jnp.asarray([[jnp.nan, 1.0], [jnp.inf, 1.0], [1.0, 2.0]], jnp.bfloat16)
        values, scales = mosaic_gpu._as_float16(rows)
        product = np.asarray(values.astype(jnp.float32) * scales[:, None])
        assert np.isnan(product[0, 0])
        assert not np.isfinite(product[1, 0])
        np.testing.assert_array_equal(product[2], [1, 2])


class TestNarrowRows:
    """Rows that came in FP8 over a wire."""

    @pytest.mark.parametrize(
        ("dtype", "widths", "expected"),
        [
            (jnp.float8_e4m3fn, (256, 128), "fp8"),
            (jnp.float8_e4m3fn, (256, 192), None),  # no whole blocks of hidden rows
            (jnp.int8, (256, 128), None),
            (None, (256, 128), None),
        ],
    )
    def test_fp8_weights_have_fp8_rows(self, dtype, widths, expected):
        d_model, d_ff = widths
        shapes = [(2, d_ff, d_model), (2, d_ff, d_model), (2, d_model, d_ff)]
        weights = [
            quantised(dtype, shape, (1, 0)) if dtype else jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in shapes
        ]
        rows = jax.ShapeDtypeStruct((4, d_model), jnp.bfloat16)
        found = []
        for target in (Target("reference", "cpu"), H200):
            with use_target(target):
                jax.eval_shape(
                    lambda *arrays: found.append(fastest_row_format(arrays[0], arrays[1:])),
                    *(rows, *weights),
                )
        assert found == [None, expected]
