"""Fetches the rows of a grouped product on TPU by their index, one copy each, while earlier
products run.

Called by `mosaic_tpu.py`, for gate and up. Each row lies in HBM once, however many groups have it.
The kernel fetches the rows of one visit ahead, so that no array of sorted rows is written and read.
A copy moves 32-bit words: with a row of 8 bits come the three beside it, with one of BF16 another
one (`mosaic_tpu_words.py`). Of the words that have arrived, the kernel keeps each row's own bits
and puts the rows beside each other again.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Num

from pallas_kernels.grouped_matmul.mosaic_tpu_plan import LANES, Sizes, Visits, plan_call
from pallas_kernels.grouped_matmul.mosaic_tpu_words import wait_for_rows
from pallas_kernels.grouped_matmul.tiles import TpuTiles
from pallas_kernels.tuned import Fields

TILE_WORDS = 8
"""Words of a column that are unpacked at a time: a register's."""

CHUNK_COLUMNS = 1024
"""Columns that are unpacked at a time."""

UNROLLED = 4
"""Rows whose copies are started between two branches: a multiple of the rows of a word."""

SMEM_BYTES = 512 * 2**10
"""Most SMEM for the indices and scales of rows."""

MOST_TIMES = {"TPU7x": 4}
"""How often rows may be fetched, by device kind: once for each tile of columns; other kinds: once.

Counts for rows of 7168 columns in 8 bits that lie in HBM, in cycles of a core a row, of HBM or
bundles. Sorting them by XLA takes 65 on v5e, 34 on v6e (from VMEM) and 78 on v7x, before the
product begins, then 13, 8 and 4 to write them and as much each time they are read. Fetching a row
with those beside it takes 52, 31 and 17 each time, besides the copies of weights.
"""


def plan(
    device_kind: str,
    rows: int,
    otherwise: Sizes,
    tiles: TpuTiles,
    steps: tuple[int, ...],
    sizes: tuple[tuple[int, int], int, int, int, int],
    given: Fields | None = None,
) -> Sizes | None:
    """Returns the sizes for a call that fetches its rows; None: XLA should gather them.

    Args:
      rows: number of rows to pick from.
      otherwise: the sizes if XLA gathers the rows.
      tiles, steps, sizes, given: see `plan_call`; `sizes` holds several of its arguments.
    """
    (picked, d), itemsize, d_out, *_ = sizes
    if (
        itemsize not in (1, 2, 4)
        or d % LANES
        or rows % TILE_WORDS
        or 4 * (rows + picked) > SMEM_BYTES
    ):
        return None
    try:
        found = plan_call(tiles, steps, *sizes, given, (2 * 4 + itemsize) * d)
    except NotImplementedError:  # less fits, since rows take more
        return None
    fewest = otherwise.tile_rows if given else min(otherwise.tile_rows, LANES)
    most = MOST_TIMES.get(device_kind, 1)
    return found if found.tile_rows >= fewest and d_out // found.tile_columns <= most else None


def tables(
    source: Int32[Array, " picked"], rows: Num[Array, "rows d"], row_scales: tuple[Array, ...]
) -> tuple["Tables", tuple[Array, ...]]:
    """Returns the tables by which rows are fetched, and scales in blocks, which XLA gathers."""
    last = rows.shape[0] - 1
    index = jnp.clip(jnp.where(source < 0, source + rows.shape[0], source), 0, last)
    if row_scales and row_scales[0].shape[1] == 1:
        return Tables(index, row_scales[0][:, 0]), ()
    return Tables(index), tuple(scales[index] for scales in row_scales)


class Tables(NamedTuple):
    """Tables in SMEM by which rows are fetched.

    Attributes:
      source: [picked], the index of each row of the groups.
      scales: [rows], for rows in 8 bits with one scale each; else None.
    """

    source: Any
    scales: Any = None


class Buffers(NamedTuple):
    """Buffers in VMEM, with two slots for arriving rows.

    Attributes:
      words: [2, rows of a word, tile_rows / rows of a word, d]; row r of the tile is at (r % rows
        of a word, r / rows of a word).
      shift: [2, rows of a word, tile_rows / rows of a word, LANES], the bit in its words at which a
        row begins.
      scales: [2, tile_rows, LANES].
      packed: [tile_rows, d], the rows of a visit.
      arrived: [2] semaphores.
    """

    words: Any
    shift: Any
    scales: Any
    packed: Any
    arrived: Any


