"""Paged attention on Hopper: lays a batch out for the kernels, and their results for the caller.

Called by `api.py`. The kernels are in `mosaic_gpu_kernel.py` and `mosaic_gpu_combine.py`;
`ranges.py` says what units and steps are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.attention.mosaic_gpu_combine import combine
from pallas_kernels.attention.mosaic_gpu_kernel import attend
from pallas_kernels.attention.mosaic_gpu_plan import ROWS, Sizes, compute_dtype, stages
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK
from pallas_kernels.attention.ranges import Cut, Places, cut_batch, results_of_units, rows_of_units
from pallas_kernels.attention.reference import Cache, PagedCall, pages_gap
from pallas_kernels.attention.tiles import GpuTiles, gpu_blocks
from pallas_kernels.mosaic_gpu import interpreter
from pallas_kernels.quantize.bits import from_bits
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, checked_fields, require

LARGEST_FP8 = 448.0
SMALLEST_QUERY = 1e-30
"""Query rows whose largest magnitude is smaller get the scale 1 instead of their own."""
MOST_COLUMNS = 256
"""Columns of the output whose sums the registers of a warpgroup hold."""


def gap(queries: Array | jax.ShapeDtypeStruct, cache: Cache) -> str:
    """Returns the property of a call that the kernels do not cover; empty: none."""
    page_size, head_dim = cache.k_pages.shape[2:]
    dtype, width = cache.k_pages.dtype, cache.v_width
    if found := pages_gap(cache):
        return found
    plan = _plan(queries, cache)
    multiple = 64 * (2 if plan.split_values else 1)
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
    call: PagedCall, target: Target, tiles: Fields | None = None, places: Places | None = None
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Runs `api.paged_attention` if `gap` finds nothing in the call; always returns
    log-sum-exps."""
    cache, where = call.cache, call.where
    kv_heads = cache.k_pages.shape[1]
    plan, cut = _of_batch(call, target, tiles)
    if places is None:
        places = cut_batch(cut, kv_heads, where)
    work = places.work(where.sequence_of_token)
    cache = cache._replace(k_pages=from_bits(cache.k_pages))
    if cache.v_pages is not None:
        cache = cache._replace(v_pages=from_bits(cache.v_pages))
    interpret = interpreter(target)
    query_scales = None
    if plan.fp8_keys:
        rows, query_scales = in_two_terms(rows_of_units(call.queries, places, cut))
    else:
        queries = call.queries.astype(compute_dtype(cache.k_pages.dtype))
        rows = rows_of_units(queries, places, cut)[None]
    options: dict[str, Any] = {"out_dtype": call.out_dtype, "interpret": interpret}
    parts = attend(rows, query_scales, cache, where.page_table, work, plan, **options)
    output, lse = combine(*parts, work.start, ranges=plan.ranges, interpret=interpret)
    return results_of_units(output, lse, places, cut, kv_heads, where.position)


def places_of(call: PagedCall, target: Target) -> Places:
    """Returns the `places` of `paged_attention`."""
    _, cut = _of_batch(call, target)
    return cut_batch(cut, call.cache.k_pages.shape[1], call.where)


def _of_batch(call: PagedCall, target: Target, tiles: Fields | None = None) -> tuple[Sizes, Cut]:
    """Returns the kernel's plan, and how the batch is cut."""
    # A batch with no more tokens than sequences is taken for one decode step.
    decode = call.queries.shape[0] <= call.where.page_table.shape[0]
    plan = _plan(call.queries, call.cache, decode=decode, target=target)
    plan = plan._replace(scale=call.scale, window=call.window)
    if tiles:
        plan = _cut_by(plan, call.cache, target, tiles)
    rows = plan.row_groups * ROWS
    largest = 1 if decode else max(1, rows // plan.heads)
    return plan, Cut(plan.heads, largest, plan.lanes, rows, plan.ranges, BLOCK, call.window)


def _plan(
    queries: Array | jax.ShapeDtypeStruct,
    cache: Cache,
    *,
    decode: bool = False,
    target: Target | None = None,
) -> Sizes:
    """Returns the kernel's plan, without scale and window; without a target, for any GPU."""
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
        fp8_keys=False,
        one_buffer=False,
        ranges=1 if target is None else max(1, gpu_blocks(target) // lanes),
        lanes=lanes,
        scale=1.0,
        window=0,
        v_width=cache.v_width,
        heads=heads,
        p_in_registers=target is None or not target.interpret,
    )
    if split_values or cache.k_pages.dtype.itemsize == 2:
        return plan
    fp8_keys = cache.k_pages.dtype != jnp.int8 and cache.v_pages is not None
    both = plan._replace(warpgroups=2, own_ranges=True, fp8_keys=fp8_keys, ranges=2 * plan.ranges)
    if stages(cache, both) > 1:
        return both
    if fp8_keys and stages(cache, both):
        return both
    both = both._replace(fp8_keys=False, one_buffer=cache.v_pages is not None)
    return both if stages(cache, both) else plan


def in_two_terms(
    rows: Float[Array, "*places head_dim"],
) -> tuple[Float[Array, "2 *places head_dim"], Float32[Array, "*places"]]:
    """Splits rows into two FP8 arrays, whose sum times a scale per row gives the rows back.

    The second array holds what rounding to the first one lost. Elements are exact to a 256th of
    themselves, or to 2e-6 of the largest magnitude in their row.
    """
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    scales = jnp.where(largest < SMALLEST_QUERY, 1.0, largest / LARGEST_FP8)
    wide = wide / scales[..., None]
    first = wide.astype(jnp.float8_e4m3fn)
    second = (wide - first.astype(jnp.float32)).astype(jnp.float8_e4m3fn)
    return jnp.stack([first, second]), scales


def _cut_by(plan: Sizes, cache: Cache, target: Target, given: Fields) -> Sizes:
    """Returns the plan with the tile sizes that a caller gave.

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
