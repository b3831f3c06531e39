"""Rows that the TPU kernel fetches by their index, interpreted on the CPU, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_swiglu, mosaic_tpu, mosaic_tpu_fetch
from pallas_kernels.grouped_matmul.mosaic_tpu_plan import plan_call
from pallas_kernels.grouped_matmul.tiles import TPU, TpuTiles
from pallas_kernels.quantize import QuantArray
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.grouped_matmul.suite import Weight, assert_near, swiglu_numpy
from tests.pallas_kernels.nightly import nightly
from tests.pallas_kernels.tpu_races import check_wait, no_race  # noqa: F401

pytestmark = pytest.mark.unoptimised

TARGET = Target("mosaic_tpu", "TPU7 of this test", interpret=True)
# Tiles of rows of 32 and of columns of 128.
TILES = TpuTiles(32, (16,), (16,), (16,), 128, 2**20, 1, 2**25)
TOKENS, D, D_FF = 16, 128, 256


@pytest.fixture(autouse=True)
def only_fetched(monkeypatch):
    """Each row once for each of the two tiles of columns, and none by XLA."""
    monkeypatch.setitem(TPU, TARGET.device_kind, TILES)
    monkeypatch.setitem(mosaic_tpu_fetch.MOST_TIMES, TARGET.device_kind, 2)
    monkeypatch.setattr(mosaic_tpu, "pick_rows", None)


def swiglu(rows, weights, sizes, source, row_format=None, narrow=None):
    function = functools.partial(grouped_swiglu, row_format=row_format, zero_padding=False)
    function = functools.partial(function, source=jnp.asarray(source))
    arguments = (rows, *(weight.jax for weight in weights), jnp.asarray(sizes, jnp.int32))
    with use_target(TARGET):
        found = jax.jit(function)(*arguments, narrow=narrow)
    return np.asarray(found, np.float64)[: sum(sizes)]


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("format", "row_format", "dtype", "sizes"),
    [
        ("float", None, jnp.bfloat16, [21, 0, 2, 18]),
        ("fp8", "fp8", jnp.bfloat16, [0, 0, 1, 0]),
        ("int8", None, jnp.bfloat16, [0, 41, 0, 1]),
        *nightly(
            ("float", None, jnp.float32, [21, 0, 2, 18]),
            ("fp8_block", None, jnp.bfloat16, [0, 0, 1, 0]),
            ("fp8", "fp8", jnp.bfloat16, [21, 0, 2, 18]),
            ("int8", None, jnp.bfloat16, [21, 0, 2, 18]),
            ("int4_small_zeros", "int8", jnp.bfloat16, [3, 0, 30, 2]),
        ),
    ],
)
def test_as_numpy(format, row_format, dtype, sizes):
    """Groups over two tiles, several in one, empty ones, one row; indices as NumPy's, negative and
    too large, and rows that nobody has are poison."""
    rng = np.random.default_rng(0)
    shapes = [(4, D_FF, D), (4, D_FF, D), (4, D, D_FF)]
    weights = [Weight(rng, shape, format, dtype, sizes) for shape in shapes]
    rows = (rng.normal(size=(TOKENS, D)) / 16).astype(dtype)
    rows[5] = np.nan
    source = rng.choice([0, 1, 2, 3, 4, 6, 14, 99, -1, -3], 51).astype(np.int32)
    picked = rows[np.minimum(source, TOKENS - 1)]

    found = swiglu(jnp.asarray(rows), weights, sizes, source, row_format)
    expected = swiglu_numpy(picked, sizes, weights, dtype, row_format)[: sum(sizes)]
    assert np.abs(expected).max(axis=1).min() > 0
    assert_near(found, expected, 1e-4 if dtype == jnp.float32 else 2e-2)


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("format", "dtype"), [("fp8", jnp.float8_e4m3fn), *nightly(("int8", jnp.int8))]
)
def test_rows_that_came_in_8_bits(format, dtype):
    """They are the first columns of wider rows, whose other columns are not read."""
    rng = np.random.default_rng(0)
    sizes, source = [21, 0, 2, 18], rng.integers(0, TOKENS, 51).astype(np.int32)
    shapes = [(4, D_FF, D), (4, D_FF, D), (4, D, D_FF)]
    weights = [Weight(rng, shape, format, jnp.bfloat16, sizes) for shape in shapes]
    came = rng.integers(-126, 126, (TOKENS, D + 128)).astype(np.int8)
    came[:, 0] = 127  # the largest, which is quantised to 127 again
    came = came if format == "int8" else came.view(np.uint8) & 0xBF  # below 2
    came[:, D:] = 0x7F  # NaN in FP8
    values = came[:, :D] if format == "int8" else came[:, :D].view(dtype)
    scales = 2.0 ** rng.integers(-9, -4, (TOKENS, 1)).astype(np.float32)
    rows = jnp.asarray(values.astype(np.float32) * scales, jnp.bfloat16)
    narrow = QuantArray(jnp.asarray(came), jnp.asarray(scales), (1, 0))
    found = swiglu(jnp.full_like(rows, jnp.nan), weights, sizes, source, narrow=narrow)
    expected = swiglu(rows, weights, sizes, source)
    assert np.isfinite(found).all()
    assert_near(found, expected, 2e-2)


def test_a_dropped_wait_is_noticed(monkeypatch):
    """Rows would be unpacked that are still on their way."""
    rng = np.random.default_rng(0)
    weights = [Weight(rng, (2, D, D), "float", jnp.float32, [3, 4]) for _ in range(3)]

    def run():
        return swiglu(jnp.ones((8, D)), weights, [3, 4], np.zeros(8, np.int32))

    check_wait(monkeypatch, run, mosaic_tpu, mosaic_tpu_fetch, "wait_for_rows")


def test_where_rows_are_fetched():
    """Where every tile of columns would fetch them again, XLA sorts them once; and where tiles
    would not be those that a caller asks for."""

    def call(device_kind, rows, dtype, picked, d_ff, given):
        tiles, size = TPU[device_kind]._replace(**(given or {})), jnp.dtype(dtype).itemsize
        sizes = (picked, rows[1]), size, d_ff, 2 * rows[1] * size, 2
        steps = tiles.steps
        otherwise = plan_call(tiles, steps, *sizes, given)
        found = mosaic_tpu_fetch.plan(device_kind, rows[0], otherwise, tiles, steps, sizes, given)
        return found and found.tile_rows

    golden.check_values("pallas_kernels/tpu_fetches.txt", call, globals())
