"""From logits to a token, on the device. Called by the programs; knows nothing of requests.

The randomness of a draw depends only on the request's seed and the token's position, so a request's
tokens depend neither on its neighbours in the batch nor on the layout.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt


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


class Rules(NamedTuple):
    """Penalties, biases and masks applied to the logits before a draw, one row per slot; see
    `adjust`."""

    repetition: Float[Array, " slots"]
    """1: off."""
    presence: Float[Array, " slots"]
    frequency: Float[Array, " slots"]
    prompt_length: Int[Array, " slots"]
    """Tokens at this position or later count as generated; `MAX` in slots that count none."""
    fresh: Int[Array, " slots"]
    """Nonzero: the slot holds a new sequence, whose counts start at this step."""
    masked: Int[Array, " slots"]
    """Nonzero: only tokens in `allowed` may be drawn."""
    token_ids: Int[Array, "slots biases"]
    """Tokens whose logits `biases` are added to; ids beyond the vocabulary are padding."""
    biases: Float[Array, "slots biases"]
    allowed: Int[Array, "slots words"]
    """Bitmask: bit t % 32 of word t // 32 stands for token t."""
    prompt: Int[Array, "slots words"]
    """Bitmask of the prompt's tokens, for a fresh slot with a repetition penalty."""


MAX = jnp.iinfo(jnp.int32).max

_PROMPT = 1 << 24
"""Flag in a token's count that marks it as part of the prompt; the bits below count how often the
token was generated."""


def count(
    counts: Int[Array, "slots vocab"],
    rules: Rules,
    token_ids: Int[Array, " tokens"],
    slot: Int[Array, " tokens"],
    position: Int[Array, " tokens"],
) -> Int[Array, "slots vocab"]:
    """Updates each slot's token counts with the tokens that a step feeds.

    A token is counted when it is fed, not when it is drawn. The host need not know it yet, and a
    preempted sequence that is fed again from the start is counted anew.

    Args:
      counts: [slots, vocab]; returned unchanged where no slot counts.
      token_ids, slot, position: of the step's tokens; position -1 is padding.
    """
    counting = rules.prompt_length < MAX

    def add() -> Array:
        vocab = counts.shape[1]
        seen = _bits(rules.prompt, vocab).astype(jnp.int32) * _PROMPT
        kept = jnp.where(rules.fresh[:, None] > 0, seen, counts)
        generated = (position >= rules.prompt_length[slot]) & counting[slot]
        return kept.at[slot, token_ids].add(generated.astype(jnp.int32), mode="drop")

    return jax.lax.cond(jnp.any(counting), add, lambda: counts)


def adjust(
    logits: Float[Array, "slots vocab"], counts: Int[Array, "slots vocab"], rules: Rules
) -> Float[Array, "slots vocab"]:
    """Logits after penalties, then biases, then the mask; FP32.

    Repetition divides the positive logits of all tokens seen, in the prompt or generated, and
    multiplies the negative ones (Keskar et al., 2019, §4.1). Presence is subtracted once from a
    token that was generated, frequency for every time that it was.
    """
    logits, vocab = logits.astype(jnp.float32), logits.shape[1]

    def penalise() -> Array:
        times = (counts & (_PROMPT - 1)).astype(jnp.float32)
        repetition = rules.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        penalised = jnp.where(counts > 0, repeated, logits)
        once = jnp.minimum(times, 1.0)
        return penalised - rules.presence[:, None] * once - rules.frequency[:, None] * times

    def shift() -> Array:
        slot = jnp.arange(logits.shape[0])[:, None]
        return logits.at[slot, rules.token_ids].add(rules.biases, mode="drop")

    def mask() -> Array:
        forbidden = (rules.masked[:, None] > 0) & ~_bits(rules.allowed, vocab)
        return jnp.where(forbidden, -jnp.inf, logits)

    logits = jax.lax.cond(jnp.any(rules.prompt_length < MAX), penalise, lambda: logits)
    logits = jax.lax.cond(jnp.any(rules.token_ids < vocab), shift, lambda: logits)
    return jax.lax.cond(jnp.any(rules.masked > 0), mask, lambda: logits)


def _bits(words: Int[Array, "slots words"], vocab: int) -> Bool[Array, "slots vocab"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] > 0


def log_probabilities(
    logits: Float[Array, "rows vocab"], token_ids: Int[Array, " rows"], top: int
) -> tuple[Float[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]]:
    """Log-probabilities of the given tokens, and the `top` likeliest tokens with theirs."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    best, ids = jax.lax.top_k(logs, top)
    return jnp.take_along_axis(logs, token_ids[:, None], axis=1)[:, 0], ids, best


def sample(logits: Float[Array, "slots vocab"], state: SamplerState) -> Int[Array, " slots"]:
    """Greedy where temperature is 0; otherwise a draw from softmax(logits/temperature), cut to the
    top_k most likely, the smallest set that holds top_p of the mass, and at least min_p times the
    likeliest token's probability."""
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = state.temperature > 0

    def draw() -> Array:
        # Gumbel-max: argmax(logits + Gumbel noise) is a draw from softmax(logits). Subtracting the
        # largest logit first keeps the division finite for any temperature.
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
    """The smallest scaled logit that may be drawn; expects rows whose largest logit is 0."""
    vocab = scaled.shape[1]
    top_k = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, vocab), vocab)
    by_min_p = jnp.where(state.min_p > 0, jnp.log(state.min_p), -jnp.inf)

    def cut() -> Array:
        by_top_k = _largest(scaled, jnp.ones_like(scaled), top_k.astype(jnp.float32))
        inside = jnp.where(scaled >= by_top_k[:, None], jnp.exp(scaled), 0.0)
        by_top_p = _largest(scaled, inside, state.top_p * jnp.sum(inside, axis=-1))
        # The rounded sum may fall short of the total mass; top_p = 1 must keep every token.
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
    """The largest threshold t such that the weights of all values >= t sum to at least `enough`.

    Binary search over the order-preserving integer encoding of the floats: 32 passes over the row
    instead of a sort, which is several times slower on every platform.
    """
    # As unsigned integers, floats sort like their values once negative ones have all bits flipped
    # and the others the sign bit.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)

    # From the highest bit down, keep a bit if the values at or above the candidate suffice.
    def try_bit(step: Array, found: Array) -> Array:
        candidate = found | (sign >> step.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(mass >= enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(values.shape[0], jnp.uint32))
    kept = jnp.where(keys >= found[:, None], values, jnp.inf)
    return jnp.min(kept, axis=-1)
