"""Attention of prompts to cached latents: keys and values of every head are expanded from them,
block by block, in pages that `paged_attention` takes.

Called by layers of latent attention. Knows of their projections only the matrices that expand.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels.attention.api import merge, paged_attention
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize.bits import from_bits
from pallas_kernels.target import by_platform

EXPANDED_POSITIONS = 4096
"""Most positions of a sequence whose keys and values are expanded at a time."""

EXPANDED_PAGE = 128
"""Positions of a page of expanded keys and values: what plain XLA attends to at a time, and a
multiple of what the kernels of GPUs do."""


def attend_expanded(
    query: Float[Array, "tokens q_heads width"],
    pages: tuple[Array, ...],
    up: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    absorbed: Callable[[Array], tuple[Array, Array]],
    scale: float,
    least: float,
) -> Float[Array, "tokens q_heads v_width"]:
    """Attends from every token to positions 0..position of its own sequence.

    Sequences with at least `least` tokens in the batch, which stand together, attend to expanded
    keys and values, a block of cached positions at a time. All other tokens attend absorbed.

    Args:
      query: its last columns are rotated.
      pages: latents with the rotated key behind them, or latents and rotated keys; in 8 bits then
        the latents' scales. All as in `paged_attention`.
      up: matrices that make keys and values of a latent, [q_heads, width, latent] each.
      where: page table, and sequence and position of each token.
      absorbed: attends, absorbed, to cached tokens up to these positions.
    """
    table, sequence, position = where
    own = (sequence == jnp.arange(len(table), dtype=jnp.int32)[:, None]) & (position >= 0)
    expanded = jnp.sum(own, axis=1) >= least  # [sequences]
    long = expanded[sequence] & (position >= 0)
    length = jnp.max(jnp.where(own & expanded[:, None], position + 1, 0), axis=1)
    page_size = pages[0].shape[2]
    unit = math.lcm(page_size, EXPANDED_PAGE)
    # With no more positions than tokens, keys and values take no more than queries do.
    size = max(1, min(len(query), EXPANDED_POSITIONS) // unit) * unit
    columns = size // page_size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % columns)))
    blocks = (length + size - 1) // size
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    of_block = jnp.arange(size // EXPANDED_PAGE, dtype=jnp.int32)[None]

    def attend(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        slot = jnp.sum(ends <= index, dtype=jnp.int32)
        block = index - ends[slot] + blocks[slot]
        own_pages = jax.lax.dynamic_slice_in_dim(table[slot], block * columns, columns)
        keys, values = _expand(pages, own_pages, up, query)
        seen = jnp.clip(position - block * size, -1, size - 1)
        seen = jnp.where(long & (sequence == slot), seen, -1)
        places = of_block, jnp.zeros_like(sequence), seen
        # Tokens behind the block are at its last position: a run of their own.
        options: Any = {"scale": scale, "with_lse": True, "runs": 2}
        mixed, lse = paged_attention(query, keys, values, *places, **options)
        assert lse is not None
        return merge((state[0], mixed), (state[1], lse)), jnp.logaddexp(state[1], lse)

    shape = *query.shape[:2], up[1].shape[1]
    start = jnp.zeros(shape, jnp.float32), jnp.full(shape[:2], -jnp.inf, jnp.float32)
    mixed, _ = jax.lax.fori_loop(0, ends[-1], attend, start)
    mixed = mixed.astype(query.dtype)
    short = (position >= 0) & ~long

    def others() -> Array:
        rows, _ = absorbed(jnp.where(short, position, -1))
        return jnp.where(short[:, None, None], rows, mixed)

    heads: Array = jax.lax.cond(jnp.any(short), others, lambda: mixed)
    return heads


def _expand(
    pages: tuple[Num[Array, "..."], ...],
    columns: Int32[Array, " columns"],
    up: tuple[Array, Array],
    query: Float[Array, "tokens q_heads width"],
) -> tuple[Float[Array, "pages q_heads rows width"], Float[Array, "pages q_heads rows v_width"]]:
    """Makes keys and values of every head from the latents in these pages, in pages of
    `EXPANDED_PAGE` positions and in the dtype of the queries."""
    (_, nope, latent_width), dtype = up[0].shape, query.dtype
    rotated = query.shape[2] - nope

    def rows(array: Array) -> Array:
        found = array.at[columns].get(mode="clip", wrap_negative_indices=False)
        return from_bits(found).reshape(-1, EXPANDED_PAGE, *array.shape[3:])

    latent, *others = map(rows, pages)
    if others:
        latent = latent.astype(jnp.float32) * others[-1][..., None]
    latent, key = jnp.split(latent, [latent_width], axis=-1)
    key = others[0] if len(others) > 1 else key[..., :rotated]
    latent, key = latent.astype(dtype), key.astype(dtype)[:, None]
    keys, values = (product("prc,hnc->phrn", latent, matrix) for matrix in up)
    shared = jnp.broadcast_to(key, (*keys.shape[:3], rotated))
    return jnp.concatenate([keys, shared], axis=-1), values


def of_heads(products: str, x: Array, w: Array | InputMajor) -> Array:
    """`product` of an array with the matrices [h, n, c] of all heads."""
    if not isinstance(w, InputMajor):
        return product(products, x, w)
    tiles = w.values  # [h, i, c, w]: row i · 128 + w of a head
    if w.entry is not None:
        tiles = jax.lax.dynamic_index_in_dim(tiles, w.entry, keepdims=False)
    left, _, result = products.replace("n", "iw").replace(",", "->").split("->")
    if left == "thiw":
        x = x.reshape(*x.shape[:2], tiles.shape[1], -1)
    found = product(f"{left},hicw->{result}", x, tiles)
    return found.reshape(*found.shape[:2], -1)


def product(products: str, x: Array, w: Array) -> Array:
    """A product of heads with FP32 accumulation, in x's dtype."""

    def on_cpu(x: Array, w: Array) -> Array:
        # XLA's CPU backend has no batched BF16 product; FP32 operands give the same numbers.
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum(products, x.astype(jnp.float32), w.astype(jnp.float32), precision=highest)

    def elsewhere(x: Array, w: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.einsum(products, x, w, precision=precision, preferred_element_type=jnp.float32)

    return by_platform(x, w, cpu=on_cpu, default=elsewhere).astype(x.dtype)