def buffers(tile_rows: int, d: int, dtype: DTypeLike) -> Buffers:
    """Returns the kernel's scratch buffers."""
    per_word = 4 // jnp.dtype(dtype).itemsize
    words = (2, per_word, tile_rows // per_word)
    return Buffers(
        words=pltpu.VMEM((*words, d), jnp.uint32),
        shift=pltpu.VMEM((*words, LANES), jnp.uint32),
        scales=pltpu.VMEM((2, tile_rows, LANES), jnp.float32),
        packed=pltpu.VMEM((tile_rows, d), dtype),
        arrived=pltpu.SemaphoreType.DMA((2,)),
    )


def start_next(
    of: Tables,
    rows: Any,  # [rows, d or more] in HBM; interpreted, its words
    to: Buffers,
    visits: Visits,
    column_tiles: int,
) -> None:
    """Starts the copies of the next visit's rows; in the first visit, also those of its own."""
    n, v, count = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    slot, tile_rows = _slot(), to.packed.shape[0]

    def fetch(visit: Any, slot: Any) -> None:
        place = visits.tile[visit] * tile_rows
        _start(of, rows, to, slot, place, visits.start[visit], visits.end[visit])

    # The other slot is free: the visit before this one has unpacked its rows into `packed`. Behind
    # the very last visit nothing is fetched, since nothing would wait for it.
    pl.when((n == 0) & (v == 0))(lambda: fetch(v, slot))
    is_last = v + 1 == count
    following = jnp.where(is_last, 0, v + 1)
    pl.when(~is_last | (n + 1 < column_tiles))(lambda: fetch(following, 1 - slot))


def _slot() -> Any:
    return (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) % 2


def _start(of: Tables, rows: Any, to: Buffers, slot: Any, place: Any, first: Any, end: Any) -> None:
    """Starts the copies of rows `first` to `end` of a tile. The tile's first row is row `place` of
    the groups."""
    per_word = to.words.shape[1]
    words = rows if rows.dtype == jnp.uint32 else rows.bitcast(jnp.uint32)
    bits, columns = per_word.bit_length() - 1, pl.ds(0, to.words.shape[3])

    def fetch(row: Any, beside: Any, word: Any) -> None:
        index, word = of.source[place + row], pl.ds(word, 1)
        pltpu.make_async_copy(
            words.at[pl.ds(index >> bits, 1), columns],
            to.words.at[slot, beside, word],
            to.arrived.at[slot],
        ).start()
        if per_word > 1:
            shift = ((index & (per_word - 1)) * (32 // per_word)).astype(jnp.uint32)
            to.shift[slot, beside, word, :] = jnp.full((1, LANES), shift)
        if of.scales is not None:
            to.scales[slot, pl.ds(row, 1), :] = jnp.full((1, LANES), of.scales[index])

    def fetch_one(row: Any, carry: None) -> None:
        fetch(row, row & (per_word - 1), row >> bits)

    def fetch_some(index: Any, carry: None) -> None:
        for number in range(UNROLLED):
            word = index * (UNROLLED // per_word) + number // per_word
            fetch(index * UNROLLED + number, number % per_word, word)

    whole = lax.div(first + (UNROLLED - 1), UNROLLED), lax.div(end, UNROLLED)
    begun = jnp.minimum(whole[0] * UNROLLED, end)
    lax.fori_loop(first, begun, fetch_one, None)
    lax.fori_loop(*whole, fetch_some, None)
    lax.fori_loop(jnp.maximum(whole[1] * UNROLLED, begun), end, fetch_one, None)


def finish(of: Tables, arriving: Buffers, first: Any, end: Any) -> tuple[Any, list[Any]]:
    """Waits for the rows `first` to `end` of this visit's tile, and unpacks them.

    Returns:
      refs: the rows, [tile_rows, d], and their scales, if they were fetched, [tile_rows, LANES], a
      row's scale in every lane. Rows outside the range are undefined.
    """
    slot = _slot()
    _, per_word, held, d = arriving.words.shape
    some = 1 << (held.bit_length() - 1)
    wait_for_rows(
        arriving.words.at[slot, 0, pl.ds(0, some)], end - first, arriving.arrived.at[slot]
    )
    tile_rows = TILE_WORDS * per_word
    size = 32 // per_word

    def unpack(tile: Any, carry: None) -> None:
        word = pl.ds(pl.multiple_of(tile * TILE_WORDS, TILE_WORDS), TILE_WORDS)
        here = pl.ds(pl.multiple_of(tile * tile_rows, tile_rows), tile_rows)
        for begin in range(0, d, CHUNK_COLUMNS):
            columns = slice(begin, min(begin + CHUNK_COLUMNS, d))
            parts = []
            for beside in range(per_word):
                part = arriving.words[slot, beside, word, columns]
                if per_word > 1:
                    shift = arriving.shift[slot, beside, word, :]
                    part >>= jnp.concatenate([shift] * (part.shape[1] // LANES), axis=1)
                if beside < per_word - 1:
                    part &= jnp.uint32((1 << size) - 1)
                parts.append(part << jnp.uint32(beside * size) if beside else part)
            together = reduce(jnp.bitwise_or, parts)
            arriving.packed[here, columns] = pltpu.bitcast(together, arriving.packed.dtype)

    lax.fori_loop(lax.div(first, tile_rows), pl.cdiv(end, tile_rows), unpack, None)
    return arriving.packed, [] if of.scales is None else [arriving.scales.at[slot]]
