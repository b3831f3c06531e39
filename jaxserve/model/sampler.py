"""From logits to a token, on the device. Called by the programs; knows nothing of requests.

The randomness of a draw depends only on the request's seed and the token's position, so a request's
tokens depend neither on its neighbours in the batch nor on the layout.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxserve.model.module import all_columns
from pallas_kernels.target import by_platform


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


class LogitRules(NamedTuple):
    """Penalties, biases and masks for the logits of a draw, one row per slot; see `adjust`."""

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
    """Tokens whose logits `biases` are added to, each at most once a slot; ids beyond the
    vocabulary are padding."""
    biases: Float[Array, "slots biases"]
    allowed: Int[Array, "slots words"]
    """Bitmask: bit t % 32 of word t // 32 stands for token t."""
    prompt: Int[Array, "slots words"]
    """Bitmask of the prompt's tokens, for a fresh slot with a repetition penalty."""


MAX = jnp.iinfo(jnp.int32).max

_BLOCK = 128
_SHORT = 16
_MANY = 16
_CANDIDATES = 64

_PROMPT = 1 << 24
"""Flag in a token's count that marks it as part of the prompt; the bits below count how often the
token was generated."""


def over_rows[Carry](
    chosen: Bool[Array, " rows"],
    work: Callable[[Array, Bool[Array, " window"], Carry], Carry],
    carry: Carry,
) -> Carry:
    """Works on some rows of arrays, at a cost that depends on their number.

    CPUs take them one by one, since work of a row stays in a core's caches. Accelerators, which a
    row does not fill, take windows of `_MANY` rows and skip empty ones.

    Args:
      work: (first row of a window, its rows to work on, carry) → carry. Each chosen row is one to
        work on in exactly one window, so that `work` may change arrays of the carry in place.
    """
    rows = chosen.shape[0]
    size = min(_MANY, rows)

    def in_windows(carry: Carry) -> Carry:
        def window(index: Array, carry: Carry) -> Carry:
            start = jnp.minimum(index * size, rows - size)
            new = start + jnp.arange(size) >= index * size
            mine = jax.lax.dynamic_slice_in_dim(chosen, start, size) & new
            return jax.lax.cond(jnp.any(mine), lambda: work(start, mine, carry), lambda: carry)

        return jax.lax.fori_loop(0, -(-rows // size), window, carry)

    def one_by_one(carry: Carry) -> Carry:
        first, mine = jnp.argsort(~chosen, stable=True), jnp.ones(1, bool)
        count = jnp.sum(chosen, dtype=jnp.int32)
        return jax.lax.fori_loop(0, count, lambda i, carry: work(first[i], mine, carry), carry)

    return by_platform(carry, cpu=one_by_one, default=in_windows)


def replace_rows(array: Array, start: Array, mine: Bool[Array, " window"], rows: Array) -> Array:
    """Returns the array with `rows` from its row `start` on, where they are `mine`."""
    old = jax.lax.dynamic_slice_in_dim(array, start, mine.size)
    kept = jnp.where(mine.reshape(-1, *[1] * (old.ndim - 1)), rows, old)
    return jax.lax.dynamic_update_slice_in_dim(array, kept, start, 0)


def count(
    counts: Int[Array, "slots vocab"],
    rules: LogitRules,
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
        def begin(start: Array, mine: Array, counts: Array) -> Array:
            prompt = jax.lax.dynamic_slice_in_dim(rules.prompt, start, mine.size)
            seen = _bits(prompt, counts.shape[1]).astype(jnp.int32) * _PROMPT
            return replace_rows(counts, start, mine, seen)

        kept = over_rows(rules.fresh > 0, begin, counts)
        generated = (position >= rules.prompt_length[slot]) & counting[slot]
        return kept.at[slot, token_ids].add(generated.astype(jnp.int32), mode="drop")

    return jax.lax.cond(jnp.any(counting), add, lambda: counts)


def adjust(
    logits: Float[Array, "slots vocab"], counts: Int[Array, "slots vocab"], rules: LogitRules
) -> Float[Array, "slots vocab"]:
    """Returns the FP32 logits after penalties, then biases, then the mask.

    Repetition divides the positive logits of all tokens seen, in the prompt or generated, and
    multiplies the negative ones (Keskar et al., 2019, §4.1). Presence is subtracted once from the
    logit of a generated token, frequency for every time that it was generated.
    """
    logits, vocab = logits.astype(jnp.float32), logits.shape[1]

    def penalise(logits: Array) -> Array:
        times = (counts & (_PROMPT - 1)).astype(jnp.float32)
        repetition = rules.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        penalised = jnp.where(counts > 0, repeated, logits)
        once = jnp.minimum(times, 1.0)
        return penalised - rules.presence[:, None] * once - rules.frequency[:, None] * times

    def shift(logits: Array) -> Array:
        slot, ids = jnp.arange(logits.shape[0])[:, None], rules.token_ids
        ids = jnp.where(ids < vocab, ids, vocab + jnp.arange(ids.shape[1]))
        # Unless told that indices differ, TPUs sort them, which takes most of the compile time.
        return logits.at[slot, ids].add(rules.biases, mode="drop", unique_indices=True)

    def mask(logits: Array) -> Array:
        forbidden = (rules.masked[:, None] > 0) & ~_bits(rules.allowed, vocab)
        return jnp.where(forbidden, -jnp.inf, logits)

    # No bias is +inf, so that masked logits stay excluded. CPUs need no condition: they adjust few
    # rows at once, and a branch would copy these.
    wanted = rules.prompt_length < MAX, rules.masked > 0, rules.token_ids < vocab
    for some, change in zip(wanted, (penalise, mask, shift), strict=True):
        branch = functools.partial(jax.lax.cond, jnp.any(some), change, lambda own: own)
        logits = by_platform(logits, cpu=change, default=branch)
    return logits


def _bits(words: Int[Array, "slots words"], vocab: int) -> Bool[Array, "slots vocab"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] > 0


def log_probabilities(
    logits: Float[Array, "rows vocab"],
    token_ids: Int[Array, " rows"],
    top: int,
    wanted: Int[Array, "rows wanted"] | None = None,
) -> tuple[Float[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]]:
    """Log-probabilities of the given tokens, and the `top` likeliest tokens with theirs; in the
    places where `wanted` is not negative, that token instead. A row's depend on no other row, to
    the bit."""
    blocks = in_blocks(logits)
    best, ids = top_of_blocks(blocks, top)
    largest = best[:, :1]
    total = _total(jnp.exp(blocks - largest[:, :, None]))[:, None]
    if wanted is not None:
        ids = jnp.where(wanted[:, :top] >= 0, wanted[:, :top], ids)
        best = jnp.take_along_axis(logits, ids, axis=1).astype(jnp.float32)
    own = jnp.take_along_axis(logits, token_ids[:, None], axis=1).astype(jnp.float32)
    return (own - largest - jnp.log(total))[:, 0], ids, best - largest - jnp.log(total)


def _maxima(blocks: Float[Array, "rows blocks 128"]) -> Float[Array, "rows blocks"]:
    return jnp.max(_apart(jnp.max(blocks.reshape(*blocks.shape[:2], -1, _SHORT), axis=2)), axis=2)


def top_of_blocks(
    blocks: Float[Array, "rows blocks 128"], count: int
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """The `count` largest logits of each row, descending, and their token ids; of equal ones the
    first ids. On CPUs they are looked for in the blocks with the `count` largest maxima, and in
    these likewise by shorter blocks: all other logits are read once and not sorted."""

    def of_all(blocks: Array) -> Any:
        return tuple(jax.lax.top_k(blocks.reshape(len(blocks), -1), count))

    def of_few(blocks: Array) -> Any:
        rows, number, width = blocks.shape
        if number <= count:
            shorter = blocks.reshape(rows, -1, _SHORT)
            return of_few(shorter) if width > _SHORT else of_all(blocks)
        chosen = jnp.sort(jax.lax.top_k(_maxima(blocks), count)[1], axis=1)
        best, place = of_few(jnp.take_along_axis(blocks, chosen[:, :, None], axis=1))
        block = jnp.take_along_axis(chosen, place // width, axis=1)
        return best, block * width + place % width

    return by_platform(blocks, cpu=of_few, default=of_all)


def sample_and_largest(
    logits: Float[Array, "slots columns"], state: SamplerState, vocab: int
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """Samples a token for every slot, and finds its largest logit on the way (NaN if one is).

    Greedy where temperature is 0. Otherwise a draw from softmax(logits/temperature), cut to the
    top_k most likely, the smallest set that holds top_p of the mass, and at least min_p times the
    likeliest token's probability.

    Slots without a temperature cost no draw (`over_rows`).

    Args:
      logits: all columns, or this device's share of columns divided over `tp`; -inf beyond the
        vocabulary. Greedy slots do not need the columns of other devices.
    """
    columns, logits = logits.shape[1], logits.astype(jnp.float32)
    greedy, largest = _greedy(in_blocks(logits), columns)
    if columns < vocab:
        greedy, largest = _greedy_of_all(greedy, largest, columns)
    random = state.temperature > 0

    def drawn() -> Array:
        every = all_columns(logits, vocab)
        fold = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))
        arrays = every, _noise(fold(state.seed, state.position), vocab), largest, *state

        def of(start: Array, size: int) -> tuple[Array, Array, Array, SamplerState]:
            cut = [jax.lax.dynamic_slice_in_dim(array, start, size) for array in arrays]
            return in_blocks(cut[0]), cut[1], cut[2], SamplerState(*cut[3:])

        def window(start: Array, mine: Array, tokens: Array) -> Array:
            blocks, noise, best, own = of(start, mine.size)
            return replace_rows(tokens, start, mine, _draw(process(blocks, best, own), noise))

        def of_few(start: Array, mine: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            """Draws from the blocks of a row with the largest maxima, which have all that a small
            top_k keeps, unless another block's maximum equals its last logit."""
            blocks, noise, best, own = of(start, 1)
            largest = jax.lax.top_k(_maxima(blocks)[0], _CANDIDATES + 1)
            # Slices of the results would hide from XLA:CPU that they need no sort of all maxima.
            maxima, chosen = jax.lax.optimization_barrier(largest)
            chosen = jnp.sort(chosen[:-1])
            columns = jnp.concatenate([jnp.arange(_BLOCK), _BLOCK + chosen])
            token = _draw(process(blocks[:, chosen], best, own), noise[:, columns])
            token = chosen[token // _BLOCK] * _BLOCK + token % _BLOCK
            again = maxima[own.top_k - 1] <= maxima[-1]
            tokens, left = found
            return replace_rows(tokens, start, mine, token), replace_rows(left, start, mine, again)

        def few_first() -> Array:
            few = random & (state.top_k > 0) & (state.top_k <= _CANDIDATES)
            tokens, left = over_rows(few, of_few, (greedy, random))
            return over_rows(left, window, tokens)

        everywhere = functools.partial(over_rows, random, window, greedy)
        many = -(-vocab // _BLOCK) > _CANDIDATES
        return by_platform(cpu=few_first if many else everywhere, default=everywhere)

    return jax.lax.cond(jnp.any(random), drawn, lambda: greedy), largest


def in_blocks(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks 128"]:
    """Converts logits to FP32 and cuts each row into blocks; -inf fills the last one.

    Sums along the blocks add whole vectors, on every platform, in an order that depends on the
    vocabulary alone.
    """
    logits = logits.astype(jnp.float32)
    rows, vocab = logits.shape
    if missing := -vocab % _BLOCK:
        logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits.reshape(rows, -1, _BLOCK)


def _greedy(
    blocks: Float[Array, "rows blocks 128"], vocab: int
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Returns the first token with the largest logit (vocab - 1 if one is NaN), and that logit."""
    at_once = functools.partial(_greedy_at_once, vocab=vocab)
    by_blocks = functools.partial(_greedy_by_blocks, vocab=vocab)
    return by_platform(blocks, cpu=by_blocks, default=at_once)


def _greedy_of_all(
    own: Int[Array, " rows"], largest: Float[Array, " rows"], columns: int
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Combines each device's `_greedy` of its own columns into that of all columns."""
    first = jax.lax.axis_index("tp") * columns
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    ids, found = jnp.moveaxis(jax.lax.all_gather(jnp.stack([own + first, bits]), "tp"), 1, 0)
    values = jax.lax.bitcast_convert_type(found, jnp.float32)  # [devices, rows]
    best = jnp.max(values, axis=0)
    return jnp.min(jnp.where(values == best, ids, jnp.max(ids, axis=0)), axis=0), best


def _greedy_at_once(
    blocks: Float[Array, "rows blocks 128"], vocab: int
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Finds it as a maximum and a minimum, which vectorise where argmax does not."""
    ids = jnp.arange(blocks.shape[1] * _BLOCK, dtype=jnp.int32).reshape(-1, _BLOCK)
    largest = jnp.max(jnp.max(blocks, axis=1), axis=1)
    equal = blocks == largest[:, None, None]
    return jnp.min(jnp.min(jnp.where(equal, ids, vocab - 1), axis=1), axis=1), largest


def _greedy_by_blocks(
    blocks: Float[Array, "rows blocks 128"], vocab: int
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Finds it in one pass, which takes CPUs a third of the time."""

    def compare(index: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        largest, place = found
        block = jax.lax.dynamic_index_in_dim(blocks, index, 1, keepdims=False)
        return jnp.maximum(largest, block), jnp.where(block > largest, index, place)

    start = blocks[:, 0], jnp.zeros(blocks[:, 0].shape, jnp.int32)
    largest, place = jax.lax.fori_loop(1, blocks.shape[1], compare, start)
    ids = place * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    of_row = jnp.max(largest, axis=1)
    equal = largest == of_row[:, None]
    return jnp.min(jnp.where(equal, ids, vocab - 1), axis=1), of_row


def _apart(reduced: Float[Array, "..."]) -> Float[Array, "..."]:
    """Keeps XLA:CPU from making one reduction of two. The first takes whole vectors, a merged one
    single numbers."""
    return by_platform(reduced, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def _total(blocks: Float[Array, "rows blocks 128"]) -> Float[Array, " rows"]:
    return jnp.sum(_apart(jnp.sum(blocks, axis=1)), axis=1)


def _noise(keys: Key[Array, " rows"], vocab: int) -> Float[Array, "rows numbers"]:
    """Gumbel noise for `_draw`: 128 numbers for columns and one for each block."""
    numbers = _BLOCK + -(-vocab // _BLOCK)
    return jax.vmap(lambda key: jax.random.gumbel(key, (numbers,), jnp.float32))(keys)


def _draw(
    weights: Float[Array, "rows blocks 128"], noise: Float[Array, "rows numbers"]
) -> Int[Array, " rows"]:
    """Draws by the Gumbel-max method: argmax(log(weights) + Gumbel noise) is a draw. It first draws
    one of the 128 columns by its sum of weights, then a block in the column. A row thus needs 128 +
    blocks numbers of noise, not one for each token."""
    sums = jnp.log(jnp.sum(jnp.exp(weights), axis=1))
    column = jnp.argmax(sums + noise[:, :_BLOCK], axis=1)
    inside = jnp.take_along_axis(weights, column[:, None, None], axis=2)[:, :, 0]
    block = jnp.argmax(inside + noise[:, _BLOCK:], axis=1)
    return (block * _BLOCK + column).astype(jnp.int32)


def process(
    blocks: Float[Array, "rows blocks 128"], largest: Float[Array, " rows"], state: SamplerState
) -> Float[Array, "rows blocks 128"]:
    """Returns the logarithms of the weights for draws: a row's distribution is their softmax.

    The likeliest token, whose logit is given, has 0; excluded tokens and padding have -inf.
    """
    # Subtracting the largest logit first keeps the division finite for any temperature.
    temperature = jnp.where(state.temperature > 0, state.temperature, 1.0)
    scaled = (blocks - largest[:, None, None]) / temperature[:, None, None]
    threshold = _threshold(scaled, state)
    return jnp.where(scaled >= threshold[:, None, None], scaled, -jnp.inf)


def _threshold(
    scaled: Float[Array, "rows blocks 128"], state: SamplerState
) -> Float[Array, " rows"]:
    """Returns the smallest scaled logit that may be drawn; each row's largest logit must be 0."""
    off = scaled.shape[1] * _BLOCK
    top_k = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, off), off)
    by_min_p = jnp.where(state.min_p > 0, jnp.log(state.min_p), -jnp.inf)
    limits, none = (scaled, top_k, state.top_p), jnp.full_like(by_min_p, -jnp.inf)

    cut = functools.partial(by_platform, *limits, cpu=_cut_by_candidates, default=_cut_by_search)
    limited = jnp.any((top_k < off) | (state.top_p < 1.0))
    return jnp.maximum(by_min_p, jax.lax.cond(limited, cut, lambda: none))


def _cut_by_search(
    scaled: Float[Array, "rows blocks 128"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """The smallest scaled logit that top_k and top_p keep, by searches over whole rows."""
    off, none = scaled.shape[1] * _BLOCK, jnp.full(scaled.shape[0], -jnp.inf)

    def cut_by_top_k() -> Array:
        return _smallest_kept(scaled, jnp.ones_like(scaled), top_k.astype(jnp.float32))

    by_top_k = jax.lax.cond(jnp.any(top_k < off), cut_by_top_k, lambda: none)

    def cut_by_top_p() -> Array:
        inside = jnp.where(scaled >= by_top_k[:, None, None], jnp.exp(scaled), 0.0)
        by_top_p = _smallest_kept(scaled, inside, top_p * _total(inside))
        # The rounded sum may fall short of the total mass; top_p = 1 must keep every token.
        return jnp.where(top_p < 1.0, by_top_p, -jnp.inf)

    by_top_p = jax.lax.cond(jnp.any(top_p < 1.0), cut_by_top_p, lambda: none)
    return jnp.maximum(by_top_k, by_top_p)


def _cut_by_candidates(
    scaled: Float[Array, "rows blocks 128"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """Does `_cut_by_search` with the `_CANDIDATES` largest logits of each row where they decide,
    and else by the search. Which of them decides depends on the row alone."""
    off = scaled.shape[1] * _BLOCK
    best, _ = top_of_blocks(scaled, _CANDIDATES)
    few, limited = top_k <= best.shape[1], top_k < off
    last = jnp.take_along_axis(best, jnp.minimum(top_k, best.shape[1])[:, None] - 1, axis=1)[:, 0]
    by_top_k = jnp.where(few & limited, last, -jnp.inf)
    inside = jnp.where(scaled >= by_top_k[:, None, None], jnp.exp(scaled), 0.0)
    enough = jnp.cumsum(jnp.exp(best), axis=1) >= (top_p * _total(inside))[:, None]
    first = jnp.take_along_axis(best, jnp.argmax(enough, axis=1)[:, None], axis=1)[:, 0]
    by_top_p = jnp.where((top_p < 1.0) & enough[:, -1], first, -jnp.inf)
    decided = (few | ~limited) & ((top_p >= 1.0) | enough[:, -1])
    found = jnp.maximum(by_top_k, by_top_p)
    return jax.lax.cond(
        jnp.all(decided),
        lambda: found,
        lambda: jnp.where(decided, found, _cut_by_search(scaled, top_k, top_p)),
    )


def _smallest_kept(
    values: Float[Array, "rows blocks 128"],
    weights: Float[Array, "rows blocks 128"],
    enough: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """Returns the largest value (all are <= 0) such that the weights of all entries at least as
    large sum to at least `enough`; -inf if the sum of all does not.

    Binary search over the magnitudes' bits: 31 passes over the row instead of a sort, which is
    several times slower on every platform.
    """
    magnitudes = jax.lax.bitcast_convert_type(values, jnp.int32) & MAX

    # From the highest bit down: finds the largest magnitude whose smaller ones sum to too little.
    def try_bit(step: Array, found: Array) -> Array:
        candidate = found | (jnp.int32(1 << 30) >> step)
        mass = _total(jnp.where(magnitudes < candidate[:, None, None], weights, 0.0))
        return jnp.where(mass < enough, candidate, found)

    found = jax.lax.fori_loop(0, 31, try_bit, jnp.zeros(values.shape[0], jnp.int32))
    infinite = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
    return -jax.lax.bitcast_convert_type(jnp.minimum(found, infinite), jnp.float32)
