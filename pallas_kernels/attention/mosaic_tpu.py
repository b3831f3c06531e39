"""Paged attention on a TPU core (Mosaic), one kernel for decode, short multi-query and prefill.

Called by `api.py`, which has checked the arguments; `reference.py` defines the result. The batch is
cut into work items (`work_items.py`), which one core processes in order. Pages stay in HBM; the
kernel fetches them itself, a block of several pages at a time, `AHEAD` blocks before they are
multiplied, across item boundaries.

A block goes through two stages: *score* multiplies queries and keys and takes row maxima, *mix*
takes exponentials and multiplies them with the values. A round scores block b and mixes block
b - 1: two independent chains of instructions, so that the compiler hides the latencies of one
behind the other. In a decode step whose tokens have one block each, a round takes several tokens
instead (`mosaic_tpu_short.py`). Only blocks that some query sees partially are masked. INT8 is
converted to the queries' dtype, and so is FP8 unless that is BF16, beside which v7x multiplies FP8
as it is. Scales of keys multiply scores, those of values multiply probabilities. With
`int8_products` it is the other way round: queries and probabilities are rounded to INT8, nothing of
the cache is converted.

XLA stores pages whose width is not a multiple of 128 (latents) with the tokens as the minor
dimension. The kernel takes those with the last two dimensions swapped, which moves no data;
otherwise XLA would copy the pool before every call.

One sequence's keys are not split over several programs: one core has all the bandwidth.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.attention.mosaic_tpu_fetch import Copied, Fetcher, Items, Pool, Sizes
from pallas_kernels.attention.mosaic_tpu_kernel import Kernel, State
from pallas_kernels.attention.mosaic_tpu_memory import VMEM_BYTES, Call, call_of
from pallas_kernels.attention.mosaic_tpu_short import ShortKernel
from pallas_kernels.attention.reference import Cache, PagedCall
from pallas_kernels.attention.tiles import TpuTiles
from pallas_kernels.attention.work_items import work_items
from pallas_kernels.attention.write_tpu import LANES, is_swapped
from pallas_kernels.coverage import Fallback, fall_back
from pallas_kernels.quantize import Words
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, require

INTERPRETER = pltpu.InterpretParams(detect_races=True)
"""Interpreter parameters for tests on a CPU; copies happen when they are waited for."""

LEAST_PAGE = 64
"""Tokens of a page below which its copies are too small to keep the memory busy."""

Places = tuple[Array, ...]
"""Positions that the tokens of a batch read, the same for every layer of a window: the fields of
`Items`, the number of items, the number of padding tokens, and the flat page table."""

SMEM_BYTES = 768 * 2**10
"""Scalar memory, of 1 MiB, that the page table and the items may take."""


def gap(queries: Array | jax.ShapeDtypeStruct, cache: Cache) -> str:
    """Returns no gap: `paged_attention` refuses calls that the kernel does not cover."""
    return ""


def paged_attention(
    call: PagedCall, target: Target, tiles: Fields | None = None, places: Places | None = None
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"] | None]:
    """`api.paged_attention` on a TPU. The output has the dtype of the queries, which the caller
    casts to `out_dtype`.

    Raises:
      ValueError: the tiles do not fit.
      NotImplementedError: a format, page size, page table or number of heads that this generation
        or kernel cannot take; the message says what to use instead.
    """
    queries, cache, where = call.queries, call.cache, call.where
    k_pages, v_pages, k_scales, v_scales, v_width, rope_pages, int8_products = cache
    arrays = [k_pages] if v_pages is None else [k_pages, v_pages]
    every_scale = [k_scales, v_scales]
    if rope_pages is not None:  # values come last
        arrays, every_scale = [rope_pages, k_pages], [None, k_scales]
    for array in arrays:
        _check_format(array, target)
    if int8_products and "7" in target.device_kind and not target.interpret:
        raise NotImplementedError(
            f"{target.device_kind} has no INT8 matrix products: int8_products runs on v5e and v6e"
        )
    tokens, q_heads, head_dim = queries.shape
    _, kv_heads, page_size, _ = k_pages.shape
    wide = any(array.dtype == jnp.float32 for array in (queries, *arrays))
    dtype = jnp.dtype(jnp.float32 if wide else queries.dtype)
    sizes = call_of(queries, cache, where.page_table, call.window)
    chosen = sizes.tiles(target.device_kind, tiles)
    if tiles:
        _check_tiles(chosen, tiles, sizes)
    cut, group = sizes.cut(chosen), sizes.group
    narrow = dtype.itemsize == 2 and "v5" not in target.device_kind
    plan = Sizes(
        kv_heads=kv_heads,
        group=group,
        compact=sizes.compact,
        head_dim=head_dim,
        rope_dim=0 if rope_pages is None else rope_pages.shape[3],
        v_width=v_width,
        page_size=page_size,
        window=call.window,
        scale=call.scale * math.log2(math.e),
        dtype=dtype,
        query_dtype=queries.dtype,
        int8_products=int8_products,
        mask_dtype=jnp.int16 if narrow else jnp.int32,
        neighbours=call.neighbours and cut.together > 0 and cut.pages_per_block == 1,
        **cut._asdict(),
    )
    if places is None:
        places = places_of(call, target, chosen)
    # Layers share places, but each has pages of its own.
    places = *places, page_ids(where.page_table, k_pages)
    smem = 4 * sum(array.size for array in places)
    if smem > SMEM_BYTES:
        raise NotImplementedError(
            f"page_table {where.page_table.shape} and {tokens} tokens take {smem} bytes of scalar "
            f"memory, at most {SMEM_BYTES} fit: use larger pages (page_size is {page_size})"
        )
    if sizes.compact:
        # Mosaic loads every n-th row of 32 bits only.
        grouped = queries.astype(jnp.float32)  # [tokens, q_heads, head_dim]
    else:
        # [tokens, kv_heads, group, head_dim]
        grouped = queries.reshape(tokens, kv_heads, q_heads // kv_heads, head_dim)
        padding = group - grouped.shape[2]
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padding), (0, 0)))
    scales = [array for array in every_scale if array is not None]
    swapped = [is_swapped(array) for array in arrays]
    kernel = _call(plan, grouped, arrays, swapped, every_scale, call.with_lse, target.interpret)
    stored = [
        array.words if isinstance(array, Words) else jnp.swapaxes(array, 2, 3) if swap else array
        for array, swap in zip(arrays, swapped, strict=True)
    ]
    output, *lse = kernel(*places, grouped, *stored, *scales)
    if sizes.compact:
        output = output.astype(queries.dtype)
        return output, lse[0].reshape(tokens, q_heads) if lse else None
    each = q_heads // kv_heads
    output = output[:, :, :each].reshape(tokens, q_heads, v_width)
    if not lse:
        return output, None
    return output, lse[0][:, :, :each].reshape(tokens, q_heads)


def _check_format(pages: Array, target: Target) -> None:
    """Rejects pages that the device cannot read, or only after XLA has copied the whole pool;
    reports pages that it reads slowly."""
    eight_bits = pages.dtype.itemsize == 1
    if eight_bits and pages.dtype != jnp.int8 and "7" not in target.device_kind:
        raise NotImplementedError(
            f"{target.device_kind} has no float8_e4m3fn: use int8 for the KV cache instead of fp8"
        )
    if target.interpret:
        return  # which has no tiles
    page_size, width = pages.shape[2:]
    rows = LANES if eight_bits or is_swapped(pages) else 32 // pages.dtype.itemsize
    if page_size % rows:
        raise NotImplementedError(
            f"pages of {page_size} tokens, {pages.dtype}, width {width}: on a TPU use a page_size "
            f"that is a multiple of {rows} (and 128 or 256 for speed)"
        )
    if page_size < LEAST_PAGE:
        size = pages.dtype.itemsize * math.prod(pages.shape[1:])
        cost = f"starts {128 / page_size:.2g} times the copies of pages of 128, {size} bytes each"
        reason = f"pages of {page_size} tokens"
        fall_back(Fallback("paged_attention", target.device_kind, reason, cost, slow=True))


def _check_tiles(tiles: TpuTiles, given: Fields, sizes: Call) -> None:
    """Rejects given tiles that are no whole pages or heads.

    Raises:
      ValueError: naming the field and what would do.
    """
    op, heads = "paged_attention", sizes.kv_heads
    if "block_tokens" in given:
        fits, limits = tiles.block_tokens % sizes.page_size == 0, f"page_size {sizes.page_size}"
        require(fits, op, "block_tokens", tiles.block_tokens, f"a multiple of {limits}")
    if "tile_rows" in given:
        fits, limits = tiles.tile_rows % sizes.group == 0, f"{sizes.group} rows of a token"
        require(fits, op, "tile_rows", tiles.tile_rows, f"a multiple of the {limits} and KV head")
    if "item_rows" in given:
        most = heads * tiles.tile_rows
        limits = f"a multiple of {most}, {heads} KV heads of tile_rows {tiles.tile_rows}"
        require(tiles.item_rows % most == 0, op, "item_rows", tiles.item_rows, limits)


def places_of(call: PagedCall, target: Target, tiles: TpuTiles | None = None) -> Places:
    """Returns the `places` of `paged_attention`, by default those with the call's own tiles."""
    sizes = call_of(call.queries, call.cache, call.where.page_table, call.window)
    cut = sizes.cut(tiles or sizes.tiles(target.device_kind))
    page_size = call.cache.k_pages.shape[2]
    options: Any = {"largest": cut.item_tokens, "window": call.window, "in_order": cut.together > 0}
    return item_places(call.where, page_size, **options)


