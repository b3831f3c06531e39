"""From logits to a token, on the device. Called by the `leave` program; knows no requests.

The noise of a draw is a function of the request's seed and the token's position alone, so a
request's tokens depend neither on its neighbours in the batch nor on the layout.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt


class SamplerState(NamedTuple):
    """Sampling parameters, one row a slot."""

    temperature: Float[Array, " slots"]
    """0: greedy."""
    top_k: Int[Array, " slots"]
    """0: off."""
    top_p: Float[Array, " slots"]
    min_p: Float[Array, " slots"]
    seed: UInt[Array, " slots"]
    position: Int[Array, " slots"]
    """Position that the drawn token will have."""


def sample(logits: Float[Array, "slots vocab"], state: SamplerState) -> Int[Array, " slots"]:
    """Greedy where temperature is 0; otherwise a draw from softmax(logits/temperature), cut to the
    top_k most likely, the smallest set that holds top_p of the mass, and at least min_p times the
    likeliest token's probability."""
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = state.temperature > 0

    def draw() -> Array:
        # The largest is 0 before the division: however small the temperature, it stays finite.
        largest = jnp.max(logits, axis=-1, keepdims=True)
        scaled = (logits - largest) / jnp.where(random, state.temperature, 1.0)[:, None]
        threshold = _threshold(scaled, state)
        kept = jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)
        noise = jax.vmap(_gumbel, (0, 0, None))(state.seed, state.position, logits.shape[1])
        return jnp.where(random, jnp.argmax(kept + noise, axis=-1).astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(random), draw, lambda: greedy)


def _gumbel(seed: Array, position: Array, vocab: int) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)


def _threshold(scaled: Float[Array, "slots vocab"], state: SamplerState) -> Float[Array, " slots"]:
    """The smallest scaled logit that may be drawn; the largest of every row is 0."""
    vocab = scaled.shape[1]
    top_k = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, vocab), vocab)
    by_min_p = jnp.where(state.min_p > 0, jnp.log(state.min_p), -jnp.inf)

    def cut() -> Array:
        by_top_k = _largest(scaled, jnp.ones_like(scaled), top_k.astype(jnp.float32))
        inside = jnp.where(scaled >= by_top_k[:, None], jnp.exp(scaled), 0.0)
        by_top_p = _largest(scaled, inside, state.top_p * jnp.sum(inside, axis=-1))
        # Rounded sums can differ from the whole; 1 keeps every token all the same.
        by_top_p = jnp.where(state.top_p < 1.0, by_top_p, -jnp.inf)
        return jnp.maximum(by_top_k, by_top_p)

    active = jnp.any((top_k < vocab) | (state.top_p < 1.0))
    none = jnp.full(scaled.shape[0], -jnp.inf)
    return jnp.maximum(by_min_p, jax.lax.cond(active, cut, lambda: none))


def _largest(
    values: Float[Array, "slots vocab"],
    weights: Float[Array, "slots vocab"],
    enough: Float[Array, " slots"],
) -> Float[Array, " slots"]:
    """The largest t such that the weights of the values >= t sum to `enough`.

    Found bit by bit in the order-preserving integers of the floats: 32 passes over the row instead
    of a sort, which is several times slower on every platform.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)

    def try_bit(step: Array, found: Array) -> Array:
        candidate = found | (sign >> step.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(mass >= enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(values.shape[0], jnp.uint32))
    kept = jnp.where(keys >= found[:, None], values, jnp.inf)
    return jnp.min(kept, axis=-1)
