"""Attention of a batch's tokens to each other, without a cache: prefill chunks side by side.

Called by attention layers whose cache does not hold keys and values as they multiply them (latent
attention). What a sequence's earlier tokens add comes from `paged_attention` and `merge`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

QUERY_ROWS = 128
"""Queries whose scores are there at one time."""


def chunk_attention(
    queries: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "tokens heads head_dim"],
    values: Float[Array, "tokens heads v_head_dim"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    scale: float,
) -> tuple[Float[Array, "tokens heads v_head_dim"], Float32[Array, "tokens heads"]]:
    """Attend from every token to those of its own sequence that do not come after it.

    Scores and softmax are FP32. Padding tokens, at position -1, are seen by none and see nothing.

    Returns:
      the outputs in the dtype of `queries`, and the logarithm of the sum of the exponentials of
      each row of scores, -inf for padding tokens.

    Raises:
      ValueError: the shapes do not fit together.
    """
    tokens = queries.shape[0]
    if keys.shape != queries.shape or values.shape[:2] != keys.shape[:2]:
        raise ValueError(
            f"queries {queries.shape}, keys {keys.shape} and values {values.shape} must agree in "
            "tokens and heads, queries and keys in head_dim"
        )
    for name, array in (("sequence_of_token", sequence_of_token), ("position", position)):
        if array.shape != (tokens,):
            raise ValueError(f"{name} has shape {array.shape} for {tokens} tokens")
    # Heads first is what CPUs multiply fastest.
    keys = jnp.swapaxes(keys, 0, 1).astype(jnp.float32)
    values = jnp.swapaxes(values, 0, 1).astype(jnp.float32)

    def attend(query: Array, sequence: Array, own: Array) -> tuple[Array, Array]:
        visible = (position >= 0) & (position <= own) & (sequence_of_token == sequence)
        return _attend_one(query, keys, values, visible, scale)

    def rows(piece: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        return attend(*piece)

    everything = (queries, sequence_of_token, position)
    if tokens <= QUERY_ROWS:
        out, lse = jax.vmap(attend)(*everything)
    else:
        out, lse = jax.lax.map(rows, everything, batch_size=QUERY_ROWS)
    return out.astype(queries.dtype), lse


def _attend_one(
    query: Float[Array, "heads head_dim"],
    keys: Float[Array, "heads tokens head_dim"],
    values: Float[Array, "heads tokens v_head_dim"],
    visible: Bool[Array, " tokens"],
    scale: float,
) -> tuple[Float[Array, "heads v_head_dim"], Float[Array, " heads"]]:
    """Attend from one token."""
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("hd,htd->ht", query.astype(jnp.float32), keys, precision=highest) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0.0, largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # A probability of 0 does not hide a row that holds NaN: 0 * NaN is NaN.
    safe = jnp.where(visible[:, None], values, 0.0)
    out = jnp.einsum("ht,htv->hv", weights, safe, precision=highest)
    return out / jnp.where(total == 0, 1.0, total), (largest + jnp.log(total))[:, 0]
