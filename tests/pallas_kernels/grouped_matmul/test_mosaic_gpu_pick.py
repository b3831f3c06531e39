"""Which tiles the Hopper kernel has, and which rows it picks.

The tiles of each call are in `tests/golden/pallas_kernels/hopper_tiles.json`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_gpu_pick
from pallas_kernels.grouped_matmul.mosaic_gpu import pick_tiles
from pallas_kernels.target import Target
from tests import golden
from tests.pallas_kernels.grouped_matmul.suite import quantised
from tests.pallas_kernels.hopper_replay import replay

H200 = Target("mosaic_gpu", "NVIDIA H200")


def tiles_for(rows, *weights, in_blocks=False, given=None, groups=24, **options):
    found = []

    def pick(*traced):
        kind = mosaic_gpu.kind_of(traced[0], in_blocks=in_blocks)
        quantises = in_blocks and len(weights) == 2
        found.append(pick_tiles(rows, traced, groups, H200, kind, quantises, given, **options))

    jax.eval_shape(pick, *weights)
    return found[0]


def fp8(*shape, block=(128, 128)):
    return quantised(jnp.float8_e4m3fn, shape, block)


# Step-3's experts on one of 8 + 8 devices, 24 with 640 columns each; and 3 whole ones.
UP, DOWN = (24, 640, 7168), (24, 7168, 640)
BF16 = jax.ShapeDtypeStruct(UP, jnp.bfloat16)
BF16_DOWN = jax.ShapeDtypeStruct(DOWN, jnp.bfloat16)
WHOLE_UP, WHOLE_DOWN = fp8(3, 5120, 7168), fp8(3, 7168, 5120)
IN_INT8 = quantised(jnp.int8, (3, 7168, 5120), (1, 0))
BLOCKS, THREE = {"in_blocks": True}, {"in_blocks": True, "groups": 3}
ONE = {"groups": 1, "in_blocks": True, "one_group": True}
CASES = {
    # The row tile follows the average group; stages fill the shared memory.
    **{f"bf16 up, {rows} rows": (rows, [BF16], {}) for rows in (8, 192, 384, 768, 3072, 24576)},
    "bf16 gate and up, 24576 rows": (24576, [BF16, BF16], {}),
    "fp8 up, 24576 rows": (24576, [fp8(*UP)], {}),
    "fp8 gate and up, 24576 rows": (24576, [fp8(*UP), fp8(*UP)], {}),
    "fp8 up, 1536 rows in blocks": (1536, [fp8(*UP)], BLOCKS),
    "fp8 gate and up, 768 rows in blocks": (768, [fp8(*UP), fp8(*UP)], BLOCKS),
    # One group has tiles of one size: 128 rows are two tiles of 64, not 96 and a third of another.
    **{
        f"one group, {rows} rows": (rows, [fp8(1, 7168, 16384)], {"groups": 1})
        for rows in (16, 128, 160, 2048)
    },
    # Tiles of Step-3's shared expert, whole and half of it, are at most 132: multiprocessors.
    **{
        f"shared expert of {d_ff}, {rows} rows, {name}": (rows, weights, ONE)
        for d_ff, rows in (
            (5120, 8),
            (5120, 128),
            (5120, 192),
            (5120, 256),
            (2560, 128),
            (2560, 256),
        )
        for name, weights in (
            ("gate and up", [fp8(1, d_ff, 7168, block=(1, 0))] * 2),
            ("down", [fp8(1, 7168, d_ff, block=(1, 0))]),
        )
    },
    # 128 rows of an expert on average fit a tile of 160 as a rule, which has parts.
    "three experts, 384 rows, gate and up": (384, [WHOLE_UP] * 2, THREE),
    "three experts, 384 rows, down": (384, [WHOLE_DOWN], THREE),
    "24 experts, 3072 rows, gate and up": (3072, [fp8(*UP)] * 2, BLOCKS),
    # 192 on average are two tiles of 112, which share weights; where rows come first, of 128.
    "three experts, 576 rows, gate and up": (576, [WHOLE_UP] * 2, THREE),
    "three experts, 576 rows, down": (576, [WHOLE_DOWN], THREE),
    # Parts of 56 rows are none of integers' wgmma.
    "three experts in int8, 576 rows, down": (576, [IN_INT8], THREE),
    # There is room for all choices.
    "three experts, 192 of 3072 rows, down": (9216, [WHOLE_DOWN], THREE | {"average": 192}),
    **{
        f"three experts, {3 * average} rows, gate and up": (
            3 * average,
            [WHOLE_UP] * 2,
            THREE | {"average": average},
        )
        for average in (226, 512)
    },
    "three experts, 3072 rows, down": (3072, [WHOLE_DOWN], THREE),
    # Many rows come first; blocks with a scale for a part of the columns leave weights first.
    "fp8 down, 24576 rows in blocks": (24576, [fp8(*DOWN)], BLOCKS),
    "fp8 gate and up, 24576 rows in blocks": (24576, [fp8(*UP)] * 2, BLOCKS),
    "fp8 small blocks, 24576 rows in blocks": (24576, [fp8(*UP, block=(64, 128))], BLOCKS),
    # Two blocks of threads share what is larger, where a group has more rows than a tile.
    **{f"bf16 gate and up, {rows} rows": (rows, [BF16, BF16], {}) for rows in (768, 3064, 3072)},
    **{f"bf16 down, {rows} rows": (rows, [BF16_DOWN], {}) for rows in (6136, 6144)},
    # 640 columns are 5 tiles, of which two blocks that share rows would leave one.
    "bf16 up, 12288 rows": (12288, [BF16], {}),
    # The average is said where rows and groups do not tell it: of 57 layers one has rows; 4 of 64
    # experts have room for all choices.
    "57 layers": (24576, [BF16, BF16], {"groups": 24 * 57}),
    "57 layers, 1024 rows": (24576, [BF16, BF16], {"groups": 24 * 57, "average": 1024}),
    "4 of 64 experts, 64 rows": (16384, [BF16, BF16], {"groups": 4, "average": 64}),
    # Tiles that are given; the others follow from them.
    **{
        f"given {name} {value}": (3072, [fp8(*DOWN)], BLOCKS | {"given": {name: value}})
        for name, value in (("rows", (16, 112)), ("out", 128), ("cluster", 1), ("cluster", 2))
    },
    "given cluster 2, 768 rows": (768, [BF16], {"given": {"cluster": 2}}),
    "given cluster 1, 24576 rows": (24576, [BF16], {"given": {"cluster": 1}}),
}


def test_tiles():
    found = {
        name: tiles_for(rows, *weights, **options)._asdict()
        for name, (rows, weights, options) in CASES.items()
    }
    golden.check("pallas_kernels/hopper_tiles.json", found)


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
def test_a_long_d_in_is_split_for_narrow_products(shape, block, splits):
    """However many rows there are: a row's sums do not depend on that."""
    weights = fp8(1, *shape, block=block)
    for rows in (8, 128, 2048):
        assert tiles_for(rows, weights, groups=1, one_group=True).splits == splits
        assert tiles_for(rows, weights, groups=1).splits == 1  # some rows may be padding


