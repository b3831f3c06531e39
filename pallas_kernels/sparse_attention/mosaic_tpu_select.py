"""Selects the positions with the highest scores on a TPU core, in increasing order.

Called by `mosaic_tpu.py`, whose kernel writes the scores. Knows nothing of pages or sequences.

Eight tokens, a register's sublanes, are processed at a time. Their scores stay in VMEM, as integers
of the same order. Bisection over the 32 bits finds each token's lowest score that is chosen. The
equal scores among which the lowest positions win are counted from the first position on. Then the
chosen positions move to the front: a position moves by the number of others before it that are not
chosen, first by the lowest bit of this number, then by the next one, so that no two ever meet.
XLA would sort all scores: for 128K positions 153 passes, against 32 of two instructions and 17 of
six.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.attention.mosaic_tpu_memory import VMEM_BYTES
from pallas_kernels.attention.write_tpu import LANES

TOKENS = 8
"""Tokens that are processed at a time: the sublanes of a register."""

STEP = 4096
"""Positions that a round of a loop processes."""

LOWEST = np.int32(-(2**31))
MINUS_INFINITY = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)
"""Integers of an unseen position, and of the score -inf, which is never chosen."""

CHOSEN = np.int32(2**30)
"""Bit of the entries of chosen positions; the other bits hold how far they still move."""


def select(
    scores: Float32[Array, "tokens context"],
    position: Int32[Array, " tokens"],
    top_k: int,
    *,
    interpret: Any,
) -> Int32[Array, "tokens top_k"]:
    """Returns the positions up to each token's own with the highest scores, lowest first; -1 behind
    the last one. The context is a multiple of `STEP`."""
    tokens, context = scores.shape
    groups = -(-tokens // TOKENS)
    missing = groups * TOKENS - tokens
    scores = jnp.pad(scores, ((0, missing), (0, 0)))
    position = jnp.pad(position, (0, missing), constant_values=-1)
    steps = jnp.max(position.reshape(groups, TOKENS), axis=1) // STEP + 1

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((TOKENS, width), lambda group, steps: (group, 0))

    chosen: Array = pl.pallas_call(
        functools.partial(_kernel, top_k=top_k),
        name="select_positions",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups,),
            in_specs=[rows(context), rows(1)],
            out_specs=rows(-(-top_k // LANES) * LANES),
            # A step's positions more, which are empty, and what a step looks ahead.
            scratch_shapes=[pltpu.VMEM((TOKENS, context + STEP + LANES), jnp.int32)],
        ),
        out_shape=jax.ShapeDtypeStruct((groups * TOKENS, -(-top_k // LANES) * LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
    )(steps, scores, position[:, None])
    return chosen[:tokens, :top_k]


def _kernel(
    steps: Any, scores: Any, position: Any, chosen: Any, entries: Any, *, top_k: int
) -> None:
    """The body: scores [TOKENS, context], position [TOKENS, 1], chosen [TOKENS, top_k or more];
    entries [TOKENS, context and more] are ordered scores, then distances."""
    count, own = steps[pl.program_id(0)], position[...]

    def each_step(do: Any, carry: Any = None) -> Any:
        return lax.fori_loop(0, count, lambda step, carry: do(step * STEP, carry), carry)

    def at(start: Any, width: int = STEP) -> Any:
        return slice(None), pl.ds(pl.multiple_of(start, LANES), width)

    def place(start: Any) -> Array:
        return start + lax.broadcasted_iota(jnp.int32, (TOKENS, STEP), 1)

    def convert(start: Any, most: Array) -> Array:
        found = scores[at(start)]
        bits = lax.bitcast_convert_type(jnp.where(found == 0, 0.0, found), jnp.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        entries[at(start)] = ordered = jnp.where(place(start) <= own, ordered, LOWEST)
        return jnp.maximum(most, _folded(ordered, jnp.maximum))

    most = each_step(convert, jnp.full((TOKENS, LANES), MINUS_INFINITY))
    least = _bisect(each_step, at, entries, jnp.max(most, axis=1, keepdims=True), own, top_k)
    _distances(each_step, at, place, entries, least, jnp.where(least > MINUS_INFINITY, top_k, 0))
    entries[at(count * STEP, STEP + LANES)] = jnp.zeros((TOKENS, STEP + LANES), jnp.int32)
    _move(each_step, at, entries, count * STEP)
    found = entries[:, : chosen.shape[1]]
    index = lax.broadcasted_iota(jnp.int32, found.shape, 1)
    chosen[...] = jnp.where(found >= CHOSEN, index + (found - CHOSEN), -1)


def _bisect(each_step: Any, at: Any, entries: Any, most: Array, own: Array, top_k: int) -> Array:
    """Returns for each token the largest number that `top_k` entries reach, or any that exactly
    `top_k` reach; `MINUS_INFINITY` where the token sees no more than `top_k` positions."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # reached by enough entries, and by too few
        middle = (low >> 1) + (high >> 1) + (low & high & 1)

        def add(start: Any, totals: Array) -> Array:
            return totals + _folded((entries[at(start)] >= middle).astype(jnp.int32), jnp.add)

        totals = each_step(add, jnp.zeros((TOKENS, LANES), jnp.int32))
        reached = jnp.sum(totals, axis=1, keepdims=True)
        low, high = (
            jnp.where(reached >= top_k, middle, low),
            jnp.where(reached >= top_k, high, middle),
        )
        return low, jnp.where(reached == top_k, middle + 1, high)

    low = jnp.full_like(most, MINUS_INFINITY)
    high = jnp.where(own >= top_k, jnp.maximum(most, MINUS_INFINITY) + 1, low + 1)
    return lax.while_loop(lambda bounds: jnp.any(bounds[0] + 1 < bounds[1]), halve, (low, high))[0]


