"""What paged attention means, in plain `jax.numpy`; also what runs where there is no kernel (CPU).

Called by `api.py`, which has checked the arguments, and by the tests of the kernels. Shares no code
with any kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Scalar

GATHERED_BYTES = 8 * 2**20
"""The most memory for the FP32 keys and values that are gathered from the pages at one time."""


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
    """Scatter to row `position % page_size` of page `position // page_size` of the sequence."""
    pages, page_size = k_pages.shape[:2]
    sequences, pages_per_sequence = page_table.shape
    page_of_sequence = position // page_size
    page = page_table.at[sequence_of_token, page_of_sequence].get(mode="clip")
    # Negative indices count from the end in JAX, so that -1 must not reach the scatter.
    exists = (
        (position >= 0)
        & (page_of_sequence < pages_per_sequence)
        & (sequence_of_token >= 0)
        & (sequence_of_token < sequences)
        & (page >= 0)
    )
    page = jnp.where(exists, page, pages)
    row = position % page_size
    return (
        k_pages.at[page, row].set(keys, mode="drop"),
        v_pages.at[page, row].set(values, mode="drop"),
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
    """Gather the pages of every token's sequence and attend, a block of tokens at a time."""
    tokens, q_heads, _ = queries.shape
    page_size, kv_heads = k_pages.shape[1:3]
    grouped = queries.reshape(tokens, kv_heads, q_heads // kv_heads, -1)
    pages_of_token = page_table.at[sequence_of_token].get(mode="clip")

    def attend_one(token: tuple[Array, Array, Array]) -> Array:
        query, pages, last = token
        return _attend_one(query, k_pages, v_pages, pages, last, scale)

    context = page_table.shape[1] * page_size
    bytes_a_token = context * kv_heads * (k_pages.shape[3] + v_pages.shape[3]) * 4
    block = max(1, GATHERED_BYTES // bytes_a_token)
    if tokens <= block:
        output = jax.vmap(attend_one)((grouped, pages_of_token, position))
    else:
        output = jax.lax.map(attend_one, (grouped, pages_of_token, position), batch_size=block)
    return output.reshape(tokens, q_heads, -1)


def _attend_one(
    query: Float[Array, "kv_heads group head_dim"],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads v_head_dim"],
    pages: Int32[Array, " pages_per_sequence"],
    last: Int32[Scalar, ""],
    scale: float,
) -> Float[Array, "kv_heads group v_head_dim"]:
    """Attend from one token to the positions 0..last of the sequence that has these pages."""
    kv_heads = query.shape[0]
    keys = k_pages.at[pages].get(mode="clip").reshape(-1, kv_heads, k_pages.shape[3])
    values = v_pages.at[pages].get(mode="clip").reshape(-1, kv_heads, v_pages.shape[3])
    # [kv_heads, context, head_dim]: heads first, and FP32, are what CPUs multiply fastest.
    keys = jnp.swapaxes(keys, 0, 1).astype(jnp.float32)
    values = jnp.swapaxes(values, 0, 1).astype(jnp.float32)

    visible = jnp.arange(keys.shape[1], dtype=jnp.int32) <= last
    # A probability of 0 does not hide a row that holds NaN: 0 * NaN is NaN.
    values = jnp.where(visible[:, None], values, 0.0)

    highest = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum("kgd,kcd->kgc", query.astype(jnp.float32), keys, precision=highest)
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    # A padding token sees nothing: its largest score is -inf and its total 0.
    weights = jnp.exp(scores - jnp.where(last < 0, 0.0, largest))
    total = jnp.where(last < 0, 1.0, jnp.sum(weights, axis=-1, keepdims=True))
    output = jnp.einsum("kgc,kcd->kgd", weights, values, precision=highest) / total
    return output.astype(query.dtype)
