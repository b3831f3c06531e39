"""The Hopper kernel, interpreted on the CPU with a race detector, and how it is called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Where the race detector keeps what it found, in the versions that do not raise.
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as interpreter

from pallas_kernels.grouped_matmul import (
    grouped_matmul,
    grouped_swiglu,
    mosaic_gpu,
    mosaic_gpu_ahead,
    mosaic_gpu_narrowing,
    mosaic_gpu_row_parts,
    mosaic_gpu_rows_first,
    mosaic_gpu_weights_first,
    tiles,
)
from pallas_kernels.grouped_matmul.api import fastest_row_format
from pallas_kernels.grouped_matmul.mosaic_gpu import pick_tiles
from pallas_kernels.quantize import QuantArray, quantize_weight
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.gpu_races import is_missing_wait
from tests.pallas_kernels.grouped_matmul.suite import GroupedMatmulSuite, RowsInBlocksSuite

pytestmark = pytest.mark.unoptimised

TARGET = Target("mosaic_gpu", "NVIDIA H200", interpret=True)
H200 = Target("mosaic_gpu", "NVIDIA H200")


class TestMosaicGpu(GroupedMatmulSuite):
    """Two output tiles, the second one half empty; row tiles of 16, which begin anywhere."""

    target = TARGET
    rows = 46
    d_out = 192
    counts = (0, 9)


def rows_have_parts(monkeypatch, rows=96):
    """As if no tile for few rows were larger than 16 of them, and no others had another size."""
    _tiles_of(monkeypatch, some=(rows,), many=())


def rows_come_first(monkeypatch):
    """As if no tile for few rows were larger than 16 of them, and there were none for some."""
    _tiles_of(monkeypatch, some=(), many=(128,))


def _tiles_of(monkeypatch, some, many):
    sizes = {"rows in blocks": (16,), "some rows in blocks": some, "many rows in blocks": many}
    for key, kind in tiles.HOPPER_DEFAULT.items():
        if key[0] in sizes:
            monkeypatch.setitem(tiles.HOPPER_DEFAULT, key, kind._replace(rows=sizes[key[0]]))


FORMS = {
    "weights": lambda monkeypatch: None,
    "parts": rows_have_parts,
    "rows": rows_come_first,
}


class TestRowParts:
    """A row tile of 96 in two parts; output tiles of three warpgroups, and of two that quantise."""

    @pytest.fixture(autouse=True)
    def _some_rows(self, monkeypatch):
        rows_have_parts(monkeypatch)

    @pytest.mark.parametrize(
        ("format", "d_out"),
        [
            ("fp8", 64),
            ("fp8_block", 256),
            pytest.param("fp8", 256, marks=pytest.mark.slow),
            pytest.param("fp8_block", 64, marks=pytest.mark.slow),
        ],
    )
    def test_matmul(self, format, d_out):
        """Borders of groups within a block of 8, of a part and of a tile; one has two tiles."""
        rng, sizes = np.random.default_rng(0), (7, 0, 48, 97)
        weights = quantize_weight(jnp.asarray(rng.normal(size=(4, d_out, 256))), format)
        rows = rng.normal(size=(160, 256)).astype(jnp.bfloat16)
        rows[sum(sizes) :] = np.nan
        arguments = jnp.asarray(rows), weights, jnp.asarray(sizes, jnp.int32)
        found, expected = (
            call_under(target, *arguments) for target in (TARGET, Target("reference", "cpu"))
        )
        np.testing.assert_allclose(found, expected, 1e-2, 1e-2)
        assert np.abs(expected[:152]).max(axis=1).min() > 1

    test_swiglu = RowsInBlocksSuite.test_swiglu_of_rows_in_blocks
    with_row_format = RowsInBlocksSuite.with_row_format
    target, rows, d_in, d_ff = TARGET, 120, 256, 256


class TestRowsFirst(RowsInBlocksSuite):
    """Row tiles of 128, of which a group has two; an output tile with columns that do not exist."""

    target = TARGET
    rows = 152
    d_out = 192

    @pytest.fixture(autouse=True)
    def _many_rows(self, monkeypatch):
        rows_come_first(monkeypatch)

    @pytest.mark.parametrize("sizes", [(64, 0, 64), (63, 65, 0), (0, 1, 135), (7, 8, 9), (0, 0, 0)])
    def test_borders(self, sizes):
        """Of groups: at and beside those of the warpgroups' rows, and within a block of 8."""
        rng = np.random.default_rng(0)
        weights = quantize_weight(jnp.asarray(rng.normal(size=(3, 192, 256))), "fp8_block")
        rows = rng.normal(size=(136, 256)).astype(jnp.bfloat16)
        rows[sum(sizes) :] = np.nan
        sizes = jnp.asarray(sizes, jnp.int32)
        found = [
            call_under(target, jnp.asarray(rows), weights, sizes)
            for target in (TARGET, Target("reference", "cpu"))
        ]
        np.testing.assert_allclose(found[0], found[1], 1e-2, 1e-2)


