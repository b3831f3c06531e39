"""The TPU kernel's visits against plain Python, and its sizes against literal ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.mosaic_tpu_plan import plan_call, plan_visits
from pallas_kernels.grouped_matmul.tiles import TpuTiles
from tests import golden


def visits_python(sizes, rows, tile_rows):
    """(tile, tile to read, group, start, end) of every visit, and the groups with rows."""
    visits, owner = [], np.repeat(np.arange(len(sizes)), sizes)
    stream = [group for group, size in enumerate(sizes) if size]
    read, group = max(sum(sizes) - 1, 0) // tile_rows, stream[-1] if stream else 0
    for tile in range(-(-rows // tile_rows)):
        here = owner[tile * tile_rows : (tile + 1) * tile_rows].tolist()
        for own in sorted(set(here)):
            start = here.index(own)
            visits.append((tile, tile, own, start, start + here.count(own)))
        if not here:
            visits.append((tile, read, group, None, None))
    return visits, stream


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_visits(rows):
    """All sizes of three groups, in tiles of 4 rows."""
    plan = jax.jit(lambda sizes: plan_visits(sizes, rows, 4))
    for sizes in itertools.product(range(rows + 1), repeat=3):
        if sum(sizes) > rows:
            continue
        visits, count = plan(jnp.asarray(sizes, jnp.int32))
        expected, stream = visits_python(sizes, rows, 4)
        assert count == len(expected), sizes
        assert visits.groups[0] == len(stream)
        assert visits.stream[: len(stream)].tolist() == stream
        for index, (tile, read, group, start, end) in enumerate(expected):
            got = [int(field[index]) for field in visits[:6]]
            assert got[:3] == [tile, read, group], sizes
            assert got[3] == (stream.index(group) if stream else 0)
            if start is None:
                assert got[4] == got[5]
            else:
                assert got[4:] == [start, end]


class TestPlan:
    TILES = TpuTiles(512, (), (), (), 256, 8 * 2**20, 19 * 2**20, 60 * 2**20)
    STEPS = (256, 64)

    def test_sizes(self):
        def call(rows, d_in, row_bytes, d_out, weight_bytes):
            plan = plan_call(
                self.TILES,
                self.STEPS,
                (rows, d_in),
                row_bytes,
                d_out,
                d_in * weight_bytes,
                out_bytes=2,
            )
            assert plan.alignment == (32 if row_bytes == 1 else 16)
            return plan.tile_rows, plan.steps, plan.tile_columns

        golden.check_values("pallas_kernels/tpu_plans.txt", call, globals())

    def test_pieces(self):
        def call(d_out):
            plan = plan_call(self.TILES, self.STEPS, (9, 6), 2, d_out, 12, out_bytes=2)
            return [tuple(piece) for piece in plan.pieces]

        golden.check_values("pallas_kernels/tpu_pieces.txt", call, globals())

    def test_columns_that_do_not_fit(self):
        with pytest.raises(NotImplementedError, match="pad d_out 6000 to a multiple of 128"):
            plan_call(self.TILES, self.STEPS, (512, 7168), 2, 6000, 7168 * 2, out_bytes=2)
