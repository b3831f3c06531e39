"""Which tiles the Hopper kernel has."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu import pick_tiles
from pallas_kernels.target import Target
from tests.pallas_kernels.grouped_matmul.suite import quantised

H200 = Target("mosaic_gpu", "NVIDIA H200")


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