def call_under(target, rows, weights, sizes):
    def call():
        return grouped_matmul(rows, weights, sizes, row_format="fp8")

    with use_target(target):
        return np.asarray(jax.jit(call)(), np.float32)


def test_a_row_is_the_same_whichever_comes_first(monkeypatch):
    """So that a sequence does not depend on how many others there are."""
    rng = np.random.default_rng(0)
    weights = quantize_weight(jnp.asarray(rng.normal(size=(2, 192, 256))), "fp8_block")
    rows = jnp.asarray(rng.normal(size=(32, 256)), jnp.bfloat16)
    sizes = jnp.asarray([20, 12], jnp.int32)
    weights_first = call_under(TARGET, rows, weights, sizes)
    for form in (rows_have_parts, rows_come_first):
        form(monkeypatch)
        np.testing.assert_array_equal(call_under(TARGET, rows, weights, sizes), weights_first)


def race_is_reported(run):
    try:
        jax.block_until_ready(run())
        return interpreter.get_races().races_found
    except Exception as error:
        return is_missing_wait(error)
    finally:
        interpreter.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("wait", ["wait_until_free", "wait_until_loaded"])
@pytest.mark.parametrize("form", FORMS)
def test_a_dropped_wait_is_noticed(form, wait, monkeypatch):
    """Who loads would overwrite what is in use, who multiplies read what has not arrived."""
    FORMS[form](monkeypatch)
    module = mosaic_gpu_weights_first
    weights, row_format = jnp.ones((2, 64, 256), jnp.bfloat16), None
    if form != "weights":
        weights, row_format = quantize_weight(jnp.ones((2, 64, 384)), "fp8_block"), "fp8"
        module = mosaic_gpu_rows_first if form == "rows" else mosaic_gpu_row_parts
        module = mosaic_gpu_ahead if wait == "wait_until_free" else module
    rows = jnp.ones((8 if form == "weights" else 24, weights.shape[2]), jnp.bfloat16)

    def run():
        sizes = jnp.asarray([3, 4], jnp.int32)
        return mosaic_gpu.grouped_matmul(rows, weights, sizes, TARGET, row_format)

    assert not race_is_reported(run)
    monkeypatch.setattr(module, wait, lambda context, stage: None)
    assert race_is_reported(run)


def test_consumers_that_do_not_meet_are_noticed(monkeypatch):
    """Each quantises rows of which the other one has half of the columns."""
    weights = quantize_weight(jnp.ones((1, 128, 128), jnp.bfloat16), "fp8")
    rows, _ = mosaic_gpu._whole_blocks(jnp.ones((32, 128), jnp.bfloat16), "fp8")
    sizes, swiglu = jnp.asarray([32], jnp.int32), mosaic_gpu._swiglu

    def run():  # one kernel: older versions forget its races when the next one begins
        return mosaic_gpu._product(
            rows, (weights, weights), sizes, jnp.float8_e4m3fn, TARGET, swiglu
        )

    assert not race_is_reported(run)
    monkeypatch.setattr(mosaic_gpu_narrowing, "meet", lambda buffers: None)
    assert race_is_reported(run)


@pytest.mark.parametrize(
    ("shape", "block", "row_format", "covered"),
    [
        ((1, 192, 256), (1, 0), "fp8", True),
        ((1, 192, 256), (128, 128), "fp8", True),
        ((1, 192, 256), (256, 0), "fp8", True),
        ((1, 192, 192), (1, 0), None, True),
        ((1, 192, 192), (1, 0), "fp8", False),
        ((1, 192, 192), (1, 0), "float", True),
        ((1, 96, 256), (1, 0), "fp8", False),
        ((1, 192, 256), (96, 0), None, True),
        ((1, 192, 256), (96, 128), None, False),
    ],
)
def test_what_the_kernel_covers(shape, block, row_format, covered):
    """The others are left to the reference."""
    weights = quantised(jnp.float8_e4m3fn, shape, block)
    assert (not mosaic_gpu.gap(jnp.bfloat16, [weights], row_format)) == covered


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


