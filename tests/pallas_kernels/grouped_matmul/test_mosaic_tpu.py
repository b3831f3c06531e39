"""The TPU kernel, interpreted on the CPU with a race detector, and its plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu, mosaic_tpu
from pallas_kernels.grouped_matmul.dense import dense_matmul
from pallas_kernels.grouped_matmul.reference import GroupedCall
from pallas_kernels.grouped_matmul.tiles import TPU, TpuTiles
from pallas_kernels.quantize import QuantArray, quantize_weight
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.grouped_matmul.suite import GroupedMatmulSuite
from tests.pallas_kernels.nightly import nightly
from tests.pallas_kernels.tpu_races import check_wait, no_race  # noqa: F401

pytestmark = pytest.mark.unoptimised

TARGET = Target("mosaic_tpu", "TPU7 of this test", interpret=True)
# Several tiles of everything, in the sizes of the suite.
TILES = TpuTiles(
    tile_rows=48,
    steps=(16,),
    fp8_steps=(16,),
    block_steps=(16,),
    step_columns=128,
    rows_bytes=2**20,
    weights_bytes=1,
    vmem_bytes=2**25,
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(TPU, TARGET.device_kind, TILES)


@pytest.mark.usefixtures("no_race")
class TestMosaicTpu(GroupedMatmulSuite):
    target = TARGET

    def test_all_patterns(self, monkeypatch):
        """With products of several sizes."""
        tiles = TILES._replace(steps=(32, 16), step_columns=256, weights_bytes=2**20)
        monkeypatch.setitem(TPU, TARGET.device_kind, tiles)
        super().test_all_patterns()


def test_a_dropped_wait_is_noticed(monkeypatch):
    """The products would read weights that are still on their way."""
    rows, weights, sizes = jnp.ones((8, 128)), jnp.ones((2, 128, 128)), jnp.asarray([3, 4])
    call = GroupedCall(rows, (weights,), sizes.astype(jnp.int32), None, None)
    run = functools.partial(mosaic_tpu.grouped_matmul, call, TARGET, None)
    check_wait(monkeypatch, run, mosaic_tpu, mosaic_tpu, "wait")


@pytest.mark.parametrize("function", [grouped_matmul, grouped_swiglu])
def test_rows_in_fp8_are_for_v7x(function):
    weights = QuantArray(jnp.zeros((2, 128, 128), jnp.float8_e4m3fn), jnp.ones((2, 128, 1)), (1, 0))
    count = 1 if function is grouped_matmul else 3
    arguments = (jnp.zeros((8, 128)), *[weights] * count, jnp.asarray([3, 4], jnp.int32))
    with use_target(Target("mosaic_tpu", "TPU v6 lite")):
        with pytest.raises(NotImplementedError, match=r"TPU v6 lite .* leave row_format None"):
            function(*arguments, row_format="fp8")


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("d_ff", [128, 256])
def test_hidden_rows_are_quantised_where_they_are_made(monkeypatch, d_ff):
    """If a tile has all their columns, by the kernel; to the bits that XLA gives them."""
    rng = np.random.default_rng(0)
    gate, up, down = (
        quantize_weight(jnp.asarray(rng.normal(size=shape), jnp.float32), "int8")
        for shape in ((4, d_ff, 128), (4, d_ff, 128), (4, 128, d_ff))
    )
    rows = rng.normal(size=(70, 128)).astype(jnp.bfloat16)
    rows[5] = 0
    rows[63:] = np.nan
    sizes = jnp.asarray([5, 0, 41, 17], jnp.int32)
    quantised = []

    def quantize_rows(x, format):
        quantised.append(x.shape)
        return quantize_rows_of_xla(x, format)

    quantize_rows_of_xla = mosaic_tpu.quantize_rows
    monkeypatch.setattr(mosaic_tpu, "quantize_rows", quantize_rows)
    found = []
    for weights_bytes in (1, 2**20):
        tiles = TILES._replace(weights_bytes=weights_bytes, steps=(32, 16))
        monkeypatch.setitem(TPU, TARGET.device_kind, tiles)
        with use_target(TARGET):
            arguments = (jnp.asarray(rows), gate, up, down, sizes)
            traced_anew = jax.jit(functools.partial(grouped_swiglu))
            found.append(np.asarray(traced_anew(*arguments), np.float32))
    of_hidden = [(70, d_ff)] * (d_ff > 128)  # a tile of 128 columns has all of 128
    assert quantised == [(70, 128), *of_hidden, (70, 128)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0][[*range(5), *range(6, 63)]]).max(axis=1).min() > 0
    assert not found[0][63:].any()
    assert not found[0][5].any()
    rows[63:] = 0
    with use_target(Target("reference", "cpu")):
        expected = grouped_swiglu(jnp.asarray(rows), gate, up, down, sizes)
    np.testing.assert_allclose(found[0], np.asarray(expected, np.float32), 4e-2, 4e-1)


class TestNarrowRows:
    """Rows that came in 8 bits over a wire."""

    @pytest.mark.parametrize(
        ("format", "d", "more"),
        [
            ("int8", 128, 0),
            ("fp8", 96, 28),
            *nightly(("int8", 96, 28), ("int8", 128, 128), ("fp8", 128, 128), ("fp8", 128, 0)),
        ],
    )
    def test_their_values_are_multiplied(self, format, d, more):
        """The rows themselves are not looked at, nor are columns behind the values. These in BF16
        are exact, and in INT8 the same if they are quantised again."""
        rng = np.random.default_rng(0)
        if format == "int8":
            values = rng.integers(-126, 126, (5, d)).astype(np.int8)
            values[:, 0] = 127
        else:
            values = rng.normal(size=(5, d)).astype(jnp.float8_e4m3fn)
        scales = 2.0 ** np.arange(-9, -4, dtype=np.float32)[:, None]
        rows = jnp.asarray(values.astype(np.float32) * scales, jnp.bfloat16)
        gate, up, down = (
            quantize_weight(jnp.asarray(rng.normal(size=shape), jnp.float32), format, (1, 0))
            for shape in ((2, 128, d), (2, 128, d), (2, 128, 128))
        )
        source, sizes = jnp.array([0, 2, 4, 1, 3, 0, 2], jnp.int32), jnp.array([3, 2], jnp.int32)
        behind = np.full((5, more), 0xFF, np.uint8).view(values.dtype)  # NaN in FP8
        came = jnp.asarray(np.concatenate([values, behind], axis=1))
        narrow = QuantArray(came, jnp.asarray(scales), (1, 0))

        def run(rows, narrow=None):
            if format == "int8":
                return grouped_matmul(rows, gate, sizes, narrow=narrow)
            return grouped_swiglu(rows, gate, up, down, sizes, source=source, narrow=narrow)[:5]

        with use_target(TARGET):
            found = np.asarray(run(jnp.full_like(rows, jnp.nan), narrow), np.float32)
        expected = np.asarray(run(rows), np.float32)
        assert (np.abs(found - expected).max(axis=1) <= 2e-2 * np.abs(expected).max(axis=1)).all()

    @golden.table("pallas_kernels/narrow_rows.yaml")
    def test_where_they_are_used(self, monkeypatch, rows, weights, device_kind, row_format, used):
        """In the weights' own 8 bits, on devices that multiply these, unless floats are asked
        for."""
        factors = []

        def products(factor, *_, **__):
            factors.append(factor)
            return floats

        monkeypatch.setattr(mosaic_tpu, "_grouped_products", products)
        weight = QuantArray(jnp.zeros((2, 128, 128), weights), jnp.ones((2, 128, 1)), (1, 0))
        narrow = QuantArray(jnp.zeros((5, 128), rows), jnp.ones((5, 1)), (1, 0))
        floats, sizes = jnp.zeros((5, 128), jnp.bfloat16), jnp.array([3, 2], jnp.int32)
        with use_target(Target("mosaic_tpu", device_kind)):
            grouped_matmul(floats, weight, sizes, narrow=narrow, row_format=row_format)
            if row_format is None:
                one = QuantArray(weight.values[0], weight.scales[0], (1, 0))
                dense_matmul(floats, one, narrow)
        assert [isinstance(factor, QuantArray) for factor in factors] == [used] * len(factors)
        assert len(factors) == 1 + (row_format is None)