def _folded(found: Array, add: Any) -> Array:
    """Combines the columns of a step to those of a register."""
    parts = [found[:, first : first + LANES] for first in range(0, STEP, LANES)]
    while len(parts) > 1:
        parts = [add(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _distances(
    each_step: Any, at: Any, place: Any, entries: Any, least: Array, top_k: Array
) -> None:
    """Replaces ordered scores by the distances that chosen positions move; 0: not chosen."""
    row = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    before = (row < lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)).astype(jnp.bfloat16)
    every = jnp.ones((LANES, LANES), jnp.bfloat16)

    def count(marked: Array, counted: Array) -> tuple[Array, Array]:
        """Returns the marked positions before each one [TOKENS, STEP], and those so far."""
        parts = [marked[:, first : first + LANES] for first in range(0, STEP, LANES)]
        stacked = jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
        inside = jnp.dot(stacked, before, preferred_element_type=jnp.float32)
        totals = jnp.dot(stacked, every, preferred_element_type=jnp.float32)
        found = []
        for first in range(0, len(parts) * TOKENS, TOKENS):
            rows = slice(first, first + TOKENS)
            found.append(inside[rows] + counted)
            counted = counted + totals[rows]
        return jnp.concatenate(found, axis=1), counted

    def higher_in_step(start: Any, totals: Array) -> Array:
        marked = (entries[at(start)] > least).astype(jnp.float32)
        return totals + jnp.sum(marked, axis=1, keepdims=True)

    # Of the positions with the lowest score, as many as are missing.
    higher = each_step(higher_in_step, jnp.zeros((TOKENS, 1), jnp.float32))
    missing = jnp.maximum(top_k.astype(jnp.float32) - higher, 0)

    def mark(start: Any, counted: tuple[Array, Array]) -> tuple[Array, Array]:
        ordered = entries[at(start)]
        above, equal = ordered > least, ordered == least
        above_before, above_counted = count(above.astype(jnp.float32), counted[0])
        equal_before, equal_counted = count(equal.astype(jnp.float32), counted[1])
        chosen = above | (equal & (equal_before < missing))
        rank = (above_before + jnp.minimum(equal_before, missing)).astype(jnp.int32)
        entries[at(start)] = jnp.where(chosen, place(start) - rank + CHOSEN, 0)
        return above_counted, equal_counted

    each_step(mark, (jnp.zeros((TOKENS, LANES), jnp.float32),) * 2)


def _move(each_step: Any, at: Any, entries: Any, end: Any) -> None:
    """Moves the entries of chosen positions to the front, one bit of their distance at a time."""
    context = entries.shape[1] - STEP - LANES

    lane = lax.broadcasted_iota(jnp.int32, (TOKENS, LANES), 1)

    def move(start: Any, shift: int) -> None:
        if shift >= LANES:  # behind the end is a step of empty entries
            here, there = entries[at(start)], entries[at(jnp.minimum(start + shift, end))]
            stays = jnp.where((here & shift) == 0, here, 0)
            entries[at(start)] = jnp.where((there & shift) == 0, stays, there)
            return
        found = entries[at(start, STEP + LANES)]
        going = jnp.where((found & shift) == 0, 0, found)
        stays = found ^ going
        parts = [going[:, first : first + LANES] for first in range(0, STEP + LANES, LANES)]
        parts = [pltpu.roll(part, LANES - shift, 1) for part in parts]
        pairs = itertools.pairwise(parts)
        come = [jnp.where(lane < LANES - shift, *pair) for pair in pairs]
        entries[at(start)] = stays[:, :STEP] | jnp.concatenate(come, axis=1)

    for bit in range((context - 1).bit_length()):

        def move_all(shift: int = 1 << bit) -> None:
            each_step(lambda start, carry: move(start, shift))

        pl.when(1 << bit < end)(move_all)