def quantised(dtype, shape, block):
    counts = [
        1 if not size else -(-axis // size) for axis, size in zip(shape[1:], block, strict=True)
    ]
    return QuantArray(
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((shape[0], *counts), jnp.float32),
        block,
    )


def tiles_for(rows, *weights, in_blocks=False, given=None, groups=24, **options):
    found = []

    def pick(*traced):
        kind = mosaic_gpu.kind_of(traced[0], in_blocks=in_blocks)
        quantises = in_blocks and len(weights) == 2
        found.append(pick_tiles(rows, traced, groups, H200, kind, quantises, given, **options))

    jax.eval_shape(pick, *weights)
    return found[0]


class TestPickTiles:
    """The sizes of Step-3's experts on one of 8 + 8 devices."""

    up = (24, 640, 7168)

    @pytest.mark.parametrize(
        ("rows", "row_tile"), [(8, 16), (192, 32), (384, 32), (768, 64), (3072, 256), (24576, 256)]
    )
    def test_row_tile_follows_the_average_group(self, rows, row_tile):
        weights = jax.ShapeDtypeStruct(self.up, jnp.bfloat16)
        assert tiles_for(rows, weights).rows == row_tile

    @pytest.mark.parametrize(("rows", "row_tile"), [(16, 16), (128, 64), (160, 96), (2048, 96)])
    def test_one_group_has_tiles_of_one_size(self, rows, row_tile):
        """128 rows are two tiles of 64, not one of 96 and a third of another."""
        weights = quantised(jnp.float8_e4m3fn, (1, 7168, 16384), (128, 128))
        assert tiles_for(rows, weights, groups=1).rows == row_tile

    @pytest.mark.parametrize(
        ("d_ff", "rows", "gate_and_up", "down"),
        [
            (5120, 8, (16, 128, ""), (16, 128, "")),
            (5120, 128, (64, 128, "weights"), (64, 128, "weights")),
            (5120, 192, (96, 128, "weights"), (96, 192, "weights")),
            (5120, 256, (128, 128, "weights"), (128, 192, "weights")),
            (2560, 128, (32, 128, "weights"), (64, 128, "weights")),
            (2560, 256, (64, 128, "weights"), (128, 192, "weights")),
        ],
    )
    def test_tiles_of_one_network_fill_the_multiprocessors(self, d_ff, rows, gate_and_up, down):
        """Step-3's shared expert, whole and half of it: its tiles are at most 132."""
        up = quantised(jnp.float8_e4m3fn, (1, d_ff, 7168), (1, 0))
        back = quantised(jnp.float8_e4m3fn, (1, 7168, d_ff), (1, 0))
        options = {"groups": 1, "in_blocks": True, "one_group": True}
        for weights, expected in (((up, up), gate_and_up), ((back,), down)):
            tiles = tiles_for(rows, *weights, **options)
            assert (tiles.rows, tiles.out, tiles.shared) == expected

    @pytest.mark.parametrize(
        ("shape", "block", "splits"),
        [
            ((2112, 7168), (128, 128), 4),  # 17 tiles of columns, 56 steps
            ((4224, 7168), (128, 128), 4),  # 33 tiles
            ((4352, 7168), (128, 128), 1),  # 34 tiles
            ((1536, 6400), (128, 128), 2),  # 50 steps
            ((7168, 16384), (128, 128), 1),  # 56 tiles
            ((576, 1920), (128, 128), 1),  # 15 steps are few
            ((576, 7168), (1, 0), 1),  # sums of all of d_in are scaled once
        ],
    )
    @pytest.mark.parametrize("rows", [8, 128, 2048])
    def test_a_long_d_in_is_split_for_narrow_products(self, shape, block, splits, rows):
        """However many rows there are: a row's sums do not depend on that."""
        weights = quantised(jnp.float8_e4m3fn, (1, *shape), block)
        assert tiles_for(rows, weights, groups=1, one_group=True).splits == splits
        assert tiles_for(rows, weights, groups=1).splits == 1  # some rows may be padding

    @pytest.mark.parametrize(
        ("rows", "one_group", "scales"),
        [(96, True, 96), (128, True, 128), (120, True, 120 + 64), (96, False, 96 + 96)],
    )
    def test_scales_of_rows_go_on_where_a_tile_may(self, rows, one_group, scales):
        """Tiles of 96 and 64 rows; to fill up takes a launch."""
        weights = quantised(jnp.float8_e4m3fn, (1, 2112, 7168), (128, 128))
        tiles = tiles_for(rows, weights, groups=1, one_group=one_group)
        found = jax.eval_shape(
            lambda x, w: mosaic_gpu._operands(x, (w,), tiles, one_group=one_group).row_scales,
            jax.ShapeDtypeStruct((rows, 7168), jnp.bfloat16),
            weights,
        )
        assert found.shape == (scales,)

    def test_stages_fill_the_shared_memory(self):
        """16 bits: 48 KiB a stage beside 34 KiB for output; FP8: 24 KiB and less output."""
        floats = jax.ShapeDtypeStruct(self.up, jnp.bfloat16)
        assert tiles_for(24576, floats)[:4] == (256, 128, 64, 4)
        assert tiles_for(24576, floats, floats)[:4] == (128, 128, 64, 4)
        fp8 = quantised(jnp.float8_e4m3fn, self.up, (128, 128))
        assert tiles_for(24576, fp8)[:4] == (96, 128, 128, 5)
        assert tiles_for(24576, fp8, fp8)[:4] == (64, 128, 128, 4)
        # Rows in blocks: 30 and 40 KiB, and 40 KiB in which results are quantised.
        assert tiles_for(1536, fp8, in_blocks=True)[:4] == (112, 128, 128, 6)
        assert tiles_for(768, fp8, fp8, in_blocks=True)[:4] == (64, 128, 128, 4)

    def test_some_rows_have_parts(self):
        """128 rows of an expert on average fit a tile of 160 as a rule. 53 KiB a stage beside 10
        for quantising; 45 beside 33 for output. Blocks share rows where they can."""
        up = quantised(jnp.float8_e4m3fn, (3, 5120, 7168), (128, 128))
        down = quantised(jnp.float8_e4m3fn, (3, 7168, 5120), (128, 128))
        pick = functools.partial(tiles_for, in_blocks=True, groups=3)
        assert pick(384, up, up) == (160, 128, 128, 4, 2, 8, False, "rows", 1, True)
        assert pick(384, down) == (160, 192, 128, 4, 3, 8, False, "rows", 1, True)
        assert not pick(384, down).loader
        odd = quantised(jnp.float8_e4m3fn, self.up, (128, 128))
        assert tiles_for(24 * 128, odd, odd, in_blocks=True)[6:] == (False, "", 1, True)

    def test_rows_of_two_tiles_share_weights(self):
        """192 on average are two tiles of 112; where rows come first, of 128."""
        up = quantised(jnp.float8_e4m3fn, (3, 5120, 7168), (128, 128))
        down = quantised(jnp.float8_e4m3fn, (3, 7168, 5120), (128, 128))
        pick = functools.partial(tiles_for, in_blocks=True, groups=3)
        assert pick(576, up, up) == (128, 128, 128, 4, 2, 8, True, "weights", 1, False)
        of_pairs = (112, 192, 128, 5, 3, 8, False, "weights", 1, True)
        assert pick(576, down) == of_pairs
        in_int8 = quantised(jnp.int8, (3, 7168, 5120), (1, 0))
        assert pick(576, in_int8).rows == 128  # parts of 56 are none of integers' wgmma
        assert pick(9216, down, average=192) == of_pairs  # there is room for all choices
        for average in (226, 512):
            tiles = pick(3 * average, up, up)
            assert (tiles.rows, tiles.rows_first, tiles.shared) == (128, True, "weights")
        assert pick(3072, down) == (128, 256, 128, 4, 2, 8, True, "weights", 1, False)

    def test_given_tiles_of_rows_in_blocks(self):
        """Those that are not given follow from them, as for other operands."""
        fp8 = quantised(jnp.float8_e4m3fn, (24, 7168, 640), (128, 128))
        pick = functools.partial(tiles_for, 24 * 128, fp8, in_blocks=True)
        assert pick(given={"rows": (16, 112)})[:2] == (112, 128)
        assert pick(given={"out": 128})[:7] == (128, 128, 128, 6, 2, 8, True)
        assert pick(given={"cluster": 1}).shared == ""
        assert pick(given={"cluster": 2}).shared == "rows"

    def test_many_rows_come_first(self):
        """48 KiB a stage, 18 KiB for output, or 16 for what is quantised."""
        fp8 = quantised(jnp.float8_e4m3fn, self.up, (128, 128))
        back = quantised(jnp.float8_e4m3fn, (24, 7168, 640), (128, 128))
        first = tiles_for(24576, back, in_blocks=True)
        assert (first[:4], first.rows_first) == ((128, 256, 128, 4), True)
        first = tiles_for(24576, fp8, fp8, in_blocks=True)
        assert (first[:4], first.rows_first) == ((128, 128, 128, 4), True)

    def test_clusters_where_groups_have_many_rows(self):
        """Two blocks share what is larger: weights of 2 x 128 columns or 128 rows; 256 rows or 128
        columns of one weight. Where a tile holds a group its weights are read once anyway."""
        floats = jax.ShapeDtypeStruct(self.up, jnp.bfloat16)
        fp8 = quantised(jnp.float8_e4m3fn, self.up, (128, 128))
        down = jax.ShapeDtypeStruct((24, 7168, 640), jnp.bfloat16)
        assert tiles_for(24 * 128, floats, floats).shared == "weights"
        assert tiles_for(24 * 256, down).shared == "rows"
        assert tiles_for(24576, fp8, fp8, in_blocks=True).shared == "weights"
        for rows in (768, 24 * 128 - 8):
            assert not tiles_for(rows, floats, floats).shared
        assert not tiles_for(24 * 256 - 8, down).shared

    def test_the_average_is_said_where_rows_and_groups_do_not_tell(self):
        """Weights of 57 layers, one of which has rows; 4 of 64 experts, room for all choices."""
        floats = jax.ShapeDtypeStruct(self.up, jnp.bfloat16)
        assert tiles_for(24576, floats, floats, groups=24 * 57).rows == 32
        tiles = tiles_for(24576, floats, floats, groups=24 * 57, average=1024)
        assert (tiles.rows, tiles.shared) == (128, "weights")
        tiles = tiles_for(16384, floats, floats, groups=4, average=64)
        assert (tiles.rows, tiles.shared) == (128, "")

    def test_no_columns_are_left_without_a_block(self):
        """640 columns are 5 tiles, of which two blocks that share rows would leave one."""
        floats = jax.ShapeDtypeStruct(self.up, jnp.bfloat16)
        assert tiles_for(24 * 512, floats).shared == "weights"

    def test_clusters_of_a_caller(self):
        floats = jax.ShapeDtypeStruct(self.up, jnp.bfloat16)
        assert tiles_for(768, floats, given={"cluster": 2}).shared == "weights"
        assert not tiles_for(24576, floats, given={"cluster": 1}).shared
        with pytest.raises(ValueError, match="cluster is 3, needs 1 or 2"):
            tiles_for(768, floats, given={"cluster": 3})

    def test_a_part_of_the_columns_has_one_scale(self):
        """Of a block; else weights stay first."""
        small = quantised(jnp.float8_e4m3fn, self.up, (64, 128))
        assert not tiles_for(24576, small, in_blocks=True).rows_first

    def test_every_device_kind_has_multiprocessors(self):
        kinds = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H20", "?"]
        processors = [mosaic_gpu.processors(Target("mosaic_gpu", kind)) for kind in kinds]
        assert processors == [132, 132, 114, 78, 132]


class TestNarrowRows:
    """Rows that came in FP8 over a wire."""

    def test_their_values_are_multiplied(self):
        """The rows themselves are not looked at. If every block has the largest magnitude of its
        row, quantising in blocks gives these values, too."""
        rng = np.random.default_rng(0)
        values = rng.normal(size=(5, 256)).astype(jnp.float8_e4m3fn)
        values[:, ::128] = 448
        scales = 2.0 ** np.arange(-3, 2, dtype=np.float32)[:, None]
        rows = jnp.asarray(values.astype(np.float32) * scales, jnp.bfloat16)
        gate, up, down = (
            quantize_weight(jnp.asarray(rng.normal(size=shape), jnp.float32) / 16, "fp8", (1, 0))
            for shape in [(2, 128, 256), (2, 128, 256), (2, 256, 128)]
        )
        source, sizes = jnp.array([0, 2, 4, 1, 3, 0, 0], jnp.int32), jnp.array([3, 2], jnp.int32)
        narrow = QuantArray(jnp.asarray(values), jnp.asarray(scales), (1, 0))
        with use_target(TARGET):
            found, expected = (
                grouped_swiglu(
                    *(given, gate, up, down, sizes),
                    row_format="fp8",
                    source=source,
                    narrow=other,
                    zero_padding=False,
                )[:5]
                for given, other in ((jnp.full_like(rows, jnp.nan), narrow), (rows, None))
            )
        assert np.abs(np.asarray(expected, np.float32)).max(axis=1).min() > 0
        np.testing.assert_array_equal(found, expected)

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
