"""Sums every token's rows on TPU (Pallas, Mosaic); copies only rows that exist, one copy each.

Called by `routed.py`. Tokens are cut into blocks. While rows of one block are being copied, those
of the previous block are multiplied by their gates and added up, in the order of a token's choices,
so a sum does not depend on the rest of the batch. The sum is rounded to the dtype that is sent. On
v7x the token's other addend, of the shared expert, is added before that: XLA would write and read
sums in FP32 for it. On v5e and v6e, with twice the VMEM, such sums stay in VMEM. Without this
kernel, XLA gathers a row for each choice of each token, also for choices of other devices, and adds
these up afterwards.

Rows of BF16 lie in pairs, which are copied together: a copy moves 32-bit words.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.grouped_matmul.mosaic_tpu_plan import LANES
from pallas_kernels.grouped_matmul.mosaic_tpu_words import as_words, wait_for_rows
from pallas_kernels.target import Target
from pallas_kernels.varying import varying_shape

INTERPRET = pltpu.InterpretParams(detect_races=True)

BLOCK_TOKENS = 32
"""Tokens of a block; a multiple of `TILE_TOKENS`."""

TILE_TOKENS = 8
"""Tokens that are added up at a time: the rows of a 32-bit register tile; one of 16 bits has twice
as many."""

CHUNK_COLUMNS = 1024
"""Columns that are added up at a time."""

VMEM_BYTES = 40 * 2**20
"""Most VMEM for the rows being copied, in two blocks."""

SMEM_BYTES = 512 * 2**10
"""Most SMEM for the places of rows."""


def covers(shape: tuple[int, ...], dtype: DTypeLike, choices: tuple[int, ...]) -> bool:
    """Whether the kernel takes rows of this shape [rows, d] and [tokens, top_k] choices."""
    (rows, d), (tokens, top_k) = shape, choices
    return (
        dtype in (jnp.bfloat16, jnp.float32)
        and tokens > 0 == tokens % TILE_TOKENS
        and rows > 0 == rows % TILE_TOKENS
        and d % LANES == 0
        and 4 * tokens * top_k <= SMEM_BYTES
        and 2 * 4 * top_k * BLOCK_TOKENS * d <= VMEM_BYTES
    )


def combine(
    rows: Float[Array, "rows d"],
    gates: Float[Array, "tokens top_k"],
    place: Int32[Array, "tokens top_k"],
    here: Bool[Array, "tokens top_k"],
    base: Float[Array, "tokens d"] | None = None,
    *,
    target: Target,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "tokens d"]:
    """Returns for every token the sum of `base`, if given, and of the rows at `place` times their
    gates, for choices that are `here`. Sums are FP32, rounded to `dtype`. Only for shapes that
    `covers` accepts. XLA adds the base except on v7x, and rounds if tokens do not fill whole 16-bit
    tiles."""
    tokens, top_k = place.shape
    bases = () if base is None else (base,)
    narrowest = min(jnp.dtype(of).itemsize for of in (dtype, *(array.dtype for array in bases)))
    tile = TILE_TOKENS * 4 // narrowest
    if tokens % tile or (bases and "7" not in target.device_kind):
        total = combine(rows, gates, place, here, target=target)
        return (total if base is None else base.astype(jnp.float32) + total).astype(dtype)
    block = math.gcd(tokens, BLOCK_TOKENS)
    d, per_word = rows.shape[1], 4 // rows.dtype.itemsize
    places = jnp.where(here, place, -1).reshape(-1)
    counts = jnp.sum(here.reshape(-1, block * top_k), axis=1, dtype=jnp.int32)
    # A word's half is shifted up and the other one cut off; all of a word that was not copied.
    low = (place % per_word == 0) & (per_word == 2)
    kept = jnp.where(here, jnp.uint32(0xFFFF0000 if per_word == 2 else 0xFFFFFFFF), 0)
    beside = (jnp.where(low, jnp.uint32(16), 0), kept, jnp.where(here, gates, 0.0))
    of_block = pl.BlockSpec((block, top_k), lambda index, *_: (index, 0))
    of_rows = pl.BlockSpec((block, d), lambda index, *_: (index, 0))
    return pl.pallas_call(
        functools.partial(_kernel, tile, tokens // block, per_word),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tokens // block,),
            in_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                *[of_block] * len(beside),
                *[of_rows] * len(bases),
            ],
            out_specs=of_rows,
            scratch_shapes=[
                pltpu.VMEM((2, top_k, block, d), jnp.uint32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=varying_shape((tokens, d), dtype, (rows, *beside, *bases)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES + 16 * 2**20,
            disable_bounds_checks=True,  # rows are where `Order` has put them
        ),
        interpret=INTERPRET if target.interpret else False,
        name="combine_rows",
    )(places, counts, as_words(rows) if target.interpret else rows, *beside, *bases)


def _kernel(
    tile: int,
    blocks: int,
    per_word: int,
    places: Any,  # [tokens * top_k], the row of a choice or -1
    counts: Any,  # [blocks], rows that a block copies
    rows: Any,  # [rows, d] in HBM; interpreted, its words
    shift: Any,  # [block, top_k]
    kept: Any,  # [block, top_k]
    gates: Any,  # [block, top_k]
    *others: Any,
) -> None:
    """Adds up one block of tokens, `tile` tokens at a time."""
    *bases, out, buffer, arrived = others
    # bases: none, or one [block, d]; out: [block, d]; buffer: [2, top_k, block, d], words;
    # arrived: [2] semaphores
    index, (_, top_k, block, _) = pl.program_id(0), buffer.shape
    slot, following = index % 2, jnp.minimum(index + 1, blocks - 1)
    # [rows / per_word, d]
    words = rows if rows.dtype == jnp.uint32 else rows.bitcast(jnp.uint32)

    def fetch(to: Any, first: Any, place: Any, there: Any, number: int) -> None:
        """Starts copy number `number` of a tile of tokens, into slot `to`."""
        token, choice = divmod(number, top_k)
        row = places[first * top_k + number]
        copy = pltpu.make_async_copy(
            words.at[pl.ds(lax.div(jnp.maximum(row, 0), per_word), 1)],
            buffer.at[to, choice, pl.ds(place + token, 1)],
            arrived.at[to],
        )
        pl.when((row >= 0) & there)(copy.start)

    copies = tile * top_k

    def fetch_first(number_of_tile: Any, carry: None) -> None:
        place = number_of_tile * tile
        for number in range(copies):
            fetch(slot, place, place, True, number)

    def total(here: Any, columns: Any) -> Any:
        products = []
        for choice in range(top_k):
            own = slice(choice, choice + 1)
            bits = buffer[slot, choice, here, columns] << shift[here, own]
            row = lax.bitcast_convert_type(bits & kept[here, own], jnp.float32)
            products.append(row * gates[here, own])
        return functools.reduce(jnp.add, products)

    def add(number_of_tile: Any, carry: None) -> None:
        place = pl.multiple_of(number_of_tile * tile, tile)
        here = pl.ds(place, tile)
        firsts = range(0, out.shape[1], CHUNK_COLUMNS)
        for chunk, first in enumerate(firsts):
            # Copies are started between the sums: scalars of one beside vectors of the other. They
            # fill the slot that the block before this one was added up from.
            for number in range(copies)[chunk :: len(firsts)]:
                fetch(1 - slot, following * block + place, place, index + 1 < blocks, number)
            columns = slice(first, min(first + CHUNK_COLUMNS, out.shape[1]))
            found = jnp.concatenate(
                [
                    total(pl.ds(place + part, TILE_TOKENS), columns)
                    for part in range(0, tile, TILE_TOKENS)
                ]
            )
            for base in bases:
                found = base[here, columns].astype(jnp.float32) + found
            out[here, columns] = found.astype(out.dtype)

    tiles = block // tile
    pl.when(index == 0)(lambda: lax.fori_loop(0, tiles, fetch_first, None))
    # `counts` has exactly the copies that `fetch` starts for this block: with one more the wait
    # would last for ever, with one less rows would be added up before they are here.
    wait_for_rows(buffer.at[slot, 0], counts[index], arrived.at[slot])
    lax.fori_loop(0, tiles, add, None)
