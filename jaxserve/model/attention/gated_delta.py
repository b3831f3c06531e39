"""Gated DeltaNet: linear attention with a state for every sequence (arXiv 2412.06464, as Qwen3-Next
has it).

One of the kinds of attention; `blocks.py` composes it with norms, router and residual. Runs inside
`shard_map` on the attention mesh: key heads, with the value heads that they serve, are split over
`tp`.

Each value head keeps a matrix S [key_dim, value_dim] in FP32. A token decays it, replaces what S
holds for its key by its value, and reads S with its query:

    S ← e^g·S;  S ← S + k·(β·(v − Sᵀk))ᵀ;  o = Sᵀq

Queries, keys and values first pass a causal convolution over the last tokens, whose inputs are kept
beside S. A sequence has a page for both (`entries`); its first token begins with
zeros, whatever the page held before. Where a step begins with the state of another page, that is
copied first, and stays for other sequences to start from. Sequences with one token in a step take
the recurrence together, by a kernel on TPUs and Hopper (`delta_step`). Chunks of prompts take the
chunked form (arXiv 2406.06484 §3), part after part, in plain XLA.

A rejected draft must leave no trace in a state. A step therefore feeds drafts to a copy: the page
keeps the state behind the last token that is certain, and the drafts' inputs beside the inputs of
the convolution. Only the next step knows how many drafts were right, by its first position, and
feeds those inputs to the state first. Sequences with drafts take the chunked form `TOGETHER` at a
time, in plain XLA.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.config.attention.gated_delta import DeltaNet
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Entry, Pages
from jaxserve.model.module import Formats, linear, matrix, rms_norm, scale, weight, zeros
from pallas_kernels.gated_delta import delta_step

PART = 64
"""Tokens of a prompt that the chunked form takes at a time."""
TOGETHER = 8
"""Sequences with drafts that the chunked form takes at a time, each with its own few tokens."""
COUNTED = 64
"""A state's page has the number of tokens that it has been fed modulo this, which is exact in every
format and more than a step's drafts."""
NORM_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


class Rows(NamedTuple):
    """Inputs of the recurrence, FP32; the first axis counts tokens."""

    query: Float[Array, "tokens key_heads key_dim"]
    key: Float[Array, "tokens key_heads key_dim"]
    value: Float[Array, "tokens heads value_dim"]
    decay: Float[Array, "tokens heads"]
    """Logarithms of the factors of the state."""
    rate: Float[Array, "tokens heads"]
    """Share of the state's old value that a token replaces."""


