"""Paged attention on Hopper: lays a batch out for the kernels, and their results for the caller.

Called by `api.py`. The kernels are in `mosaic_gpu_kernel.py` and `mosaic_gpu_combine.py`; what a
unit and a step are is said there. An item is one token or a few that read the same positions
(`work_items.py`); for each key/value head its rows, tokens x query heads, fill one unit or more.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.mosaic_gpu_combine import combine
from pallas_kernels.attention.mosaic_gpu_kernel import attend
from pallas_kernels.attention.mosaic_gpu_plan import ROWS, Sizes, compute_dtype, stages
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK, Work, range_begin
from pallas_kernels.attention.reference import Cache
from pallas_kernels.attention.tiles import GpuTiles, gpu_blocks
from pallas_kernels.attention.work_items import WorkItems, work_items
from pallas_kernels.quantize import EIGHT_BITS
from pallas_kernels.quantize.bits import from_bits
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, checked_fields, require

MOST_COLUMNS = 256
"""Columns of the output whose sums the registers of a warpgroup hold."""


class Places(NamedTuple):
    """Where the tokens of a batch read: `Work`, the same for every layer of a window, without what
    the batch itself has where every token is an item."""

    items: WorkItems | None
    """None: every token is one."""
    sequence: Int32[Array, " items"] | None
    place: Int32[Array, " items"] | None
    stride: Int32[Array, " items"]
    last: Int32[Array, " items"]
    first_block: Int32[Array, " items"] | None
    """None: zeros, and so is `stride`."""
    start: Int32[Array, " units_and_end"]
    first_unit: Int32[Array, " ranges"]

    def work(self, sequence_of_token: Array, position: Array) -> Work:
        """All of it."""
        return Work(
            sequence_of_token if self.sequence is None else self.sequence,
            position if self.place is None else self.place,
            self.stride,
            self.last,
            self.stride if self.first_block is None else self.first_block,
            self.start,
            self.first_unit,
        )


def gap(queries: Array | jax.ShapeDtypeStruct, cache: Cache) -> str:
    """What of a call the kernels cannot do; empty: nothing. `reference.py` can do everything."""
    page_size, head_dim = cache.k_pages.shape[2:]
    dtype, width = cache.k_pages.dtype, cache.v_width
    if cache.rope_pages is not None:
        return f"latents in {dtype} with their rotated part in an array of its own"
    if cache.int8_products:
        return "products in INT8"
    plan = _plan(queries, cache, decode=False, scale=1.0, window=0, target=None)
    multiple = 64 * (2 if plan.split_values else 1)
    if dtype not in (jnp.bfloat16, jnp.float16, *EIGHT_BITS):
        return f"a cache in {dtype} (there are some for 16 and 8 bits)"
    if cache.v_pages is not None and cache.v_pages.dtype != dtype:
        return f"keys in {dtype} with values in {cache.v_pages.dtype}"
    if head_dim % 64:
        return f"head_dim {head_dim} (multiples of 64)"
    if width % multiple or width > 2 * MOST_COLUMNS:
        return f"values of {width} (multiples of {multiple} up to {2 * MOST_COLUMNS})"
    if page_size % BLOCK and (page_size % 8 or BLOCK % page_size):
        return f"page_size {page_size} (8, 16, 32, or a multiple of {BLOCK})"
    if stages(cache, plan) < plan.least_stages:
        return f"head_dim {head_dim} with values of {width} in {dtype}: too wide for shared memory"
    return ""


def paged_attention(
    queries: Float[Array, "tokens q_heads head_dim"],
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
    window: int,
    out_dtype: Any,
    target: Target,
    tiles: Fields | None = None,
    places: Places | None = None,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """As `api.paged_attention` says, for what `gap` leaves."""
    tokens, kv_heads = queries.shape[0], cache.k_pages.shape[1]
    plan, largest = _of_batch(queries, cache, page_table, scale, window, target, tiles)
    if places is None:
        places = _places(plan, largest, cache, page_table, sequence_of_token, position)
    work = places.work(sequence_of_token, position)
    cache = cache._replace(k_pages=from_bits(cache.k_pages))
    if cache.v_pages is not None:
        cache = cache._replace(v_pages=from_bits(cache.v_pages))
    items, queries_of_items = places.items, queries[:, None]
    if items is not None:
        offset = jnp.arange(largest, dtype=jnp.int32)
        token = jnp.minimum(items.first[:, None] + offset, tokens - 1)
        queries_of_items = queries[token]

    interpret = plgpu.InterpretGPUParams(detect_races=True) if target.interpret else None
    rows = _units_of_items(queries_of_items.astype(compute_dtype(cache.k_pages.dtype)), plan)
    parts = attend(rows, cache, page_table, work, plan, out_dtype=out_dtype, interpret=interpret)
    output, lse = combine(*parts, work.start, ranges=plan.ranges, interpret=interpret)
    output = _items_of_units(output, plan, kv_heads, largest)
    lse = _items_of_units(lse[..., None], plan, kv_heads, largest)[..., 0]
    if items is None:
        return output, lse
    slot = jnp.arange(tokens * largest, dtype=jnp.int32).reshape(tokens, largest)
    place_of_slot = jnp.where(offset < items.count[:, None], token, tokens)
    slot_of_token = jnp.zeros(tokens, jnp.int32).at[place_of_slot].set(slot, mode="drop")
    exists = (position >= 0)[:, None]
    output = jnp.where(exists[..., None], output[slot_of_token], jnp.zeros((), output.dtype))
    return output, jnp.where(exists, lse[slot_of_token], -jnp.inf)


def places_of(
    queries: Array | jax.ShapeDtypeStruct,
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    window: int,
    target: Target,
) -> Places:
    """What `paged_attention` takes as `places`. Of queries and pages it reads shapes alone."""
    plan, largest = _of_batch(queries, cache, page_table, 1.0, window, target, None)
    return _places(plan, largest, cache, page_table, sequence_of_token, position)


def _of_batch(
    queries: Array | jax.ShapeDtypeStruct,
    cache: Cache,
    page_table: Array,
    scale: float,
    window: int,
    target: Target,
    tiles: Fields | None,
) -> tuple[Sizes, int]:
    """The kernel's plan, and the most tokens of an item."""
    # A batch with no more tokens than sequences is taken for one decode step.
    decode = queries.shape[0] <= page_table.shape[0]
    plan = _plan(queries, cache, decode=decode, scale=scale, window=window, target=target)
    if tiles:
        plan = _cut_by(plan, cache, target, tiles)
    return plan, 1 if decode else max(1, plan.row_groups * ROWS // plan.heads)


def _places(
    plan: Sizes,
    largest: int,
    cache: Cache,
    page_table: Array,
    sequence_of_token: Array,
    position: Array,
) -> Places:
    kv_heads = cache.k_pages.shape[1]
    sequences = page_table.shape[0]
    items = None
    if largest == 1:
        place, stride, last = position, jnp.zeros_like(position), position
        sequence = sequence_of_token
    else:
        items = work_items(sequence_of_token, position, sequences=sequences, largest=largest)
        last, stride, sequence = items.kv_length - 1, items.stride, items.sequence
        place = last - (items.count - 1) * stride

    first_block = jnp.zeros_like(last)
    if plan.window:
        first_block = jnp.clip(place - plan.window + 1, 0, jnp.maximum(last, 0)) // BLOCK
    # A padding token that is an item is a step that sees nothing: it writes the zeros. An item
    # without tokens is none.
    blocks = jnp.maximum(last, -1 if items else 0) // BLOCK + 1 - first_block
    work = _cut(Work(sequence, place, stride, last, first_block, blocks, blocks), kv_heads, plan)
    whole = items is None
    return Places(
        items,
        None if whole else work.sequence,
        None if whole else work.place,
        work.stride,
        work.last,
        None if whole and not plan.window else work.first_block,
        work.start,
        work.first_unit,
    )


def _plan(
    queries: Array | jax.ShapeDtypeStruct,
    cache: Cache,
    *,
    decode: bool,
    scale: float,
    window: int,
    target: Target | None,
) -> Sizes:
    heads = queries.shape[1] // cache.k_pages.shape[1]
    split_values = cache.v_width > MOST_COLUMNS
    # Two that convert for 64 rows each, and wait for each other, would run out of registers.
    two = (not decode or heads > ROWS) and cache.k_pages.dtype.itemsize == 2
    warpgroups = 2 if split_values or two else 1
    lane_rows = ROWS * (1 if split_values else warpgroups)
    lanes = -(-heads // lane_rows)
    plan = Sizes(
        warpgroups=warpgroups,
        split_values=split_values,
        own_ranges=False,
        one_buffer=False,
        ranges=1 if target is None else max(1, gpu_blocks(target) // lanes),
        lanes=lanes,
        scale=scale,
        window=window,
        v_width=cache.v_width,
        heads=heads,
        p_in_registers=target is None or not target.interpret,
    )
    if split_values or cache.k_pages.dtype.itemsize == 2:
        return plan
    both = plan._replace(warpgroups=2, own_ranges=True, ranges=2 * plan.ranges)
    if stages(cache, both) > 1:
        return both
    both = both._replace(one_buffer=cache.v_pages is not None)
    return both if stages(cache, both) else plan


def _cut_by(plan: Sizes, cache: Cache, target: Target, given: Fields) -> Sizes:
    """The plan with the tiles that a caller gave.

    Raises:
      ValueError: they do not fit.
    """
    op, default = "paged_attention", GpuTiles(gpu_blocks(target))
    tiles = default._replace(**checked_fields(op, given, default._asdict()))
    least, most = plan.lanes, max(plan.lanes, default.blocks)
    limits = f"{least} (one for every {ROWS} rows) to {most}, of {target.device_kind}"
    require(least <= tiles.blocks <= most, op, "blocks", tiles.blocks, limits)
    if "stages" in given:
        most = stages(cache, plan)
        least = plan.least_stages
        limits = f"{least} to {most}, which fill the shared memory"
        require(least <= tiles.stages <= most, op, "stages", tiles.stages, limits)
    ranges = max(1, tiles.blocks // plan.lanes) * (2 if plan.own_ranges else 1)
    return plan._replace(ranges=ranges, most_stages=tiles.stages)


def _units_of_items(
    queries: Float[Array, "items tokens_per_item q_heads head_dim"], plan: Sizes
) -> Float[Array, "units lanes rows head_dim"]:
    """The rows of every key/value head, token after token, filled up to whole lanes."""
    items, tokens, q_heads, head_dim = queries.shape
    kv_heads = q_heads // plan.heads
    rows = queries.reshape(items, tokens, kv_heads, plan.heads, head_dim)
    rows = jnp.swapaxes(rows, 1, 2).reshape(items * kv_heads, tokens * plan.heads, head_dim)
    padding = plan.lanes * plan.row_groups * ROWS - rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, padding), (0, 0)))
    return rows.reshape(items * kv_heads, plan.lanes, plan.row_groups * ROWS, head_dim)


def _items_of_units(
    rows: Float[Array, "units lanes rows width"], plan: Sizes, kv_heads: int, tokens_per_item: int
) -> Float[Array, "slots q_heads width"]:
    """The other way round: a slot is one of the tokens of an item."""
    width = rows.shape[-1]
    rows = rows.reshape(-1, kv_heads, plan.lanes * plan.row_groups * ROWS, width)
    rows = rows[:, :, : tokens_per_item * plan.heads]
    rows = rows.reshape(-1, kv_heads, tokens_per_item, plan.heads, width)
    return jnp.swapaxes(rows, 1, 2).reshape(-1, kv_heads * plan.heads, width)


def _cut(work: Work, kv_heads: int, plan: Sizes) -> Work:
    """Cut the steps of all units into equal ranges; `start` holds the steps of every item."""
    steps = jnp.repeat(work.start, kv_heads)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(steps, dtype=jnp.int32)])
    begin = range_begin(jnp.arange(plan.ranges, dtype=jnp.int32), start[-1], plan.ranges)
    ends_before = start[None, 1:] <= begin[:, None]
    return work._replace(start=start, first_unit=jnp.sum(ends_before, axis=1, dtype=jnp.int32))
