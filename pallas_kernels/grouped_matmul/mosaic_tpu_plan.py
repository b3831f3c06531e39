"""Plans one call of the TPU kernel: tile sizes, and the list of visits.

Called by `mosaic_tpu.py`. Knows nothing of the kernel's computation. `plan_visits` and
`arrange_scales` are array code for XLA; the sizes follow from shapes alone.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32, Num

from pallas_kernels.grouped_matmul.tile_list import running_sum
from pallas_kernels.grouped_matmul.tiles import OP, TpuTiles
from pallas_kernels.quantize import E8M0, QuantArray, in_bytes
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, require

LANES = 128

WORD = 4
"""Scales of MXFP4 weights in a word; they belong to `LANES` values of d_in."""

SUBLANES = 8
"""Columns of weights in a register tile, at whose edges a copy from HBM begins and ends."""


class Visits(NamedTuple):
    """The visits in grid order, read by the kernel from SMEM; undefined past the last visit.

    Attributes:
      tile: row tile that is written.
      rows_tile: row tile that is read; a visit for padding keeps the previous one.
      group: group whose weights and scales are used.
      rank: number of non-empty groups before this one.
      start: the group's first row within the tile.
      end: one past its last row; equal to start in a visit for padding.
      stream: the non-empty groups, in order.
      groups: number of non-empty groups.
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
    group_sizes: Int32[Array, " groups"], rows: int, tile_rows: int, zero_padding: bool = True
) -> tuple[Visits, Int32[Array, ""]]:
    """Returns the visits for `rows` rows in tiles of `tile_rows`, and their number. Without
    `zero_padding`, tiles that only hold padding have no visit.

    Sums of comparisons throughout: XLA fuses them into a few instructions, where running sums,
    gathers and scatters of so few numbers are one or several each, and this runs in every layer.
    """
    groups = group_sizes.shape[0]
    tiles = pl.cdiv(rows, tile_rows)
    streamed = min(groups, rows)
    # Tiles that only hold padding are those of one more group.
    index = jnp.arange(groups + 1, dtype=jnp.int32)
    is_padding = index == groups
    sizes = jnp.pad(group_sizes, (0, 1))
    has_rows = sizes > 0

    # Step 1: the tiles that each group spans, and so its number of visits.
    ends = running_sum(sizes)
    starts = ends - sizes
    first_tile = lax.div(jnp.where(is_padding, starts + (tile_rows - 1), starts), tile_rows)
    last_tile = jnp.where(is_padding, tiles - 1, lax.div(ends - 1, tile_rows))
    count = jnp.where(has_rows | is_padding, last_tile - first_tile + 1, 0)
    visit_end = running_sum(count)
    visit_begin = visit_end - count
    # Step 2: number the non-empty groups, whose weights are streamed in this order.
    rank = jnp.maximum(running_sum(has_rows.astype(jnp.int32)) - 1, 0)
    last_group = jnp.max(jnp.where(has_rows, index, 0))
    place = jnp.arange(streamed, dtype=jnp.int32)[:, None]
    stream = jnp.sum(jnp.where(has_rows & (rank == place), index, 0), axis=1, dtype=jnp.int32)

    # Step 3: of every visit what its group has. There are at most as many visits as tiles and
    # non-empty groups together.
    visit = jnp.arange(tiles + streamed, dtype=jnp.int32)[:, None]
    is_own = (visit_begin <= visit) & (visit < visit_end)  # [visits, groups + 1]

    def of_visit(values: Array) -> Array:
        return jnp.sum(jnp.where(is_own, values, 0), axis=1, dtype=jnp.int32)

    tile = jnp.minimum(of_visit(first_tile - visit_begin) + visit[:, 0], tiles - 1)
    total = jnp.sum(group_sizes, dtype=jnp.int32)
    visits = Visits(
        tile=tile,
        rows_tile=jnp.minimum(tile, lax.div(jnp.maximum(total - 1, 0), tile_rows)),
        group=of_visit(jnp.where(is_padding, last_group, index)),
        rank=of_visit(rank),
        start=jnp.clip(of_visit(starts) - tile * tile_rows, 0, tile_rows),
        end=jnp.clip(of_visit(ends) - tile * tile_rows, 0, tile_rows),
        stream=stream,
        groups=jnp.sum(has_rows, dtype=jnp.int32)[None],
    )
    return visits, jnp.sum(count if zero_padding else count[:-1], dtype=jnp.int32)