class GatedDeltaNet(nnx.Module):
    """Attention of a Gated DeltaNet layer.

    Attributes:
      mix: [key_heads·columns, d_model]; a key head's rows are its query, its key, and the values
        and output gates of its value heads.
      rates: [key_heads·2·values, d_model]; for each key head, β and the step of its value heads.
      query_taps, key_taps, value_taps: [columns, convolution], the newest token last.
      decay, step_bias: FP32 [value_heads]; g = −exp(decay)·softplus(step + step_bias).
      norm: [value_dim].
      out: [d_model, value_heads·value_dim].
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs):
        assert isinstance(kind.attention, DeltaNet)
        self.sizes = sizes = kind.attention
        self.epsilon, dtype, fp32 = config.norm_epsilon, formats.dtype, jnp.dtype(jnp.float32)
        d_model, taps = config.d_model, sizes.convolution
        keys, values = sizes.kv_heads * sizes.head_dim, sizes.q_heads * sizes.value_dim
        self.mix = matrix(rngs, formats, q_heads=2 * (keys + values), d_model=d_model)
        self.rates = weight(rngs, dtype, q_heads=2 * sizes.q_heads, d_model=d_model)
        self.query_taps = weight(rngs, dtype, q_heads=keys, taps=taps)
        self.key_taps = weight(rngs, dtype, q_heads=keys, taps=taps)
        self.value_taps = weight(rngs, dtype, q_heads=values, taps=taps)
        self.decay = zeros(rngs, fp32, q_heads=sizes.q_heads)
        self.step_bias = zeros(rngs, fp32, q_heads=sizes.q_heads)
        self.norm = scale(rngs, dtype, head_dim=sizes.value_dim)
        self.out = matrix(rngs, formats, d_model=d_model, out_heads=values)

    @staticmethod
    def entries(_: ModelConfig, sizes: DeltaNet, deployment: Deployment) -> tuple[Entry, Entry]:
        """Declares a state, and the inputs of the convolution; with drafts also their inputs and
        rates, and the number of tokens that the state has been fed."""
        heads, kept = sizes.kv_heads, sizes.convolution - 1
        values = sizes.q_heads // heads * sizes.value_dim
        state = Entry(heads, sizes.head_dim * values, "float32", every=0, ring=True)
        columns = 2 * sizes.head_dim + values
        width = kept * columns
        if drafts := deployment.drafts:
            width = (kept + drafts) * (columns + 2 * sizes.q_heads // heads) + 1
        return state, state._replace(width=width, plain=deployment.dtype)

    @staticmethod
    def walk(*_: Any) -> tuple[()]:
        """Returns no arrays for the attention kernels to walk over: a state is no row of pages."""
        return ()

    @staticmethod
    def placed(batch: RaggedBatch, page_size: int) -> RaggedBatch:
        """Puts a page table `[slots, 2]` into a batch: the page of each sequence's state that a
        step writes, and the one that it reads. The batch has, for each page of tokens, the page
        with the state behind them."""
        table, _, position = batch.where

        def page_of(last: Int[Array, " slots"]) -> Int[Array, "slots 1"]:
            return jnp.take_along_axis(table, last[:, None] // page_size, axis=1)

        # A sequence's first step reads no state.
        before = jnp.where(batch.chunk_start > 0, batch.chunk_start - 1, position)
        before = _largest(batch, jnp.where(position < 0, -1, before))
        columns = [page_of(_certain(batch)), page_of(before)]
        return batch._replace(page_table=jnp.concatenate(columns, axis=1))

    def __call__(
        self, x: Float[Array, "tokens d_model"], pages: Pages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens d_model"], Pages]:
        """Attention of normed tokens, as `GroupedQueryAttention.__call__` describes it."""
        with jax.named_scope("other_pages"):
            states, inputs = _copied(pages, batch.page_table)
        tokens, heads_here = x.shape[0], inputs.shape[1]
        mixed = linear(x, self.mix).reshape(tokens, heads_here, -1)
        own, gate = jnp.split(mixed, [self._columns], axis=2)
        rates = linear(x, self.rates).reshape(tokens, heads_here, -1)
        drafts = self._drafts(inputs)
        if drafts:
            own = jnp.concatenate([own, rates.astype(own.dtype)], axis=2)
        steps = _Steps.of(batch, states.shape[0])
        held = inputs[steps.page_of_slot, :, 0]
        if drafts:
            steps = steps.after(held[:, 0, -1], drafts)
            held = held[..., :-1]
        held = held.reshape(*held.shape[:2], -1, own.shape[2])
        with jax.named_scope("convolution"):
            convolved, inputs = self._convolve(own, held, inputs, steps)
        rows = self._rows(rates, convolved)
        read = jnp.zeros(rows.value.shape, jnp.float32)
        with jax.named_scope("delta_rule"):
            # The same bytes in another shape: XLA copies no pool.
            heads = states.reshape(len(states), read.shape[1], self.sizes.head_dim, -1)
            if drafts:
                heads, read = self._drafting(heads, read, rows, held, steps)
            heads, read = _one_token_each(heads, read, rows, steps)
            heads, read = _parts(heads, read, rows, steps)
            states = heads.reshape(states.shape)
        gate = gate.reshape(read.shape).astype(jnp.float32)
        normed = rms_norm(read.astype(x.dtype), self.norm[...], self.epsilon)
        gated = (normed.astype(jnp.float32) * jax.nn.silu(gate)).astype(x.dtype)
        return linear(gated.reshape(tokens, -1), self.out), (states, inputs)

    @property
    def _columns(self) -> int:
        """Columns of a token's query, key and values, for each key head."""
        sizes = self.sizes
        return 2 * sizes.head_dim + sizes.q_heads // sizes.kv_heads * sizes.value_dim

    def _drafts(self, inputs: Array) -> int:
        """Drafts whose inputs the pages keep (`entries`)."""
        count, width = self.sizes.convolution - 1, inputs.shape[3]
        if width == count * self._columns:
            return 0
        rates = 2 * self.sizes.q_heads // self.sizes.kv_heads
        return (width - 1) // (self._columns + rates) - count

    def _convolve(
        self,
        own: Float[Array, "tokens heads columns"],
        held: Float[Array, "slots heads kept columns"],
        inputs: Array,
        steps: "_Steps",
    ) -> tuple[Float[Array, "tokens heads convolved"], Array]:
        """Sums the inputs of each token and of those before it, weighted by the taps. Returns SiLU
        of the sums, and the pages with the last inputs of every sequence, which are those before
        its first draft, and its drafts'.

        Args:
          own: inputs of the tokens; with drafts their rates follow.
          held: the inputs that each sequence's page had before the step.
        """
        count, kept = self.sizes.convolution - 1, held.shape[2]
        taps = self._taps(own.shape[1])
        past, summed = [own], own[..., : self._columns].astype(jnp.float32) * taps[..., count]
        for back in range(1, count + 1):
            before = steps.offset - back  # in this batch, if not negative
            place = count + steps.right[steps.slot] + before
            earlier = held[steps.slot, :, jnp.clip(place, 0, kept - 1)]
            moved = jnp.where((before >= 0)[:, None, None], jnp.roll(own, back, axis=0), earlier)
            there = steps.position >= back
            past.append(jnp.where(there[:, None, None], moved, 0).astype(own.dtype))
            summed += past[back][..., : self._columns].astype(jnp.float32) * taps[..., count - back]
        ends = steps.ends
        last = [row[ends.token] for row in reversed(past[:count])]
        for ahead in range(1, 1 + kept - count):
            drafted = steps.drafts[steps.slot[ends.token]] >= ahead
            row = own[jnp.minimum(ends.token + ahead, len(own) - 1)]
            last.append(jnp.where(drafted[:, None, None], row, 0))
        rows = jnp.stack(last, axis=2).reshape(len(ends.token), own.shape[1], -1)
        if kept > count:
            fed = ((steps.position[ends.token] + 1) % COUNTED).astype(rows.dtype)
            fed = jnp.broadcast_to(fed[:, None, None], (*rows.shape[:2], 1))
            rows = jnp.concatenate([rows, fed], axis=2)
        inputs = inputs.at[ends.page, :, 0].set(rows.astype(inputs.dtype), mode="drop")
        return jax.nn.silu(summed).astype(own.dtype), inputs

    def _drafting(
        self, states: Array, read: Array, rows: Rows, held: Array, steps: "_Steps"
    ) -> tuple[Array, Float[Array, "tokens heads value_dim"]]:
        """Feeds the right drafts of the step before to the states of their sequences, then the
        token that is certain, where drafts follow it. What the drafts themselves read follows from
        the state with them, which is not kept."""
        tokens, most = len(read), -(-len(held) // TOGETHER) * TOGETHER
        drafts = held.shape[2] - (self.sizes.convolution - 1)
        group = read.shape[1] // held.shape[1]
        (slots,) = jnp.nonzero(steps.drafting, size=most, fill_value=len(held))

        def run(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            states, read = carry
            slot = jax.lax.dynamic_slice_in_dim(slots, number * TOGETHER, TOGETHER)
            found, slot = slot < len(held), jnp.minimum(slot, len(held) - 1)
            page = jnp.where(found, steps.page_of_slot[slot], len(states))
            before = self._of_drafts(held[slot])
            ahead = jnp.arange(1 + drafts)
            at = steps.first[slot][:, None] + ahead
            own = jax.tree.map(lambda each: each[jnp.minimum(at, tokens - 1)], rows)
            fed = steps.drafts[slot][:, None]
            there = (fed > 0) & (ahead <= fed)
            right = jnp.arange(drafts) < steps.right[slot][:, None]
            both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), before, own)
            both = both._replace(
                query=jnp.repeat(both.query, group, axis=2), key=jnp.repeat(both.key, group, axis=2)
            )
            some = jnp.concatenate([right, there], axis=1)
            certain = jnp.concatenate([right, there & (ahead == 0)], axis=1)
            held_on, seen = jax.vmap(delta_part)(
                states.at[page].get(mode="clip"), both, some, certain
            )
            states = states.at[page].set(held_on, mode="drop")
            to = jnp.where(there & found[:, None], at, tokens)
            return states, read.at[to].set(seen[:, drafts:], mode="drop")

        blocks = -(-jnp.sum(steps.drafting) // TOGETHER)
        return jax.lax.fori_loop(0, blocks, run, (states, read))

    def _of_drafts(self, held: Float[Array, "some heads kept columns"]) -> Rows:
        """Computes what the last step's drafts feed to the state, from their inputs."""
        count = self.sizes.convolution - 1
        taps, (some, heads, kept, _) = self._taps(held.shape[1])[:, None], held.shape
        parts, rates = jnp.split(held, [self._columns], axis=3)
        summed = parts[:, :, count:].astype(jnp.float32) * taps[..., count]
        for back in range(1, count + 1):
            earlier = parts[:, :, count - back : kept - back]
            summed += earlier.astype(jnp.float32) * taps[..., count - back]
        convolved = jax.nn.silu(summed).astype(held.dtype)

        def by_token(part: Array) -> Array:
            return jnp.swapaxes(part, 1, 2).reshape(some * (kept - count), heads, -1)

        rows = self._rows(by_token(rates[:, :, count:]), by_token(convolved))
        return jax.tree.map(lambda each: each.reshape(some, kept - count, *each.shape[1:]), rows)

    def _taps(self, heads: int) -> Float[Array, "heads columns convolution"]:
        parts = (self.query_taps, self.key_taps, self.value_taps)
        split = [part[...].reshape(heads, -1, self.sizes.convolution) for part in parts]
        return jnp.concatenate(split, axis=1).astype(jnp.float32)

    def _rows(
        self,
        rates: Float[Array, "tokens heads both"],
        convolved: Float[Array, "tokens heads columns"],
    ) -> Rows:
        sizes, (tokens, heads, _) = self.sizes, convolved.shape
        group, dim = sizes.q_heads // sizes.kv_heads, sizes.head_dim
        query, key, value = jnp.split(convolved.astype(jnp.float32), [dim, 2 * dim], axis=2)
        query, key = _unit(query), _unit(key)
        rate, step = jnp.split(rates, 2, axis=2)
        rate, step = (
            each.astype(jnp.float32).reshape(tokens, heads * group) for each in (rate, step)
        )
        decay = -jnp.exp(self.decay[...]) * jax.nn.softplus(step + self.step_bias[...])
        value = value.reshape(tokens, heads * group, sizes.value_dim)
        return Rows(query * dim**-0.5, key, value, decay, jax.nn.sigmoid(rate))


class _Some(NamedTuple):
    """Some tokens of a step."""

    token: Int[Array, " some"]
    page: Int[Array, " some"]
    """Page of the token's sequence; behind the pool where the entry is no token."""


class _Steps(NamedTuple):
    """Tokens of a step, by their sequences, and the pages of these."""

    slot: Int[Array, " tokens"]
    position: Int[Array, " tokens"]
    offset: Int[Array, " tokens"]
    """Place of a token among those of its sequence in the step."""
    page_of_slot: Int[Array, " slots"]
    start: Int[Array, " slots"]
    """Position of the first token of every sequence in the step."""
    drafts: Int[Array, " slots"]
    """Drafts at the end of every sequence."""
    ends: _Some
    """Last token of every sequence before its drafts."""
    alone: _Some
    """Tokens that are the only ones of their sequence."""
    parts: _Some
    """First tokens of the parts of all other sequences."""
    number: Int[Array, ""]
    """Number of parts."""
    first: Int[Array, " slots"]
    """Index of the first token of every sequence."""
    right: Int[Array, " slots"]
    """Drafts of the step before that turned out right."""

    @classmethod
    def of(cls, batch: RaggedBatch, pool: int) -> "_Steps":
        """Finds the tokens of a batch whose pages are in a pool of this size; see `placed` for the
        page table."""
        table, slot, position = batch.where
        pages, tokens, slots = table[:, 0], len(slot), len(table)
        offset = position - batch.chunk_start
        there = position >= 0
        following = jnp.roll(there & (offset > 0), -1).at[-1].set(False)
        alone, last = there & (offset == 0) & ~following, there & ~following
        none = jnp.zeros(slots, jnp.int32)
        drafts = none if batch.drafts is None else batch.drafts
        if batch.drafts is not None:
            last = there & (position == _certain(batch)[slot])

        def some(chosen: Array, most: int) -> _Some:
            (token,) = jnp.nonzero(chosen, size=most, fill_value=tokens)
            found, token = token < tokens, jnp.minimum(token, tokens - 1)
            return _Some(token, jnp.where(found, pages[slot[token]], pool))

        starts = there & ~alone & (offset % PART == 0) & (drafts[slot] == 0)
        most = min(tokens, slots)
        return cls(
            slot,
            position,
            offset,
            jnp.clip(pages, 0, pool - 1),
            none.at[slot].max(jnp.where(there, batch.chunk_start, 0)),
            drafts,
            some(last, most),
            some(alone, most),
            some(starts, min(tokens, tokens // PART + slots)),
            jnp.sum(starts),
            jnp.full(slots, tokens).at[slot].min(jnp.where(there, jnp.arange(tokens), tokens)),
            none,
        )

    def after(self, counted: Float[Array, " slots"], drafts: int) -> "_Steps":
        """Adds the number of right drafts of the step before.

        Args:
          counted: tokens that each state has been fed, modulo `COUNTED`.
          drafts: most drafts of a sequence.
        """
        right = (self.start - counted.astype(jnp.int32)) % COUNTED
        return self._replace(right=jnp.where(self.start > 0, jnp.minimum(right, drafts), 0))

    @property
    def drafting(self) -> Bool[Array, " slots"]:
        """Sequences that have drafts, or right ones of the step before."""
        return (self.first < len(self.slot)) & ((self.right > 0) | (self.drafts > 0))


def _largest(batch: RaggedBatch, values: Int[Array, " tokens"]) -> Int[Array, " slots"]:
    """Returns the largest value of each sequence's tokens, and at least 0."""
    table, slot, _ = batch.where
    return jnp.zeros(len(table), jnp.int32).at[slot].max(values)


def _certain(batch: RaggedBatch) -> Int[Array, " slots"]:
    """Returns the position of each sequence's last token before its drafts."""
    last = _largest(batch, batch.position)
    return last if batch.drafts is None else last - batch.drafts


def _copied(pages: Pages, table: Int[Array, "slots 2"]) -> Pages:
    """Copies the states that sequences read in another page than the one that they write."""
    written, read = table[:, 0], table[:, -1]
    (moving,) = jnp.nonzero(written != read, size=len(table), fill_value=0)

    def copy(number: Array, pages: Pages) -> Pages:
        source, target = read[moving[number]], written[moving[number]]
        return tuple(array.at[target].set(array[source]) for array in pages)

    return jax.lax.fori_loop(0, jnp.sum(written != read), copy, pages)


def _unit(rows: Float[Array, "tokens heads dim"]) -> Float[Array, "tokens heads dim"]:
    """Divides rows by their length."""
    return rows * jax.lax.rsqrt(jnp.sum(rows * rows, axis=-1, keepdims=True) + NORM_EPSILON)


def _product(subscripts: str, *operands: Array) -> Array:
    """An einsum in FP32, without the shorter products that accelerators make of it."""
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)


def _one_token_each(
    states: Array, read: Array, rows: Rows, steps: _Steps
) -> tuple[Array, Float[Array, "tokens heads value_dim"]]:
    """Runs the recurrence for tokens that are the only ones of their sequence."""
    token, page = steps.alone
    one = jax.tree.map(lambda each: each[token], rows)
    # A sequence's first token begins with zeros.
    decay = jnp.where((steps.position[token] == 0)[:, None], -jnp.inf, one.decay)
    states, found = delta_step(states, page, one.query, one.key, one.value, decay, one.rate)
    there = jnp.where(page < len(states), token, len(read))
    return states, read.at[there].set(found, mode="drop")


def _parts(
    states: Array, read: Array, rows: Rows, steps: _Steps
) -> tuple[Array, Float[Array, "tokens heads value_dim"]]:
    """The chunked form for all other tokens, one part of a sequence after the other."""
    tokens, group = len(read), read.shape[1] // rows.key.shape[1]

    def run(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        states, read = carry
        start, page = steps.parts.token[number], steps.parts.page[number]
        at = start + jnp.arange(PART)
        own = jnp.minimum(at, tokens - 1)
        position = steps.position[start]
        there = (at < tokens) & (steps.slot[own] == steps.slot[start])
        there &= steps.position[own] == position + jnp.arange(PART)
        part = jax.tree.map(lambda each: each[own], rows)
        part = part._replace(
            query=jnp.repeat(part.query, group, axis=1), key=jnp.repeat(part.key, group, axis=1)
        )
        held, found = delta_part(jnp.where(position == 0, 0, states[page]), part, there)
        states = states.at[page].set(held)
        return states, read.at[jnp.where(there, own, tokens)].set(found, mode="drop")

    return jax.lax.fori_loop(0, steps.number, run, (states, read))


def delta_part(
    state: Float[Array, "heads key_dim value_dim"],
    rows: Rows,
    there: Bool[Array, " tokens"],
    stays: Bool[Array, " tokens"] | None = None,
) -> tuple[Float[Array, "heads key_dim value_dim"], Float[Array, "tokens heads value_dim"]]:
    """Feeds consecutive tokens to the states of heads; those that are not `there` change nothing.

    A token's change of the state depends on the changes before it, by a triangular matrix; one
    solution gives the changes of all tokens. It is solved by substitution: products of powers of
    the matrix lose all digits where keys are alike.

    Args:
      stays: tokens that the returned state has been fed, before all others that are there; None:
        all.

    Returns:
      the states behind the tokens, and what each token reads.
    """
    # All of a token that is not there: it may be another sequence's, and not finite.
    query, key, value, decay, rate = (
        jnp.where(there.reshape(-1, *[1] * (each.ndim - 1)), each, 0) for each in rows
    )
    passed = jnp.cumsum(decay, axis=0).T  # [heads, tokens]
    order = jnp.arange(len(there))
    earlier = order[:, None] >= order
    between = jnp.exp(jnp.where(earlier, passed[:, :, None] - passed[:, None, :], -jnp.inf))
    # Token i sees, of the key of token j before it, this share of its own value.
    shares = _product("ihk,jhk->hij", rate[..., None] * key, key) * between
    shares = jnp.where(order[:, None] > order, shares, 0) + jnp.eye(len(order))
    decayed = jnp.exp(passed).T[..., None]
    wanted = rate[..., None] * (value - _product("ihk,hkv->ihv", key * decayed, state))
    changes = jax.lax.linalg.triangular_solve(
        shares, jnp.swapaxes(wanted, 0, 1), left_side=True, lower=True, unit_diagonal=True
    )
    seen = _product("ihk,jhk->hij", query, key) * between
    read = _product("ihk,hkv->ihv", query * decayed, state)
    read += _product("hij,hjv->ihv", seen, changes)
    whole = passed[:, -1:]
    if stays is not None:
        whole = jnp.sum(jnp.where(stays[:, None], decay, 0), axis=0)[:, None]
        passed = jnp.where(stays, passed, jnp.inf)
    left = jnp.exp(whole - passed).T[..., None]
    state = state * jnp.exp(whole)[..., None]
    return state + _product("ihk,hiv->hkv", key * left, changes), read
