"""The row tiles of a grouped product, computed by XLA before the kernel, or at compile time.

Called by the GPU kernel; the TPU kernel's plan also uses `running_sum` and `when_known`. No tile
spans two groups. Tiles start at multiples of `BLOCK_ROWS`, like the swizzled blocks that TMA
copies, so the first tile of a group may start with rows of the previous group, which it does not
write.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from pallas_kernels.coverage import collects_fallbacks

BLOCK_ROWS = 8


class TileList(NamedTuple):
    """Row tiles in the order of the rows. The array has a fixed length; the first `ends[-1]` exist.

    Attributes:
      tiles: [4, bound]: for every tile its group, its first row divided by `BLOCK_ROWS`, and the
        range of its rows that belong to the group, counted from its first row. Tiles of padding
        rows have the number of groups as their group.
      ends: for every group the number of tiles up to its end; padding, if it has tiles, is one more
        group.
    """

    tiles: Int32[Array, "4 bound"]
    ends: Int32[Array, " groups"]


def list_tiles(
    group_sizes: Int32[Array, " groups"], rows: int, tile_rows: int, zero_padding: bool = True
) -> TileList:
    """Cuts the rows of every group into tiles of `tile_rows`; with `zero_padding` also the padding
    rows after them, which are to become zeros."""
    # Step 1: the number of tiles of every group; padding is one more group.
    sizes = group_sizes
    if zero_padding:
        padding = rows - jnp.sum(group_sizes, keepdims=True)
        sizes = jnp.concatenate([group_sizes, padding])
    row_end = running_sum(sizes)
    first = (row_end - sizes) // BLOCK_ROWS * BLOCK_ROWS  # row of a group's first tile
    tiles_of_group = jnp.where(sizes > 0, -(-(row_end - first) // tile_rows), 0)
    tile_end = running_sum(tiles_of_group)
    # Step 2: the length of the list. A non-empty group has at most BLOCK_ROWS - 1 rows of others
    # in its first tile, and one tile that is not full.
    used = min(sizes.shape[0], rows)
    bound = (rows + used * (tile_rows + BLOCK_ROWS - 2)) // tile_rows
    index = jnp.arange(bound, dtype=jnp.int32)
    # Step 3: the group of every tile, and the tile's range of that group's rows.
    past = tile_end[None, :] <= index[:, None]  # [bound, sizes]: the groups before the tile's
    group = jnp.minimum(jnp.sum(past, axis=1, dtype=jnp.int32), sizes.shape[0] - 1)
    number = index - (tile_end - tiles_of_group)[group]  # of the tile, within its group
    start = first[group] + number * tile_rows
    begin = jnp.maximum((row_end - sizes)[group] - start, 0)
    end = jnp.minimum(row_end[group] - start, tile_rows)
    return TileList(jnp.stack([group, start // BLOCK_ROWS, begin, end]), tile_end)


def running_sum(sizes: Int32[Array, " sizes"]) -> Int32[Array, " sizes"]:
    """Returns the cumulative sum of the sizes in one pass; `jnp.cumsum` takes GPUs several."""
    count = sizes.shape[0]
    return jnp.sum(jnp.where(jnp.tril(jnp.ones((count, count), bool)), sizes, 0), axis=1)


def when_known(plan: Callable[..., Any], sizes: jax.Array | np.ndarray, *rest: int | bool) -> Any:
    """Calls `plan(sizes, *rest)`. For sizes in NumPy the result is in NumPy too: constants of the
    program instead of computations at run time. For a program that will not run nothing is
    computed, since that would start a backend."""
    if not isinstance(sizes, np.ndarray) or collects_fallbacks():
        return plan(jnp.asarray(sizes), *rest)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, plan(jnp.asarray(sizes), *rest))
