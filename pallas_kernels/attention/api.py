"""Attention over a paged cache: checks the call, then runs the backend.

Called by the attention layers of a model. Knows nothing of layers or projections.

A batch is flat and ragged: its tokens belong to several sequences, and prefill chunks and single
decode tokens are alike. Token t stands at `position[t]` of sequence `sequence_of_token[t]`, a row
of `page_table`; position p of a sequence lies in row `p % page_size` of its page `p // page_size`.
A padding token has position -1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.attention import reference


def write_pages(
    k_pages: Float[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads v_head_dim"],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> tuple[
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads v_head_dim"],
]:
    """Write every token's key and value into its place in the pages; padding tokens write nothing.

    In place when the caller donates the pages. A token whose sequence, page or position lies
    outside the table or the pool writes nothing either.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
    """
    _check_pages(k_pages, v_pages)
    _check_tokens(keys.shape[0], page_table, sequence_of_token, position)
    for name, rows, pages in (("keys", keys, k_pages), ("values", values, v_pages)):
        expected = (keys.shape[0], *pages.shape[2:])
        if rows.shape != expected:
            raise ValueError(f"{name} has shape {rows.shape}, its pages need {expected}")
        if rows.dtype != pages.dtype:
            raise ValueError(f"{name} is {rows.dtype}, its pages are {pages.dtype}")
    return reference.write_pages(
        k_pages, v_pages, keys, values, page_table, sequence_of_token, position
    )


def paged_attention(
    queries: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_head_dim"],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
) -> Float[Array, "tokens q_heads v_head_dim"]:
    """Attend from every token to the positions 0..position of its own sequence.

    The keys and values of the batch itself are in the pages already (`write_pages`), so that the
    causal mask is all there is between a prefill chunk and a decode token. Query head h reads key
    and value head `h // (q_heads // kv_heads)`. Scores are `scale * query . key`; scores and
    softmax are FP32. Padding tokens give zeros; what lies past a token's position does not matter,
    be it NaN. Page ids outside the pool are clamped into it.

    Returns:
      one row per token and query head, in the dtype of `queries`.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
    """
    _check_pages(k_pages, v_pages)
    if queries.ndim != 3 or not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ValueError(
            f"queries is {queries.dtype}{queries.shape}, needs floats [tokens, q_heads, head_dim]"
        )
    tokens, q_heads, head_dim = queries.shape
    kv_heads = k_pages.shape[2]
    if head_dim != k_pages.shape[3]:
        raise ValueError(f"queries has head_dim {head_dim}, k_pages has {k_pages.shape[3]}")
    if q_heads % kv_heads != 0:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads")
    _check_tokens(tokens, page_table, sequence_of_token, position)
    return reference.paged_attention(
        queries, k_pages, v_pages, page_table, sequence_of_token, position, scale=scale
    )


def _check_pages(k_pages: Array, v_pages: Array) -> None:
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.ndim != 4 or 0 in pages.shape or not jnp.issubdtype(pages.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {pages.dtype}{pages.shape}, "
                "needs floats [pages, page_size, kv_heads, head_dim], none of them 0"
            )
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"k_pages has [pages, page_size, kv_heads] {k_pages.shape[:3]}, "
            f"v_pages has {v_pages.shape[:3]}"
        )


def _check_tokens(
    tokens: int, page_table: Array, sequence_of_token: Array, position: Array
) -> None:
    for name, array, rank in (
        ("page_table", page_table, 2),
        ("sequence_of_token", sequence_of_token, 1),
        ("position", position, 1),
    ):
        if array.dtype != jnp.int32 or array.ndim != rank:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, needs int32 of rank {rank}")
    if 0 in page_table.shape:
        raise ValueError(f"page_table is empty: {page_table.shape}")
    for name, array in (("sequence_of_token", sequence_of_token), ("position", position)):
        if array.shape != (tokens,):
            raise ValueError(f"{name} has {array.shape[0]} entries for {tokens} tokens")
