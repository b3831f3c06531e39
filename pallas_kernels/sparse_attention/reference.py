"""Definition of the ops in plain `jax.numpy`; runs on every device, as none has a kernel.

Called by `api.py`, which has checked the arguments. A few tokens are taken at a time, so that
memory does not grow with the batch. By count, with DeepSeek-V3.2's sizes in BF16 and a context of
32,768, a prefill chunk of 1,024 tokens holds beside the caller's arrays:

    choice      of QUERIES tokens the scores, 2.1 MB, and of BLOCK_TOKENS positions the keys, 8.4 MB
                (0.5 MB if one sequence has all these tokens), and the scores of heads, 8.4 MB
    chosen      positions of all tokens, 8.4 MB
    attention   of 14 tokens the rows, 33 MB (GATHERED_BYTES), the values without unseen rows, 29
                MB, and scores and weights, 15 MB each

At most 115 MB at a time, where all chosen rows would be 2.4 GB.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.attention.reference import Cache, in_parts
from pallas_kernels.quantize.bits import as_bits, from_bits
from pallas_kernels.target import current_target
from pallas_kernels.varying import vary_like

QUERIES = 16
"""Tokens whose index scores are computed at a time."""

BLOCK_TOKENS = 2048
"""Positions of a context whose keys are read at a time."""

GATHERED_BYTES = 32 * 2**20
"""Most bytes of chosen rows that are copied at a time."""


class ChoiceCall(NamedTuple):
    """Arrays of a call of `api.choose_positions` that has been checked."""

    queries: Float[Array, "tokens index_heads index_dim"]
    weights: Float32[Array, "tokens index_heads"]
    key_pages: Num[Array, "pages 1 page_size index_dim"]
    key_scales: Float32[Array, "pages 1 page_size"] | None
    page_table: Int32[Array, "sequences pages_per_sequence"]
    sequence_of_token: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]


def choose_positions(call: ChoiceCall, top_k: int) -> Int32[Array, "tokens chosen"]:
    """Scores every position of the tables up to a token's own, and takes the best."""
    page_size = call.key_pages.shape[2]
    context = call.page_table.shape[1] * page_size
    block = min(-(-BLOCK_TOKENS // page_size) * page_size, context)
    blocks = -(-context // block)
    row = jnp.arange(block, dtype=jnp.int32) % page_size

    def choose(some: tuple[Array, ...]) -> Array:
        queries, weights, sequence, position = some
        own = call.page_table.at[sequence].get(mode="clip")

        def step(index: Array, scores: Array) -> Array:
            place = index * block + jnp.arange(block, dtype=jnp.int32)
            pages = own.at[:, place // page_size].get(mode="clip")

            def score(product: str, page: Array) -> Array:
                found = _product(product, queries, _rows(call.key_pages, page, row))
                found = jnp.einsum(
                    "thc,th->tc", jax.nn.relu(found), weights, precision=jax.lax.Precision.HIGHEST
                )
                if call.key_scales is not None:
                    found *= _rows(call.key_scales, page, row)
                return found

            alone = jnp.all(sequence == sequence[0])
            found = jax.lax.cond(
                alone,
                lambda: score("thd,cd->thc", pages[0]),  # all tokens are of one sequence
                lambda: score("thd,tcd->thc", pages),
            )
            start = jnp.zeros_like(index), index * block
            return jax.lax.dynamic_update_slice(scores, found, start)

        blank = jnp.zeros((len(position), blocks * block), jnp.float32)
        scores = vary_like(blank, (*some, *jax.tree.leaves(call)))
        last = jnp.minimum(jnp.max(position) // block + 1, blocks)
        scores = jax.lax.fori_loop(0, last, step, scores)[:, :context]
        return best_positions(scores, position, top_k)

    tokens = call.queries, call.weights, call.sequence_of_token, call.position
    return in_parts(choose, tokens, QUERIES)


def best_positions(
    scores: Float32[Array, "tokens context"], position: Int32[Array, " tokens"], top_k: int
) -> Int32[Array, "tokens chosen"]:
    """Takes the best of the positions up to a token's own; scores behind it may be anything."""
    context = scores.shape[1]
    seen = jnp.arange(context) <= position[:, None]
    # `top_k` puts -0 behind 0, and takes the lowest index of equal numbers.
    scores = jnp.where(seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    best, index = jax.lax.top_k(scores, min(top_k, context))
    # In increasing order, with -1 behind the last one.
    index = jnp.sort(jnp.where(jnp.isneginf(best), context, index.astype(jnp.int32)), axis=1)
    return jnp.where(index == context, -1, index)


class Chosen(NamedTuple):
    """The positions that tokens attend to, and where these are."""

    chosen: Int32[Array, "tokens chosen"]
    page_table: Int32[Array, "sequences pages_per_sequence"]
    sequence_of_token: Int32[Array, " tokens"]


def attend_chosen(
    queries: Float[Array, "tokens q_heads head_dim"],
    cache: Cache,
    where: Chosen,
    scale: float,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Copies the chosen rows of some tokens and attends to them; also returns log-sum-exps."""
    page_size, width = cache.k_pages.shape[2:]
    size = where.chosen.shape[1] * queries.shape[2] * _operand(queries).itemsize

    def attend(some: tuple[Array, ...]) -> tuple[Array, Array]:
        queries, chosen, sequence = some
        own, place = where.page_table.at[sequence].get(mode="clip"), jnp.maximum(chosen, 0)
        page = jnp.take_along_axis(own, place // page_size, axis=1, mode="clip")
        rows = functools.partial(_rows, page=page, row=place % page_size)
        keys = rows(cache.k_pages)
        scales = 1.0 if cache.k_scales is None else rows(cache.k_scales)[:, None]
        scores = _product("thd,tcd->thc", queries[..., :width], keys) * scales
        if cache.rope_pages is not None:
            scores += _product("thd,tcd->thc", queries[..., width:], rows(cache.rope_pages))
        there = (chosen >= 0)[:, None]  # [tokens, 1, chosen]
        scores = jnp.where(there, scale * scores, -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        lse = (largest + jnp.log(total))[..., 0]
        weights = weights / jnp.where(total == 0, 1.0, total) * jnp.where(there, scales, 0.0)
        # A probability of 0 does not hide a row that holds NaN: 0 * NaN is NaN.
        values = jnp.where(there[:, 0, :, None], keys[..., : cache.v_width], 0)
        mixed = _product("thc,tcd->thd", weights.astype(queries.dtype), values)
        return mixed.astype(queries.dtype), lse

    tokens = queries, where.chosen, where.sequence_of_token
    return in_parts(attend, tokens, max(1, GATHERED_BYTES // size))


def _rows(
    pages: Num[Array, "pages 1 page_size *width"],
    page: Int32[Array, "*places"],
    row: Int32[Array, "*some_places"],
) -> Num[Array, "*places_and_width"]:
    """Returns rows of pages; FP8 values for their bits."""
    flat = as_bits(pages).reshape(pages.shape[0], *pages.shape[2:])
    return from_bits(flat.at[page, row].get(mode="clip", wrap_negative_indices=False))


def _operand(queries: Array) -> jnp.dtype:
    """Returns the dtype in which rows are multiplied by queries; CPUs multiply FP32 fastest."""
    return jnp.dtype(jnp.float32 if current_target().device_kind == "cpu" else queries.dtype)


def _product(product: str, left: Array, right: Array) -> Float32[Array, "..."]:
    """Returns products with FP32 sums, of a token with every row; `left` has the queries' dtype."""
    dtype = _operand(left)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        product,
        left.astype(dtype),
        right.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
