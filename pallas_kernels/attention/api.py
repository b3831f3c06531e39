"""Attention over a paged cache, and inside a batch: checks the call, then runs the backend.

Called by the attention layers of a model. Knows nothing of layers or projections.

A batch is flat and ragged: its tokens belong to several sequences, and prefill chunks and single
decode tokens are treated alike. Token t is at `position[t]` of sequence `sequence_of_token[t]`, a
row of `page_table`; position p of a sequence is stored in row `p % page_size` of its page
`p // page_size`. A padding token has position -1.

Pages are `[pages, kv_heads, page_size, width]`, their scales `[pages, kv_heads, page_size]`: one
head's part of a page is contiguous, the unit that accelerators fetch, and the two minor dimensions,
which they tile, are never as short as a number of heads.
"""

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.attention import joined, reference
from pallas_kernels.attention.checks import (
    check_pages,
    check_places,
    check_rope,
    check_tokens,
    check_values,
    check_write,
)
from pallas_kernels.attention.two_terms import TwoTerms
from pallas_kernels.coverage import kernel_target
from pallas_kernels.quantize import Words, in_arrays
from pallas_kernels.target import WITH_ATTENTION, Target, current_target, kernels
from pallas_kernels.transforms import run_op
from pallas_kernels.tuned import Fields

Places = Any
"""A pytree of arrays: see `attention_places`."""

_Shaped = Array | Words | TwoTerms | jax.ShapeDtypeStruct
_Pages = tuple[Any, Any, Array | None, Array | None, Array | None]
_COST = (
    "copies every page of a token's table to FP32 first, at least 5 times the bytes of a cache in "
    "16 bits and 9 times those in 8"
)
_CHUNK_COST = "keeps the scores of 128 queries at a time in memory"