def page_ids(table: Array, pages: Array) -> Array:
    """Returns the entries of a page table, clamped here, as scalar instructions take a tenth of a
    decode step's bundles."""
    return jnp.clip(table.reshape(-1), 0, pages.shape[0] - 1)


def item_places(
    where: tuple[Array, Array, Array],
    page_size: int,
    *,
    largest: int,
    window: int = 0,
    in_order: bool = False,
) -> Places:
    """Returns the places of items of at most `largest` tokens, as `work_items` cuts them."""
    page_table, sequence_of_token, position = where
    sequences, pages_per_sequence = page_table.shape
    options: Any = {"sequences": sequences, "largest": largest, "in_order": in_order}
    items = work_items(sequence_of_token, position, **options)
    start = jnp.zeros_like(items.kv_length)
    if window:
        before_last = (items.count - 1) * items.stride
        start = jnp.maximum(items.kv_length - before_last - window, 0) // page_size
    pages = -(-items.kv_length // page_size) - start
    return (
        items.first,
        items.count,
        items.kv_length,
        items.stride,
        items.sequence * pages_per_sequence + start,
        start * page_size,
        pages,
        items.total,
        len(position) - items.total if in_order else jnp.sum(position < 0, dtype=jnp.int32)[None],
    )


def _call(
    plan: Sizes,
    queries: Array,
    pages: list[Array],
    swapped: list[bool],
    scales: list[Array | None],
    with_lse: bool,
    interpret: bool,
) -> Callable[..., Any]:
    """Returns the kernel: a function of places, table, queries, pages, and scales if any."""
    heads, group, block = plan.kv_heads, plan.group, plan.block
    tiles, rows = plan.item_tokens // plan.tile, plan.tile * group
    scaled = [array is not None for array in scales]
    tokens = queries.shape[0]
    shape = queries.shape[:-1]
    out_shapes = [jax.ShapeDtypeStruct((*shape, plan.v_width), queries.dtype)]
    if with_lse:
        shape = (tokens, 1, shape[1]) if plan.compact else shape
        out_shapes.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    vmem = pltpu.VMEM
    results = 2 * max(1, plan.together)
    scratch: list[Any] = [vmem((plan.buffers, plan.item_tokens, *queries.shape[1:]), queries.dtype)]
    for array, swap in zip(pages, swapped, strict=True):
        place = (array.shape[3], block) if swap else (block, array.shape[3])
        scratch.append(vmem((plan.buffers, heads, *place), array.dtype))
    scale_block = (plan.buffers, plan.pages_per_block, heads, plan.page_size)
    scratch += [vmem(scale_block, jnp.float32) for has in scaled if has]
    scratch += [vmem((results, plan.item_tokens, *out.shape[1:]), out.dtype) for out in out_shapes]
    widths: tuple[int, ...] = (block, 1, 1, 1, plan.v_width)
    if plan.together:
        widths = (block,)
    sets = plan.together or tiles
    scratch += [vmem((sets, heads, rows, width), jnp.float32) for width in widths]
    if plan.compact:
        scratch.append(vmem((tiles, heads, rows, plan.head_dim), plan.query_dtype))
    scratch += [
        pltpu.SemaphoreType.DMA((count,)) for count in (plan.buffers, plan.buffers, results)
    ]

    def kernel(*refs: Any) -> None:
        at = iter(refs)
        items = Items(*(next(at) for _ in Items._fields))
        total, padding, table, query_ref = (next(at) for _ in range(4))
        page_refs = [
            ref.bitcast(array.dtype) if isinstance(array, Words) else ref
            for array, ref in zip(pages, [next(at) for _ in pages], strict=True)
        ]
        scale_refs = [next(at) if has else None for has in scaled]
        outputs = [next(at) for _ in out_shapes]
        query_buffer = next(at)
        buffers = [next(at) for _ in pages]
        scale_buffers = [next(at) if has else None for has in scaled]
        pools = [
            Pool(*parts)
            for parts in zip(page_refs, buffers, scale_refs, scale_buffers, swapped, strict=False)
        ]
        output_buffers = [next(at) for _ in out_shapes]
        state = State(*(next(at) for _ in widths))
        ordered = next(at) if plan.compact else None
        copied = [Copied(*pair) for pair in zip(outputs, output_buffers, strict=True)]
        *arrived, written = at
        queries = Copied(query_ref, query_buffer)
        fetcher = Fetcher(plan, items, total, table, queries, pools, *arrived)
        body = ShortKernel if plan.together else Kernel
        body(plan, fetcher, padding, copied, state, ordered, written).run()

    arguments = 1 + len(pages) + sum(scaled)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        name="paged_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Items._fields) + 3,
            grid=(1,),
            in_specs=[anywhere] * arguments,
            out_specs=[anywhere] * len(out_shapes),
            scratch_shapes=scratch,
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES,
            # Ids of pages are clamped, everything else is where it is by construction.
            disable_bounds_checks=True,
        ),
        interpret=INTERPRETER if interpret else False,
    )
