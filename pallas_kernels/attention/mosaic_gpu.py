"""Paged attention on Hopper: lays a batch out for the kernels, and their results for the caller.

Called by `api.py`. The kernels are in `mosaic_gpu_kernel.py` and `mosaic_gpu_combine.py`; what a
unit and a step are is said there. An item is one token or a few that read the same positions
(`work_items.py`); for each key/value head its rows, tokens x query heads, fill one unit or more.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.mosaic_gpu_combine import combine
from pallas_kernels.attention.mosaic_gpu_kernel import BLOCK, ROWS, Plan, Work, attend, stages_of
from pallas_kernels.attention.reference import Cache
from pallas_kernels.attention.tiles import gpu_blocks
from pallas_kernels.attention.work_items import work_items
from pallas_kernels.target import Target

SHARED_MEMORY = 232_448
"""Bytes that a block of threads may have."""
MOST_V_WIDTH = 256
"""Columns of the output whose sums the registers of a warpgroup hold."""


def covers(queries: Array, cache: Cache) -> bool:
    """Whether the kernels can do this; `reference.py` can do everything."""
    page_size, head_dim = cache.k_pages.shape[2:]
    return (
        cache.k_pages.dtype in (jnp.bfloat16, jnp.float16)
        and queries.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and head_dim % 64 == 0
        and cache.v_width % 64 == 0
        and cache.v_width <= MOST_V_WIDTH
        and (page_size % BLOCK == 0 or (page_size % 8 == 0 and BLOCK % page_size == 0))
    )


def paged_attention(
    queries: Float[Array, "tokens q_heads head_dim"],
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
    window: int,
    target: Target,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """As `api.paged_attention` says, for what `covers` says."""
    tokens, q_heads, _ = queries.shape
    kv_heads, page_size = cache.k_pages.shape[1:3]
    sequences, columns = page_table.shape
    heads = q_heads // kv_heads
    # A batch with no more tokens than sequences is taken for one decode step.
    decode = tokens <= sequences
    warpgroups = 1 if decode and heads <= ROWS else 2
    tokens_per_item = 1 if decode else max(1, warpgroups * ROWS // heads)
    item_rows = tokens_per_item * heads
    units_per_kv_head = -(-item_rows // (warpgroups * ROWS))
    plan = Plan(
        warpgroups=warpgroups,
        blocks=gpu_blocks(target),
        stages=stages_of(cache, warpgroups, SHARED_MEMORY),
        scale=scale,
        window=window,
        v_width=cache.v_width,
        heads=heads,
        units_per_item=kv_heads * units_per_kv_head,
        units_per_kv_head=units_per_kv_head,
        p_in_registers=not target.interpret,
    )

    if tokens_per_item == 1:
        place, stride, last = position, jnp.zeros_like(position), position
        sequence = sequence_of_token
        units_queries = queries[:, None]  # [items, tokens_per_item, q_heads, head_dim]
    else:
        items = work_items(
            sequence_of_token, position, sequences=sequences, largest=tokens_per_item
        )
        last, stride, sequence = items.kv_length - 1, items.stride, items.sequence
        place = last - (items.count - 1) * stride
        offset = jnp.arange(tokens_per_item, dtype=jnp.int32)
        token = jnp.minimum(items.first[:, None] + offset, tokens - 1)
        units_queries = queries[token]
    units_queries = _rows_of_units(units_queries, plan, kv_heads, cache.k_pages.dtype)

    last = jnp.minimum(last, columns * page_size - 1)
    first_block = jnp.zeros_like(last)
    if window:
        first_block = jnp.clip(place - window + 1, 0, jnp.maximum(last, 0)) // BLOCK
    # A padding token of a decode batch is a step that sees nothing: it writes the zeros.
    blocks = jnp.maximum(last, 0 if tokens_per_item == 1 else -1) // BLOCK - first_block + 1
    work = _cut(sequence, place, stride, last, first_block, blocks, plan)

    interpret = plgpu.InterpretGPUParams(detect_races=True) if target.interpret else None
    parts = attend(
        units_queries,
        cache.k_pages,
        cache.v_pages,
        page_table,
        work,
        plan,
        out_dtype=queries.dtype,
        interpret=interpret,
    )
    output, lse = combine(*parts, work.start, interpret=interpret)
    output = _items_of_units(output, plan, kv_heads, tokens_per_item)
    lse = _items_of_units(lse[..., None], plan, kv_heads, tokens_per_item)[..., 0]
    if tokens_per_item == 1:
        return output, lse
    slot = jnp.arange(tokens * tokens_per_item, dtype=jnp.int32).reshape(tokens, tokens_per_item)
    real = offset < items.count[:, None]
    slot_of_token = jnp.zeros(tokens, jnp.int32)
    slot_of_token = slot_of_token.at[jnp.where(real, token, tokens)].set(slot, mode="drop")
    exists = (position >= 0)[:, None]
    output = jnp.where(exists[..., None], output[slot_of_token], 0)
    return output, jnp.where(exists, lse[slot_of_token], -jnp.inf)


def _rows_of_units(
    queries: Float[Array, "items tokens_per_item q_heads head_dim"],
    plan: Plan,
    kv_heads: int,
    dtype: Any,
) -> Float[Array, "units rows head_dim"]:
    """The rows of every key/value head, token after token, filled up to whole units."""
    items, tokens, _, head_dim = queries.shape
    rows = queries.reshape(items, tokens, kv_heads, plan.heads, head_dim).astype(dtype)
    rows = jnp.swapaxes(rows, 1, 2).reshape(items, kv_heads, tokens * plan.heads, head_dim)
    unit_rows = plan.warpgroups * ROWS
    padding = plan.units_per_kv_head * unit_rows - rows.shape[2]
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))
    return rows.reshape(-1, unit_rows, head_dim)


def _items_of_units(
    rows: Float[Array, "units rows width"], plan: Plan, kv_heads: int, tokens_per_item: int
) -> Float[Array, "slots q_heads width"]:
    """The other way round: a slot is one of the tokens of an item."""
    width = rows.shape[-1]
    rows = rows.reshape(-1, kv_heads, plan.units_per_kv_head * rows.shape[1], width)
    rows = rows[:, :, : tokens_per_item * plan.heads]
    rows = rows.reshape(-1, kv_heads, tokens_per_item, plan.heads, width)
    return jnp.swapaxes(rows, 1, 2).reshape(-1, kv_heads * plan.heads, width)


def _cut(
    sequence: Array,
    place: Array,
    stride: Array,
    last: Array,
    first_block: Array,
    blocks: Int32[Array, " items"],
    plan: Plan,
) -> Work:
    """Cut the steps of all units, of every item `blocks` a unit, into equal ranges."""
    steps = jnp.repeat(blocks, plan.units_per_item)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(steps, dtype=jnp.int32)])
    begin = jnp.arange(plan.blocks, dtype=jnp.int32) * start[-1] // plan.blocks
    before = start[None, 1:] <= begin[:, None]  # units that end before a range begins
    first_unit = jnp.sum(before, axis=1, dtype=jnp.int32)
    return Work(sequence, place, stride, last, first_block, start, first_unit)
