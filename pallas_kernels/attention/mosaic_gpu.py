"""Paged attention on Hopper: lays a batch out for the kernels, and their results for the caller.

Called by `api.py`. The main kernel is in `mosaic_gpu_kernel.py`; the second one, here,
combines the partial results of units that span several ranges. `ranges.py` says what units and
steps are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.mosaic_gpu_kernel import attend
from pallas_kernels.attention.mosaic_gpu_plan import ROWS, Sizes, compute_dtype, stages
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK
from pallas_kernels.attention.ranges import (
    Cut,
    Places,
    cut_batch,
    most_items,
    piece_of,
    range_of,
    results_of_units,
    rows_of_units,
)
from pallas_kernels.attention.reference import Cache, PagedCall, pages_gap
from pallas_kernels.attention.tiles import GpuTiles, gpu_blocks
from pallas_kernels.attention.two_terms import TwoTerms, in_two_terms
from pallas_kernels.mosaic_gpu import interpreter, load, store
from pallas_kernels.quantize.bits import from_bits
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, checked_fields, require

TILE = 64
"""Rows, and columns, that a block of threads combines."""
BLIND = -1e30
"""Finite stand-in for the logarithm of an empty sum."""


def combine(
    out: Float[Array, "units lanes rows v_width"],
    lse: Float32[Array, "units lanes rows"],
    out_pieces: Float[Array, "pieces lanes rows v_width"],
    lse_pieces: Float32[Array, "pieces lanes rows"],
    start: Int32[Array, " units_and_end"],
    *,
    ranges: int,
    interpret: Any,
) -> tuple[Float[Array, "units lanes rows v_width"], Float32[Array, "units lanes rows"]]:
    """Copy a unit that lies in one range; otherwise combine its pieces, weighted by their sums.

    Args:
      out, lse, out_pieces, lse_pieces: see `mosaic_gpu_kernel.attend`.
      start: first step of every unit; at the end the number of all steps.
      ranges: number of ranges that the steps are cut into.
    """
    units, lanes, rows, v_width = out.shape
    kernel = plgpu.kernel(
        functools.partial(_body, ranges=ranges),
        kernel_name="paged_attention_combine",
        out_type=(
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(lse.shape, lse.dtype),
        ),
        grid=(units, lanes * (rows // TILE), v_width // TILE),
        grid_names=("unit", "row_tile", "column_tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    whole, log_sum = kernel(out, lse, out_pieces, lse_pieces, start)
    return whole, log_sum


def _body(
    out: Any,
    lse: Any,
    out_pieces: Any,
    lse_pieces: Any,
    start: Any,
    whole: Any,
    log_sum: Any,
    *,
    ranges: int,
) -> None:
    """Combine one tile."""
    unit, column_tile = lax.axis_index("unit"), lax.axis_index("column_tile")
    row = lax.axis_index("row_tile") * TILE
    rows = (row // out.shape[2], pl.ds(lax.rem(row, out.shape[2]), TILE))  # lane, its rows
    tile = (*rows, pl.ds(column_tile * TILE, TILE))
    total = start[start.shape[0] - 1]
    first = range_of(start[unit], total, ranges)
    last = range_of(start[unit + 1] - 1, total, ranges)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def write(values: Any, sums: Any) -> None:
        store(whole.at[unit, *tile], values.astype(whole.dtype))
        pl.when(column_tile == 0)(lambda: store(log_sum.at[unit, *rows], sums))

    def load_tile(array: Any, index: Any) -> Any:
        return load(array.at[index, *tile], plgpu.Layout.WGMMA)

    def load_rows(array: Any, index: Any) -> Any:
        return load(array.at[index, *rows], row_layout)

    def add(range_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        largest, sums, mixed = carry
        piece = piece_of(
            range_, unit, first=range_ == first, units=start.shape[0] - 1, ranges=ranges
        )
        # A piece in which a row saw nothing has -inf; the difference of two of them is NaN.
        piece_lse = jnp.maximum(load_rows(lse_pieces, piece), BLIND)
        new_largest = jnp.maximum(largest, piece_lse)
        shrink, weight = jnp.exp(largest - new_largest), jnp.exp(piece_lse - new_largest)
        values = load_tile(out_pieces, piece).astype(jnp.float32)
        mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
        mixed = mixed + values * lax.broadcast_in_dim(weight, mixed.shape, [0])
        return new_largest, sums * shrink + weight, mixed

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    @pl.when(first == last)
    def _take() -> None:
        write(load_tile(out, unit), load_rows(lse, unit))

    @pl.when(first < last)
    def _add_up() -> None:
        nothing = (
            filled((TILE,), BLIND, row_layout),
            filled((TILE,), 0.0, row_layout),
            filled((TILE, TILE), 0.0, plgpu.Layout.WGMMA),
        )
        largest, sums, mixed = lax.fori_loop(first, last + 1, add, nothing)
        log_of_all = jnp.where(
            largest == BLIND, jnp.full_like(largest, -jnp.inf), largest + jnp.log(sums)
        )
        write(mixed * lax.broadcast_in_dim(1.0 / sums, mixed.shape, [0]), log_of_all)


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
        queries = call.queries
        terms = queries if isinstance(queries, TwoTerms) else in_two_terms(queries)
        rows = jax.vmap(lambda term: rows_of_units(term, places, cut))(terms.values)
        query_scales = rows_of_units(terms.scales[..., None], places, cut)[..., 0]
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
    items = most_items(call, largest)
    return plan, Cut(plan.heads, largest, items, plan.lanes, rows, plan.ranges, BLOCK, call.window)


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
