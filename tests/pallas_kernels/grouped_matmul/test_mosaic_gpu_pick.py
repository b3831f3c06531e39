"""Which tiles the Hopper kernel has, and which rows it picks.

The tiles of each call are in `tests/golden/pallas_kernels/hopper_tiles.txt`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu
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
WHOLE_UP, WHOLE_DOWN = fp8(3, 5120, 7168), fp8(3, 7168, 5120)
BF16, BF16_DOWN = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (UP, DOWN))
BLOCKS, THREE = {"in_blocks": True}, {"in_blocks": True, "groups": 3}
ONE = {"groups": 1, "in_blocks": True, "one_group": True}
ROWS = (8, 16, 128, 192, 256, 384, 576, 768, 1536, 3064, 3072, 6136, 6144, 12288, 24576)


def test_tiles():
    """Choices by call and rows: the tile's sizes and stages, and the other fields."""

    def said(call):
        weights, options = eval(f"(lambda *one, **more: (one, more))({call}\n)", globals())
        found = []
        for rows in ROWS:
            tiles = tiles_for(rows, *weights, **options)._asdict()
            sizes = " x ".join(str(tiles.pop(one)) for one in ("rows", "out", "inner", "stages"))
            others = ", ".join(f"{field} {value}" for field, value in sorted(tiles.items()))
            found.append(f"{rows} rows: {sizes}; {others}")
        return "\n".join(found)

    golden.check_each("pallas_kernels/hopper_tiles.txt", said)


def test_a_long_d_in_is_split_for_narrow_products():
    """However many rows a call has: a row's sums do not depend on that."""

    def call(shape, block):
        weights = fp8(1, *shape, block=block)
        several = [tiles_for(rows, weights, groups=1) for rows in (8, 128, 2048)]
        assert {tiles.splits for tiles in several} == {1}  # some rows may be padding
        own = [tiles_for(rows, weights, groups=1, one_group=True) for rows in (8, 128, 2048)]
        (splits,) = {tiles.splits for tiles in own}
        return splits

    golden.check_values("pallas_kernels/hopper_splits.txt", call, globals())


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


def test_rows_are_picked(monkeypatch):
    """Negative indices count from the end, as of JAX's arrays; the last group ends after four."""
    monkeypatch.setattr(mosaic_gpu, "processors", lambda target: 1)
    rows = np.arange(5 * 256, dtype=np.int8).reshape(5, 256)
    source = np.asarray([4, -5, 0, -1, 2, 3], np.int32)

    def pick(rows, source, ends):
        return mosaic_gpu.pick_rows(rows, mosaic_gpu.Picked(source, ends, H200))

    found = replay(pick, rows, source, np.asarray([1, 4], np.int32))
    np.testing.assert_array_equal(found[:4], rows[[4, 0, 0, 4]])
    assert (found[4:] == 77).all()  # nobody's: not written
