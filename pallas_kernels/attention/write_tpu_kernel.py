"""Writes rows to pages on a TPU core (Mosaic), and moves only the tiles that it changes.

Called by `api.py` where XLA would write the whole pool again, and for `Words`. A tile in memory
holds 32 rows of 8 bits, of which XLA:TPU scatters single ones only in tiles of eight: before and
after a scatter into wide pages, libtpu 0.0.50 copies the pool (for the 8,000 pages of
`configs/step3-v7x.yaml` 2.1 GB written in every layer). The kernel reads the 32 rows of each page
that get a new row, replaces some and writes them back, with several tiles in flight.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from pallas_kernels.attention.reference import Where
from pallas_kernels.attention.write_tpu import LANES, find_page
from pallas_kernels.quantize import Words

ROWS = 32
"""Rows of a tile of 8 bits; of wider numbers, rows of several tiles."""

BUFFERS = 16
"""Tiles in VMEM."""

AHEAD = BUFFERS // 2
"""Tiles that are read ahead; as many may still be on their way back."""

INTERPRET: Any = pltpu.InterpretParams(detect_races=True)
"""How the kernel is interpreted on a CPU."""


def is_written_by_tiles(pages: Num[Array, "pages kv_heads page_size ..."]) -> bool:
    """True for `Words`, which XLA cannot scatter rows into, and for pages of 8 bits whose rows are
    wider than one tile: narrower ones lie in memory as tiles of eight rows do, and a scatter leaves
    the pool where it is."""
    if isinstance(pages, Words):
        return True
    if pages.ndim != 4 or pages.dtype not in (jnp.int8, jnp.uint8) or pages.shape[2] % ROWS:
        return False
    return pages.shape[3] % LANES == 0 and pages.shape[3] > LANES


def write_rows(
    pages: Num[Array, "pages kv_heads page_size width"],
    rows: Num[Array, "tokens kv_heads width"],
    where: Where,
    *,
    interpret: bool,
) -> Num[Array, "pages kv_heads page_size width"]:
    """Writes one array of `api.write_rows`. Of tokens at one position any one is written."""
    given = pages.words if isinstance(pages, Words) else pages
    pool, heads, page_size, width = pages.shape
    position, (tokens,) = where.position, where.position.shape
    page, exists = find_page(pool, page_size, where)
    row = jnp.where(exists, page * page_size + position % page_size, -1)
    # Padding surrounds the batch: the kernel reads ROWS tokens for each tile.
    new = lax.bitcast_convert_type(rows, _bits(pages.dtype)).astype(jnp.int32)[:, :, None]
    new = jnp.pad(new, ((ROWS, ROWS), (0, 0), (0, 0), (0, 0)))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    found = pl.pallas_call(
        _kernel,
        name="write_rows",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[anywhere] * 2,
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.SMEM((tokens,), jnp.int32),
                pltpu.SMEM((tokens,), jnp.int32),
                pltpu.VMEM((BUFFERS, ROWS, *new.shape[1:]), jnp.int32),
                pltpu.VMEM((BUFFERS, heads, ROWS, width), pages.dtype),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(given.shape, given.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=INTERPRET if interpret else False,
    )(row, new, given)
    return dataclasses.replace(pages, words=found) if isinstance(pages, Words) else found


def _kernel(
    row: Any,  # [tokens] in scalar memory: rows of the pool, numbered through; -1: none
    new: Any,  # [padded tokens, heads, 1, width] in HBM
    _: Any,  # the pages, as they come
    pages: Any,  # [pages, heads, page_size, width] in HBM
    first: Any,  # [tokens] in scalar memory: first tokens of the items
    count: Any,  # [tokens] in scalar memory: tokens of the items
    new_buffer: Any,  # [BUFFERS, ROWS, heads, 1, width]
    buffer: Any,  # [BUFFERS, heads, ROWS, width]
    arrived: Any,  # [BUFFERS] semaphores
    written: Any,  # [BUFFERS] semaphores
) -> None:
    heads, width = buffer.shape[1], buffer.shape[3]
    if pages.dtype != buffer.dtype:
        pages = pages.bitcast(buffer.dtype)
    total, bits = _cut(row, first, count), _bits(buffer.dtype)

    def tile(item: Any) -> Any:
        return lax.div(row[first[item]], ROWS)

    def shares(item: Any, found: Any) -> Any:
        # Whether an item changes a tile of one that may still be on its way: read ahead, the tile
        # would lack the other item's rows, and writing it back would undo them. Items further back
        # have been waited for when their buffer was filled again.
        def same(before: Any, found: Any) -> Any:
            return found | (tile(before) == tile(item))

        return lax.fori_loop(jnp.maximum(item - BUFFERS + 1, 0), item, same, found)

    def place(item: Any) -> Any:
        units = pages.shape[2] // ROWS
        rows = pl.ds(pl.multiple_of(lax.rem(tile(item), units) * ROWS, ROWS), ROWS)
        return pages.at[lax.div(tile(item), units), :, rows]

    def reads(item: Any) -> tuple[Any, Any]:
        slot = lax.rem(item, BUFFERS)
        # Row r of the tile gets the token first + r - (row of the first token).
        start = first[item] - lax.rem(row[first[item]], ROWS) + ROWS
        return (
            pltpu.make_async_copy(
                new.at[pl.ds(start, ROWS)], new_buffer.at[slot], arrived.at[slot]
            ),
            pltpu.make_async_copy(place(item), buffer.at[slot], arrived.at[slot]),
        )

    def write(item: Any) -> Any:
        slot = lax.rem(item, BUFFERS)
        return pltpu.make_async_copy(buffer.at[slot], place(item), written.at[slot])

    def read(item: Any) -> None:
        for copy in reads(item):
            copy.start()

    def replace(item: Any) -> None:
        slot = lax.rem(item, BUFFERS)
        in_tile = lax.broadcasted_iota(jnp.int32, (ROWS, width), 0)
        begin = lax.rem(row[first[item]], ROWS)
        hit = (in_tile >= begin) & (in_tile < begin + count[item])
        for head in range(heads):
            old = lax.bitcast_convert_type(buffer[slot, head], bits).astype(jnp.int32)
            rows = new_buffer[slot, :, head].reshape(ROWS, width)
            merged = jnp.where(hit, rows, old).astype(bits)
            buffer[slot, head] = lax.bitcast_convert_type(merged, buffer.dtype)

    def change(item: Any) -> None:
        for copy in reads(item):
            copy.wait()
        replace(item)
        write(item).start()

    def one_by_one(item: Any, carry: None) -> None:
        read(item)
        change(item)
        write(item).wait()

    def pipelined(item: Any, carry: None) -> None:
        ahead = item + AHEAD
        change(item)
        # The slot's last tile has to be in HBM before the next one comes in.
        pl.when((ahead >= BUFFERS) & (ahead < total))(lambda: write(ahead - BUFFERS).wait())
        pl.when(ahead < total)(lambda: read(ahead))

    def begin(item: Any, carry: None) -> None:
        read(item)

    # Every write but the last of each buffer has been waited for.
    def finish(item: Any, carry: None) -> None:
        write(item).wait()

    # Sequences of a batch share no page and a sequence's tokens follow each other, so that items
    # rarely share a tile. Where some do, none overtakes another.
    in_order = lax.fori_loop(0, total, shares, False)

    @pl.when(in_order)
    def slowly() -> None:
        lax.fori_loop(0, total, one_by_one, None)

    @pl.when(jnp.logical_not(in_order))
    def fast() -> None:
        lax.fori_loop(0, jnp.minimum(total, AHEAD), begin, None)
        lax.fori_loop(0, total, pipelined, None)
        lax.fori_loop(jnp.maximum(total - BUFFERS, 0), total, finish, None)


def _bits(dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


def _cut(row: Any, first: Any, count: Any) -> Any:
    """Cuts the batch into items, runs of tokens whose rows follow each other in one tile.

    Returns:
      the number of items.
    """

    def add(token: Any, total: Any) -> Any:
        here, before = row[token], row[jnp.maximum(token - 1, 0)]
        continues = (here == before + 1) & (lax.rem(here, ROWS) != 0) & (before >= 0) & (token > 0)
        item = jnp.where(continues, total - 1, total)
        first[item] = jnp.where(continues, first[item], token).astype(jnp.int32)
        count[item] = jnp.where(continues, count[item] + 1, 1).astype(jnp.int32)
        return item + (here >= 0).astype(jnp.int32)

    return lax.fori_loop(0, row.shape[0], add, jnp.int32(0))
