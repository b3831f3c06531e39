"""Paged attention on GPUs before Hopper, by Triton: lays a batch out for the kernels.

Called by `api.py`. The kernels are in `triton_gpu_kernel.py`; `ranges.py` says what units and steps
are. They run on Ampere and Ada GPUs, which have no TMA and no wgmma, and read every key and value
that a token sees once for each of its lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.ranges import Cut, Places, cut_batch, results_of_units, rows_of_units
from pallas_kernels.attention.reference import Cache, pages_gap
from pallas_kernels.attention.tiles import multiprocessors
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
    """Returns which property of a call the kernels cannot handle; empty: they can run it."""
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
    queries: Float[Array, "tokens q_heads head_dim"],
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
    window: int,
    with_lse: bool,
    out_dtype: Any,
    target: Target,
    tiles: Fields | None = None,
    places: Places | None = None,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Runs `api.paged_attention` if `gap` finds nothing in the call; always returns log-sum-exps.

    Raises:
      ValueError: tiles are given.
    """
    if tiles:
        raise ValueError(f"tiles of paged_attention: the kernel of {target.device_kind} has none")
    kv_heads = cache.k_pages.shape[1]
    cut = cut_of(queries, cache, page_table, window, target)
    if places is None:
        places = cut_batch(cut, kv_heads, page_table, sequence_of_token, position)
    work = places.work(sequence_of_token)
    warps = 8 if cut.lane_rows * cache.v_width > SUMS // 4 else 4
    sizes = Sizes(cut, scale, cache.v_width, warps, 2)
    dtype = cache.k_pages.dtype
    rows = queries.astype(dtype if dtype.itemsize == 2 else jnp.float16)
    bits = cache
    if dtype.itemsize == 1 and dtype != jnp.int8:
        values = None if cache.v_pages is None else as_bits(cache.v_pages)
        bits = cache._replace(k_pages=as_bits(cache.k_pages), v_pages=values)
    laid_out = rows_of_units(rows, places, cut)
    interpret = target.interpret
    parts = attend(
        laid_out, bits, page_table, work, sizes, out_dtype=out_dtype, interpret=interpret
    )
    output, lse = combine(*parts, work.start, cut, interpret=interpret)
    return results_of_units(output, lse, places, cut, kv_heads, position)


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
    """Returns the `places` of `paged_attention`; reads only the shapes of queries and pages."""
    cut = cut_of(queries, cache, page_table, window, target)
    return cut_batch(cut, cache.k_pages.shape[1], page_table, sequence_of_token, position)


def cut_of(
    queries: Array | jax.ShapeDtypeStruct,
    cache: Cache,
    page_table: Array,
    window: int,
    target: Target,
) -> Cut:
    """Returns how a batch is cut; one with no more tokens than sequences is a decode step."""
    tokens, q_heads, head_dim = queries.shape
    decode = tokens <= page_table.shape[0]
    heads = q_heads // cache.k_pages.shape[1]
    most = max(LEAST_ROWS, min(MOST_ROWS, SUMS // (1 << (cache.v_width - 1).bit_length())))
    wanted = heads if decode else most
    rows = min(most, max(LEAST_ROWS, 1 << (wanted - 1).bit_length()))
    lanes = -(-heads // rows)
    width = head_dim + (0 if cache.v_pages is None else cache.v_width)
    block = max(16, min(64, 1 << ((STEP_BYTES // (2 * width)).bit_length() - 1)))
    largest = 1 if decode else max(1, rows // heads)
    ranges = max(1, 2 * multiprocessors(target) // lanes)
    return Cut(heads, largest, lanes, rows, ranges, block, window)