def write_rows(
    pages: tuple[Num[Array, "..."] | Words, ...],
    rows: tuple[Num[Array, "..."], ...],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> tuple[Any, ...]:
    """Write the rows of every token to the pages; padding tokens write nothing.

    In place if the caller donates the pages, by a scatter. TPUs exchange whole pages where these
    keep the tokens of a page last, scatter scales as they lie in memory, and have a kernel for wide
    pages in 8 bits. A token whose sequence, page or position lies outside
    the table or the pool writes nothing either.

    Args:
      pages: the arrays of one cache [pages, kv_heads, page_size, ...]: keys, values, their scales,
        or latents. TPU kernels write `Words` where they lie; elsewhere these are copied.
      rows: the rows to write to each array, [tokens, kv_heads, ...], of its dtype
        (or float8_e4m3fn where the pages hold its bits as uint8).

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated.
    """
    if not pages or len(pages) != len(rows):
        raise ValueError(f"{len(pages)} arrays of pages and {len(rows)} of rows")
    for index, (array, new) in enumerate(zip(pages, rows, strict=True)):
        check_write(f"rows[{index}]", new, array, rows[0].shape[:1])
        if array.shape[:3] != pages[0].shape[:3]:
            raise ValueError(
                f"pages[{index}] has [pages, kv_heads, page_size] {array.shape[:3]}, "
                f"pages[0] has {pages[0].shape[:3]}"
            )
    check_tokens(rows[0].shape[0], page_table, sequence_of_token, position)
    target = current_target()
    on_tpu = target.backend == "mosaic_tpu"

    def compute(
        pages: tuple[Any, ...], rows: tuple[Array, ...], where: reference.Where
    ) -> tuple[Any, ...]:
        if any(isinstance(array, Words) for array in pages) and (not on_tpu or target.interpret):
            written = compute(in_arrays(pages), rows, where)
            return tuple(
                before.holding(after) if isinstance(before, Words) else after
                for before, after in zip(pages, written, strict=True)
            )
        if not on_tpu:
            return reference.write_rows(pages, rows, *where)
        from pallas_kernels.attention import write_tpu, write_tpu_kernel

        def write(array: Any, new: Array) -> Any:
            if write_tpu.is_swapped(array):
                return write_tpu.write_rows(array, new, where)
            if write_tpu.is_scattered_in_tiles(array):
                return write_tpu.write_scales(array, new, where)
            if write_tpu_kernel.is_written_by_tiles(array):
                return write_tpu_kernel.write_rows(array, new, where, interpret=target.interpret)
            return reference.write_rows((array,), (new,), *where)[0]

        return tuple(write(array, new) for array, new in zip(pages, rows, strict=True))

    where = reference.Where(page_table, sequence_of_token, position)
    return run_op("write_rows", compute, tuple(pages), tuple(rows), where)


def paged_attention(
    queries: Float[Array, "tokens q_heads head_dim"] | TwoTerms,
    k_pages: Num[Array, "pages kv_heads page_size key_width"] | Words,
    v_pages: Num[Array, "pages kv_heads page_size v_head_dim"] | Words | None,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
    window: int = 0,
    v_width: int = 0,
    k_scales: Float32[Array, "pages kv_heads page_size"] | None = None,
    v_scales: Float32[Array, "pages kv_heads page_size"] | None = None,
    rope_pages: Float[Array, "pages kv_heads page_size rope_dim"] | None = None,
    int8_products: bool = False,
    with_lse: bool = False,
    runs: int = 0,
    out_dtype: DTypeLike | None = None,
    tiles: Fields | None = None,
    places: Places = (),
) -> tuple[Float[Array, "tokens q_heads v_head_dim"], Float32[Array, "tokens q_heads"] | None]:
    """Attends from every token to positions 0..position of its own sequence.

    The keys and values of the batch must be in the pages already (`write_rows`); the causal mask
    then treats prefill chunks and decode tokens alike. Query head h reads key and value head
    `h // (q_heads // kv_heads)`. Scores are `scale * query . key`; scores and softmax are FP32.
    Padding tokens give zeros. Cache rows that no token sees have no effect, even if they are NaN.
    Page ids outside the pool are clamped into it, and positions past the table to its last one.

    Args:
      queries: of two terms, as `rotate_and_write` may return them, only with pages in FP8.
      v_pages: None if the first `v_width` elements of a key are its value, as in absorbed latent
        attention; nothing is copied then.
      window: a token at position i sees position j only if i - j < window; 0: no limit.
      v_width: width of the values; only with v_pages None.
      k_scales, v_scales: FP32 scales of pages in 8 bits, one per position and head; k_scales apply
        to the values too when v_pages is None. 8-bit pages are int8, float8_e4m3fn, or the latter's
        bits as uint8, which are much cheaper on CPU (`pallas_kernels/quantize/bits.py`).
      rope_pages: the last columns of the keys, floats without scales, where k_pages has only the
        others (latent attention's rotated part); only with v_pages None. Hopper's kernels do not
        read them.
      int8_products: multiply in INT8 what the pages have in INT8 (xDeepServe §4.7): queries with a
        scale a token and head, probabilities times the scales of values with a scale a token, head
        and 512 positions. Sums are INT32. `rope_pages` are multiplied in floats all the same. Not
        on TPU v7x, which has no INT8 products; Hopper's kernels do not.
      with_lse: whether to return log(sum(exp(scores))) of every token and query head, -inf for
        padding tokens; `merge` needs it.
      runs: the most runs of the batch that padding or a new run ends: neighbours of one sequence at
        positions one apart, or all at the same. GPUs lay queries out for this number, and leave out
        tokens of further runs; 0: any batch, which takes up to 128 times the memory of the queries.
      out_dtype: of the output; None: that of `queries`.
      tiles: sizes that replace those of the device kind, by field (`pallas_kernels/README.md`).
      places: the result of `attention_places` for the same batch, window and shapes; () or None:
        they are computed here.

    Returns:
      one row per token and query head, and the log-sum-exps; None without `with_lse`.

    Raises:
      ValueError: the shapes, dtypes, options or tiles do not fit together.
      NotImplementedError: the kernels of this TPU do not support the pages' format or page size,
        or products in INT8; the message names an alternative. Elsewhere as
        `coverage.kernel_target`. Or it is differentiated.
    """
    if places and tiles:
        raise ValueError("places are for the tiles that a call has by itself")
    if len(queries.shape) != 3 or not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ValueError(
            f"queries is {queries.dtype}{queries.shape}, needs floats [tokens, q_heads, head_dim]"
        )
    check_pages("k_pages", k_pages, "k_scales", k_scales)
    if v_pages is not None:
        check_pages("v_pages", v_pages, "v_scales", v_scales)
    check_values(k_pages, v_pages, v_width, v_scales)
    tokens, q_heads, head_dim = queries.shape
    kv_heads = k_pages.shape[1]
    key_width = k_pages.shape[3]
    if rope_pages is not None:
        check_rope(rope_pages, k_pages, v_pages)
        key_width += rope_pages.shape[3]
    if head_dim != key_width:
        raise ValueError(f"queries has head_dim {head_dim}, k_pages has {key_width}")
    if q_heads % kv_heads != 0:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads")
    if int8_products:
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            if pages is not None and pages.dtype != jnp.int8:
                raise ValueError(f"int8_products needs INT8 pages, {name} is {pages.dtype}")
    if window < 0:
        raise ValueError(f"window is {window}, needs at least 0")
    check_tokens(tokens, page_table, sequence_of_token, position)
    width = v_width if v_pages is None else v_pages.shape[3]
    if not places:  # those of `attention_places` are clamped
        position = _inside(position, page_table, k_pages)
    where = reference.Where(page_table, sequence_of_token, position)
    arrays: _Pages = (k_pages, v_pages, k_scales, v_scales, rope_pages)
    cache = _cache(arrays, width, int8_products)
    wanted = jnp.dtype(queries.dtype if out_dtype is None else out_dtype)
    gap = functools.partial(_call_gap, queries=queries, cache=cache, page_table=page_table)
    target = kernel_target("paged_attention", gap, _COST, tiles, backends=WITH_ATTENTION)

    def compute(
        queries: Any, arrays: _Pages, where: reference.Where, places: Places
    ) -> tuple[Array, Array | None]:
        if target is None or target.interpret:
            arrays = in_arrays(arrays)
        cache = _cache(arrays, width, int8_products)
        if isinstance(queries, TwoTerms) and (target is None or joined.joined_rows(cache, target)):
            queries = queries.whole()
        call = reference.PagedCall(queries, cache, where, window, scale, with_lse, wanted, runs)
        out: Array
        sums: Array | None
        if target is None:
            out, sums = reference.paged_attention(call)
        elif rows := joined.joined_rows(cache, target):
            kernel = functools.partial(_kernels(target).paged_attention, target=target, tiles=tiles)
            out, sums = joined.attend(call, rows, kernel)
        else:
            out, sums = _kernels(target).paged_attention(call, target, tiles, places or None)
        return out.astype(wanted), sums

    output, lse = run_op("paged_attention", compute, queries, arrays, where, places)
    return output, lse if with_lse else None


def attention_places(
    queries: _Shaped,
    k_pages: _Shaped,
    v_pages: _Shaped | None,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    window: int = 0,
    v_width: int = 0,
    rope_pages: _Shaped | None = None,
    runs: int = 0,
) -> Places:
    """Computes what `paged_attention` derives from the places of the batch's tokens alone. All
    layers with the same window share the result: compute it once and pass it as `places`.

    Args:
      queries, k_pages, v_pages, rope_pages: shapes and dtypes of the arguments of the calls.
      runs: see `paged_attention`.

    Returns:
      a pytree of arrays for the kernels of the surrounding mesh's devices; () where plain XLA runs.
    """
    width = v_width if v_pages is None else v_pages.shape[3]
    arrays = k_pages, v_pages, None, None, rope_pages
    cache = _cache(arrays, width)
    gap = functools.partial(_call_gap, queries=queries, cache=cache, page_table=page_table)
    target = kernel_target("paged_attention", gap, _COST, backends=WITH_ATTENTION)
    if target is None or joined.joined_rows(cache, target):
        return ()
    position = _inside(position, page_table, k_pages)
    where = reference.Where(page_table, sequence_of_token, position)
    call = reference.PagedCall(queries, cache, where, window, runs=runs)
    return _kernels(target).places_of(call, target)


def chunk_attention(
    queries: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "tokens heads head_dim"],
    values: Float[Array, "tokens heads v_head_dim"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
) -> tuple[Float[Array, "tokens heads v_head_dim"], Float32[Array, "tokens heads"]]:
    """Attend from every token to the batch's tokens of its own sequence up to and including itself.

    No cache is read: this is for layers that do not cache expanded keys and values (latent
    attention). The contribution of earlier tokens comes from `paged_attention` and is added by
    `merge`. Scores are `scale * query . key`; scores and softmax are FP32. Padding tokens give
    zeros and have no effect on others, even if they are NaN. Only TPUs have a kernel; elsewhere
    prompts of latent attention take `paged_attention`, over pages of expanded keys and values.

    Returns:
      the outputs in the dtype of `queries`, and log(sum(exp(scores))) of every token and head, -inf
      for padding tokens.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        if array.ndim != 3 or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {array.dtype}{array.shape}, needs floats [tokens, heads, width]"
            )
    if keys.shape != queries.shape or values.shape[:2] != keys.shape[:2]:
        raise ValueError(
            f"queries {queries.shape}, keys {keys.shape} and values {values.shape} must agree in "
            "tokens and heads, queries and keys in head_dim"
        )
    check_places(queries.shape[0], sequence_of_token, position)
    inputs = (queries, keys, values, sequence_of_token, position)
    target = kernel_target(
        "chunk_attention",
        lambda target: "" if target.backend == "mosaic_tpu" else "prompts of latent attention",
        _CHUNK_COST,
    )

    def compute(inputs: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array]:
        call = reference.ChunkCall(*inputs, scale)
        if target is None:
            return reference.chunk_attention(call)
        return kernels("attention", target, "_chunk").chunk_attention(call, target)

    return run_op("chunk_attention", compute, inputs)


def merge(
    outputs: Sequence[Float[Array, "tokens q_heads v_width"]],
    lses: Sequence[Float32[Array, "tokens q_heads"]],
) -> Float[Array, "tokens q_heads v_width"]:
    """Merge attentions to disjoint sets of positions into the attention to their union.

    Args:
      outputs: the output of each part.
      lses: log(sum(exp(scores))) of each part; where it is -inf, the part's output is ignored.

    Returns:
      rows in the dtype of the first output, zeros where no part saw anything.

    Raises:
      ValueError: the shapes do not fit together.
    """
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"{len(outputs)} outputs and {len(lses)} lses")
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.ndim != 3 or output.shape != outputs[0].shape or lse.shape != output.shape[:2]:
            raise ValueError(
                f"outputs[{index}] has shape {output.shape} and lses[{index}] {lse.shape}, "
                f"outputs[0] has {outputs[0].shape}"
            )
    return reference.merge(outputs, lses)


def _inside(position: Array, page_table: Array, pages: _Shaped) -> Array:
    """Returns the positions, those past the table replaced by its last one."""
    return jnp.minimum(position, page_table.shape[1] * pages.shape[2] - 1)


def _cache(arrays: tuple[Any, ...], width: int, int8_products: bool = False) -> reference.Cache:
    k_pages, v_pages, k_scales, v_scales, rope_pages = arrays
    return reference.Cache(k_pages, v_pages, k_scales, v_scales, width, rope_pages, int8_products)


def _kernels(target: Target) -> ModuleType:
    """Returns the module of a backend. Its `paged_attention` may return log-sum-exps unasked."""
    return kernels("attention", target)


def _call_gap(target: Target, queries: _Shaped, cache: reference.Cache, page_table: Array) -> str:
    """Returns the property of a call that the kernels do not cover, over copies of small pages
    either."""
    rows = joined.joined_rows(cache, target)
    if not rows:
        return kernel_gap(target, queries, cache)
    pages = cache.k_pages
    size = page_table.size * math.prod(pages.shape[2:]) * pages.dtype.itemsize
    if queries.shape[0] > page_table.shape[0] and size > joined.MOST_BYTES:
        return f"pages of {pages.shape[2]} rows, {size} bytes in all that would be copied"
    return kernel_gap(target, queries, joined.larger_pages(cache, rows))


def kernel_gap(target: Target, queries: _Shaped, cache: reference.Cache) -> str:
    """Returns the property of a call that the kernels of a target do not cover."""
    return _kernels(target).gap(queries, cache)