class Pieces(NamedTuple):
    """Consecutive pieces of a weight tile, of equal width; each is one copy.

    Attributes:
      first: index of the first piece within the tile.
      number: number of pieces.
      column: first column of the first piece.
      columns: columns of each piece.
    """

    first: int
    number: int
    column: int
    columns: int


class Sizes(NamedTuple):
    """The sizes of one call, checked for divisibility.

    Attributes:
      alignment: the first row of a product is a multiple of this.
      tile_rows: rows of a row tile.
      steps: rows of one product, descending; multiples of `alignment`, at most `tile_rows`.
      tile_columns: columns of a weight tile.
      pieces: the pieces that cover these columns.
      vmem_bytes: VMEM limit for the compiler.
    """

    alignment: int
    tile_rows: int
    steps: tuple[int, ...]
    tile_columns: int
    pieces: tuple[Pieces, ...]
    vmem_bytes: int


def plan_call(
    tiles: TpuTiles,
    steps: tuple[int, ...],
    rows: tuple[int, int],
    row_bytes: int,
    d_out: int,
    column_bytes: int,
    out_bytes: int,
    given: Fields | None = None,
    fetched_bytes: int = 0,
) -> Sizes:
    """Returns the sizes for a call.

    Args:
      steps: the steps of `tiles` for the format of the weights.
      rows: shape of the rows (rows, d_in).
      row_bytes: bytes of one element of a row.
      column_bytes: bytes of one column of the weights, gate and up together.
      out_bytes: bytes of one element of the output.
      given: the tiles that a caller of the op set.
      fetched_bytes: bytes of all buffers for a row that the kernel fetches; 0: the grid does it.

    Raises:
      ValueError: given tiles do not fit.
      NotImplementedError: the columns cannot be cut into tiles that fit.
    """
    count, d_in = rows
    alignment = 32 if row_bytes == 1 else 16  # rows in a register, packed
    if given:
        _check_given(tiles, steps, alignment, d_in * row_bytes, given)
    bytes_of_row = fetched_bytes or 2 * d_in * row_bytes
    most = min(tiles.tile_rows, 2 * tiles.rows_bytes // bytes_of_row)
    most = max(most // alignment * alignment, alignment) if fetched_bytes else max(most, steps[-1])
    tile_rows = -(-min(most, count) // alignment) * alignment
    steps = tuple(step for step in steps if step <= tile_rows) or (tile_rows,)
    column_bytes += tile_rows * out_bytes
    tile_columns = d_out
    if d_out % LANES == 0:
        units = d_out // LANES
        if given:
            least, room = LANES * column_bytes, tiles.vmem_bytes // 2
            fits, limits = least <= tiles.weights_bytes <= room, f"{least} to {room}"
            require(fits, OP, "weights_bytes", tiles.weights_bytes, limits)
        most = max(tiles.weights_bytes // (LANES * column_bytes), 1)
        tile_columns = LANES * max(n for n in range(1, most + 1) if units % n == 0)
    used = tile_rows * bytes_of_row + 2 * tile_columns * column_bytes
    if used > tiles.vmem_bytes:
        raise NotImplementedError(
            f"{tile_rows} rows of {d_in} numbers and {tile_columns} columns of {column_bytes} "
            f"bytes, twice, take {used} bytes of VMEM, there are {tiles.vmem_bytes}: pad d_out "
            f"{d_out} to a multiple of {LANES}, or split d_in"
        )
    pieces = _pieces(tile_columns, tiles.step_columns)
    return Sizes(alignment, tile_rows, steps, tile_columns, pieces, tiles.vmem_bytes)


def _check_given(
    tiles: TpuTiles, steps: tuple[int, ...], alignment: int, row: int, given: Fields
) -> None:
    """Refuses tiles of a caller; `row` is the bytes of a row.

    Raises:
      ValueError: naming the field and its limits.
    """
    count = tiles.tile_rows
    most = tiles.rows_bytes // row // alignment * alignment
    limits = f"a multiple of {alignment} up to {most}, for rows of {row} bytes"
    require(
        "tile_rows" not in given or (count % alignment == 0 and count <= most),
        OP,
        "tile_rows",
        count,
        limits,
    )
    for field in {"steps", "fp8_steps", "block_steps"} & set(given):
        sizes = getattr(tiles, field)
        fits = all(size % alignment == 0 and size <= count for size in sizes)
        fits &= sizes == tuple(sorted(set(sizes), reverse=True))
        limits = f"descending multiples of {alignment} up to tile_rows {count}"
        require(fits, OP, field, sizes, limits)
    columns = tiles.step_columns
    require(columns % LANES == 0, OP, "step_columns", columns, f"a multiple of {LANES}")


def _pieces(tile_columns: int, step_columns: int) -> tuple[Pieces, ...]:
    """Returns pieces of `step_columns`, and one for the remainder."""
    if tile_columns % LANES:
        return (Pieces(0, 1, 0, tile_columns),)
    whole, rest = divmod(tile_columns, step_columns)
    pieces = (Pieces(0, whole, 0, step_columns), Pieces(whole, 1, tile_columns - rest, rest))
    return tuple(some for some in pieces if some.number and some.columns)


class Scales(NamedTuple):
    """The scales of a weight in the kernel's layout, in units of `LANES` columns or all columns.

    Attributes:
      array: [groups, units, blocks of d_in, columns of a unit], or, if not `by_column`, where the
        columns of a unit share their scales, [groups, units, 1, blocks of d_in]. FP32; of MXFP4
        int32 words with a scale for `WORD` blocks.
      by_column: which of the two layouts.
      block_in: values of d_in that share a scale.
    """

    array: Num[Array, "groups units _ _"]
    by_column: bool
    block_in: int


def arrange_zeros(weights: QuantArray) -> Num[Array, "groups units _ _"]:
    """Brings the zero points, one for each scale, into the order of the scales."""
    zeros = weights.zeros.astype(jnp.float32)
    return arrange_scales(QuantArray(weights.values, zeros, weights.block)).array


def arrange_scales(weights: QuantArray) -> Scales:
    """Brings the scales into the kernel's order. Those of MXFP4, bytes, lie four to a word, that of
    the first columns low.

    Raises:
      NotImplementedError: MXFP4 weights have other blocks than 32 columns.
    """
    (groups, *_), (_, d_out, d_in) = weights.scales.shape, weights.shape
    block_out, block_in = (
        min(size or axis, axis) for size, axis in zip(weights.block, (d_out, d_in), strict=True)
    )
    unit = d_out if d_out % LANES else LANES
    scales = weights.scales
    if block_out % unit == 0:
        scales = jnp.repeat(scales, block_out // unit, axis=1)[:, : d_out // unit]
        return Scales(scales[:, :, None, :], False, block_in)
    if scales.dtype == E8M0:
        if (block_out, block_in) != (1, LANES // WORD):
            raise NotImplementedError(f"MXFP4 weights in blocks of {block_out} x {block_in}")
        codes = jnp.pad(in_bytes(scales), ((0, 0), (0, 0), (0, -scales.shape[2] % WORD)))
        words = codes.reshape(groups, d_out, -1, WORD)
        scales = lax.bitcast_convert_type(words, jnp.int32)
    scales = jnp.repeat(scales, block_out, axis=1)[:, :d_out]
    return Scales(scales.reshape(groups, -1, unit, scales.shape[2]).swapaxes(2, 3), True, block_in)


def gap(widths: Iterable[int], target: Target) -> str:
    """Returns the width d_out that weights copied in pieces cannot have; empty: all are fine."""
    odd = [width for width in widths if width % SUBLANES]
    return f"d_out {odd[0]}, not a multiple of {SUBLANES}" if odd and not target.interpret else ""