@pytest.mark.parametrize(
    ("rows", "one_group", "scales"),
    [(96, True, 96), (128, True, 128), (120, True, 120 + 64), (96, False, 96 + 96)],
)
def test_scales_of_rows_go_on_where_a_tile_may(rows, one_group, scales):
    """Tiles of 96 and 64 rows; to fill up takes a launch."""
    weights = fp8(1, 2112, 7168)
    tiles = tiles_for(rows, weights, groups=1, one_group=one_group)
    found = jax.eval_shape(
        lambda x, w: mosaic_gpu._operands(x, (w,), tiles, one_group=one_group).row_scales,
        jax.ShapeDtypeStruct((rows, 7168), jnp.bfloat16),
        weights,
    )
    assert found.shape == (scales,)


def test_clusters_of_a_caller():
    with pytest.raises(ValueError, match="cluster is 3, needs 1 or 2"):
        tiles_for(768, BF16, given={"cluster": 3})


def test_every_device_kind_has_multiprocessors():
    kinds = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H20", "?"]
    processors = [mosaic_gpu.processors(Target("mosaic_gpu", kind)) for kind in kinds]
    assert processors == [132, 132, 114, 78, 132]


def test_rows_are_picked(monkeypatch):
    """Negative indices count from the end, as of JAX's arrays; the last group ends after four."""
    monkeypatch.setattr(mosaic_gpu_pick, "processors", lambda target: 1)
    rows = np.arange(5 * 256, dtype=np.int8).reshape(5, 256)
    source = np.asarray([4, -5, 0, -1, 2, 3], np.int32)

    def pick(rows, source, ends):
        return mosaic_gpu_pick.pick_rows(rows, mosaic_gpu_pick.Picked(source, ends, H200))

    found = replay(pick, rows, source, np.asarray([1, 4], np.int32))
    np.testing.assert_array_equal(found[:4], rows[[4, 0, 0, 4]])
    assert (found[4:] == 77).all()  # nobody's: not written
