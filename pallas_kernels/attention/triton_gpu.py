"""Paged attention on GPUs before Hopper, by Triton: lays a batch out for the kernels.

Called by `api.py`. The kernels are in `triton_gpu_kernel.py`; `ranges.py` says what units and steps
are. They run on Ampere and Ada GPUs, which have no TMA and no wgmma, and read every key and value
that a token sees once for each of its lanes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.attention.ranges import (
    Cut,
    Places,
    cut_batch,
    most_items,
    results_of_units,
    rows_of_units,
)
from pallas_kernels.attention.reference import Cache, PagedCall, pages_gap
from pallas_kernels.attention.tiles import gpu_blocks
from pallas_kernels.attention.triton_gpu_kernel import Sizes, attend, columns_of, combine
from pallas_kernels.quantize.bits import as_bits
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields

LEAST_ROWS = 16
"""Rows of the smallest product of the tensor cores."""
MOST_ROWS = 64
"""Most rows of a lane."""
LEAST_COLUMNS = 16
"""Columns of the narrowest part of keys or values."""
MOST_WIDTH = 1024
"""Most columns of keys and values together."""
STEP_BYTES = 32 * 1024
"""Most bytes of keys and values, in 16 bits, in a step."""
SUMS = 64 * 256
"""Elements of a lane's output whose sums the registers of a block of threads hold."""
LARGEST_OFFSET = 2**31
"""Triton's offsets, in elements, have 32 bits and a sign up to arrays of 2^32 bytes."""


def gap(queries: Array | jax.ShapeDtypeStruct, cache: Cache) -> str:
    """Returns the property of a call that the kernels do not cover; empty: none."""
    del queries
    head_dim, width, dtype = cache.k_pages.shape[3], cache.v_width, cache.k_pages.dtype
    if found := pages_gap(cache):
        return found
    for name, size in (("head_dim", head_dim), ("values of", width)):
        if size % LEAST_COLUMNS:
            return f"{name} {size} (multiples of {LEAST_COLUMNS})"
    if head_dim + width > MOST_WIDTH + 64:
        return f"head_dim {head_dim} with values of {width}: too wide for the registers"
    parts = columns_of(head_dim)
    if cache.v_pages is None and columns_of(width) != parts[: len(columns_of(width))]:
        return f"values of {width} in keys of {head_dim}, which are cut into {parts}"
    size = cache.k_pages.size * dtype.itemsize
    if cache.k_pages.size > LARGEST_OFFSET and size <= 2**32:
        return "pages of 2 to 4 GiB in 8 bits, whose offsets overflow in Triton"
    return ""


def paged_attention(
    call: PagedCall, target: Target, tiles: Fields | None = None, places: Places | None = None
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Runs `api.paged_attention` if `gap` finds nothing in the call; always returns log-sum-exps.

    Raises:
      ValueError: tiles are given.
    """
    if tiles:
        raise ValueError(f"tiles of paged_attention: the kernel of {target.device_kind} has none")
    cache, where = call.cache, call.where
    kv_heads = cache.k_pages.shape[1]
    cut = cut_of(call, target)
    if places is None:
        places = cut_batch(cut, kv_heads, where)
    work = places.work(where.sequence_of_token)
    warps = 8 if cut.lane_rows * cache.v_width > SUMS // 4 else 4
    sizes = Sizes(cut, call.scale, cache.v_width, warps, 2)
    dtype = cache.k_pages.dtype
    rows = call.queries.astype(dtype if dtype.itemsize == 2 else jnp.float16)
    bits = cache
    if dtype.itemsize == 1 and dtype != jnp.int8:
        values = None if cache.v_pages is None else as_bits(cache.v_pages)
        bits = cache._replace(k_pages=as_bits(cache.k_pages), v_pages=values)
    laid_out, table = rows_of_units(rows, places, cut), where.page_table
    interpret = target.interpret
    parts = attend(
        laid_out, bits, table, work, sizes, out_dtype=call.out_dtype, interpret=interpret
    )
    output, lse = combine(*parts, work.start, cut, interpret=interpret)
    return results_of_units(output, lse, places, cut, kv_heads, where.position)


def places_of(call: PagedCall, target: Target) -> Places:
    """Returns the `places` of `paged_attention`."""
    return cut_batch(cut_of(call, target), call.cache.k_pages.shape[1], call.where)


def cut_of(call: PagedCall, target: Target) -> Cut:
    """Returns how a batch is cut; one with no more tokens than sequences is a decode step."""
    cache, (tokens, q_heads, head_dim) = call.cache, call.queries.shape
    decode = tokens <= call.where.page_table.shape[0]
    heads = q_heads // cache.k_pages.shape[1]
    most = max(LEAST_ROWS, min(MOST_ROWS, SUMS // (1 << (cache.v_width - 1).bit_length())))
    wanted = heads if decode else most
    rows = min(most, max(LEAST_ROWS, 1 << (wanted - 1).bit_length()))
    lanes = -(-heads // rows)
    width = head_dim + (0 if cache.v_pages is None else cache.v_width)
    block = max(16, min(64, 1 << ((STEP_BYTES // (2 * width)).bit_length() - 1)))
    largest = 1 if decode else max(1, rows // heads)
    ranges = max(1, 2 * gpu_blocks(target, interpreted=1) // lanes)
    return Cut(heads, largest, most_items(call, largest), lanes, rows, ranges, block, call.window)
