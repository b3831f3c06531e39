"""How one call of the TPU kernel is cut up: which tiles it visits, and how large they are.

Called by `mosaic_tpu.py`. Knows nothing of what the kernel does with it. `plan_visits` and
`arrange_scales` are array code, for XLA; the sizes follow from shapes alone.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32, Int32

from pallas_kernels.grouped_matmul.tiles import TpuTiles
from pallas_kernels.quantize import QuantArray

LANES = 128


class Visits(NamedTuple):
    """What the grid does, in order; the kernel reads it from SMEM. Past the last visit: anything.

    Attributes:
      tile: the tile of rows that is written.
      rows_tile: the tile of rows that is read; a visit for padding keeps the one before.
      group: whose scales are read.
      rank: how many groups with rows come before this one.
      start: the first row of the group within the tile.
      end: one past the last one; start in a visit for padding.
      stream: the groups that have rows, in order.
      groups: how many groups have rows.
    """

    tile: Int32[Array, " visits"]
    rows_tile: Int32[Array, " visits"]
    group: Int32[Array, " visits"]
    rank: Int32[Array, " visits"]
    start: Int32[Array, " visits"]
    end: Int32[Array, " visits"]
    stream: Int32[Array, " streamed"]
    groups: Int32[Array, " one"]


def plan_visits(
    group_sizes: Int32[Array, " groups"], rows: int, tile_rows: int
) -> tuple[Visits, Int32[Array, ""]]:
    """The visits for `rows` rows in tiles of `tile_rows`, and how many they are."""
    tiles = pl.cdiv(rows, tile_rows)
    streamed = min(group_sizes.shape[0], rows)
    ends = jnp.cumsum(group_sizes)
    total = ends[-1]
    has_rows = group_sizes > 0
    # One more group for the tiles that no group visits.
    starts = jnp.append(ends - group_sizes, total)
    ends = jnp.append(ends, total)
    first_tile = jnp.append(starts[:-1] // tile_rows, pl.cdiv(total, tile_rows))
    last_tile = jnp.append((ends[:-1] - 1) // tile_rows, tiles - 1)
    count = jnp.where(jnp.append(has_rows, True), last_tile - first_tile + 1, 0)
    visit_end = jnp.cumsum(count)

    index = jnp.arange(tiles + streamed, dtype=jnp.int32)
    group = jnp.sum(visit_end[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0])
    tile = jnp.minimum(first_tile[group] + index - (visit_end - count)[group], tiles - 1)
    rank = jnp.maximum(jnp.cumsum(has_rows, dtype=jnp.int32) - 1, 0)
    rank = jnp.append(rank, rank[-1])[group]
    stream = jnp.nonzero(has_rows, size=streamed, fill_value=0)[0].astype(jnp.int32)
    visits = Visits(
        tile=tile,
        rows_tile=jnp.minimum(tile, jnp.maximum(total - 1, 0) // tile_rows),
        group=stream[rank],
        rank=rank,
        start=jnp.clip(starts[group] - tile * tile_rows, 0, tile_rows),
        end=jnp.clip(ends[group] - tile * tile_rows, 0, tile_rows),
        stream=stream,
        groups=jnp.sum(has_rows, dtype=jnp.int32)[None],
    )
    return visits, visit_end[-1]


class Plan(NamedTuple):
    """The sizes of one call, all of which divide as they must.

    Attributes:
      alignment: what the first row of a product is a multiple of.
      tile_rows: of a tile.
      steps: rows of one product, from large to small; multiples of `alignment`, none over a tile.
      tile_columns, step_columns: of a tile of weights, of one piece and product.
      vmem_bytes: what the compiler may use.
    """

    alignment: int
    tile_rows: int
    steps: tuple[int, ...]
    tile_columns: int
    step_columns: int
    vmem_bytes: int

    @property
    def pieces(self) -> int:
        """Pieces of a tile of weights."""
        return self.tile_columns // self.step_columns


def plan_call(
    tiles: TpuTiles, rows: int, d_in: int, row_bytes: int, d_out: int, column_bytes: int
) -> Plan:
    """Sizes for a call.

    Args:
      row_bytes: of one number of a row.
      column_bytes: of the weights of one column, gate and up together.

    Raises:
      NotImplementedError: the columns cannot be cut into pieces that fit.
    """
    alignment = 32 if row_bytes == 1 else 16  # rows in a register, packed
    most = min(tiles.tile_rows, tiles.rows_bytes // (d_in * row_bytes))
    tile_rows = _round_up(min(max(most, tiles.steps[-1]), rows), alignment)
    steps = tuple(step for step in tiles.steps if step <= tile_rows) or (tile_rows,)
    if d_out % LANES:
        step_columns = tile_columns = d_out
    else:
        step_columns = LANES if d_out % tiles.step_columns else tiles.step_columns
        most = max(tiles.weights_bytes // (step_columns * column_bytes), 1)
        pieces = d_out // step_columns
        tile_columns = step_columns * max(n for n in range(1, most + 1) if pieces % n == 0)
    used = 2 * (tile_rows * d_in * row_bytes + tile_columns * column_bytes)
    if used > tiles.vmem_bytes:
        raise NotImplementedError(
            f"{tile_rows} rows of {d_in} numbers and {tile_columns} columns of {column_bytes} "
            f"bytes, twice, take {used} bytes of VMEM, there are {tiles.vmem_bytes}: pad d_out "
            f"{d_out} to a multiple of {LANES}, or split d_in"
        )
    return Plan(alignment, tile_rows, steps, tile_columns, step_columns, tiles.vmem_bytes)


class Scales(NamedTuple):
    """The scales of a weight as the kernel takes them.

    Attributes:
      array: [groups, pieces, blocks of d_in, columns of a piece], or, if not `by_column`, where
        neighbouring columns share a scale, [groups, pieces, blocks of a piece, blocks of d_in].
      by_column: which.
      block_in: how many of d_in share a scale.
    """

    array: Float32[Array, "groups pieces _ _"]
    by_column: bool
    block_in: int


def arrange_scales(weights: QuantArray, step_columns: int) -> Scales:
    """Bring the scales into the order of the pieces."""
    groups, d_out, d_in = weights.shape
    block_out, block_in = (
        min(size or axis, axis) for size, axis in zip(weights.block, (d_out, d_in), strict=True)
    )
    pieces = d_out // step_columns
    scales = weights.scales
    if step_columns % block_out == 0 and block_out % LANES == 0:
        return Scales(scales.reshape(groups, pieces, -1, scales.shape[2]), False, block_in)
    if block_out % step_columns == 0:
        scales = jnp.repeat(scales, block_out // step_columns, axis=1)[:, :pieces]
        return Scales(scales[:, :, None, :], False, block_in)
    if block_out > 1:
        scales = jnp.repeat(scales, block_out, axis=1)[:, :d_out]
    scales = scales.reshape(groups, pieces, step_columns, -1)
    return Scales(scales.swapaxes(2, 3), True, block_in)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
