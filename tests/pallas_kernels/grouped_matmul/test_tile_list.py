"""The row tiles of the Hopper kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.tile_list import list_tiles

listed = jax.jit(list_tiles, static_argnums=(1, 2))


def test_literal():
    """Group 0: rows 0 to 4; group 2: rows 5 to 27, from row 0 on; padding: from row 24 on."""
    tiles, ends = list_tiles(jnp.asarray([5, 0, 23], jnp.int32), 40, 16)
    assert ends.tolist() == [1, 1, 3, 4]
    assert tiles[:, :4].T.tolist() == [[0, 0, 0, 5], [2, 0, 5, 16], [2, 2, 0, 12], [3, 3, 4, 16]]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    padding=st.integers(0, 8),
    tile_rows=st.sampled_from([8, 16, 32]),
)
def test_every_row_is_in_one_tile(sizes, padding, tile_rows):
    """Each row is in a tile of its group, and all tiles fit. One shape, which compiles once."""
    sizes = [min(size, 160 - padding - sum(sizes[:i])) for i, size in enumerate(sizes)]
    sizes = [max(size, 0) for size in sizes]
    tiles, [*_, of_groups, total] = listed(jnp.asarray(sizes, jnp.int32), 160, tile_rows)
    assert total <= tiles.shape[1]
    assert (tiles[0, :of_groups] < 4).all()
    assert (tiles[0, of_groups:total] == 4).all()
    owners = np.repeat(np.arange(5), [*sizes, 160 - sum(sizes)])
    found = np.full(160, -1)
    for group, block, begin, end in np.asarray(tiles)[:, :total].T:
        assert 0 <= begin < end <= tile_rows
        rows = slice(block * 8 + begin, block * 8 + end)
        assert (found[rows] == -1).all()
        found[rows] = group
    np.testing.assert_array_equal(found, owners)


def test_the_most_tiles_fit():
    """Groups that need two tiles for nine rows, each, since they begin at the end of a block."""
    sizes = [7] + [16] * 9
    tiles, [*_, of_groups, total] = list_tiles(jnp.asarray(sizes, jnp.int32), sum(sizes), 16)
    assert total == of_groups == 1 + 2 * 9
    assert tiles.shape[1] >= total


def test_without_zeros_padding_has_no_tiles():
    tiles, ends = list_tiles(jnp.asarray([5, 0, 23], jnp.int32), 40, 16, False)
    assert ends.tolist() == [1, 1, 3]
    assert tiles[:, :3].T.tolist() == [[0, 0, 0, 5], [2, 0, 5, 16], [2, 2, 0, 12]]
