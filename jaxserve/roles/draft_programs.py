"""Programs around steps with drafts, on the attention mesh; `roles/drafting.py` runs them.

The device alone knows how many drafts of a step in flight hold. `resolve` puts what it knows into
the batch array of the next step, so that no other program of a step has to know of drafts but the
one that samples (`TokenPrograms.verify_step`). `draft` and `recall` are the drafter without
weights: prompt lookup (Saxena, 2023, "Prompt lookup decoding"), which proposes what followed the
last tokens where they came before.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.model.attention.batch import positions
from jaxserve.roles.layout import FROM_DEVICE, BatchLayout, Bucket
from jaxserve.roles.program import ROWS, Program
from jaxserve.roles.step_plan import SaidTokens
from jaxserve.roles.token_programs import TokenPrograms

LOOKED_UP = (3, 2)
"""Numbers of last tokens to look up; the first one with a match counts."""
RECALLED = 1024
"""Tokens of a DP group that one call of `recall` takes."""


def resolve(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(batch, last_tokens, lengths, drafts) → (batch, lengths): the batch without `FROM_DEVICE`,
    and the lengths as they are after the step if all drafts hold."""
    layout, slots = programs.layout(bucket.tokens), programs.slots

    def body(batch: Array, last: Array, lengths: Array, drafts: Array) -> tuple[Array, Array]:
        fields = layout.fields(batch[0])
        start = fields["query_start"]
        fed, known = jnp.diff(start), fields["kv_length"]
        length = jnp.where(known == FROM_DEVICE, lengths[0] + fed, known)
        slot, _, _ = positions(start, length, bucket.tokens)
        offset = jnp.arange(bucket.tokens, dtype=jnp.int32) - start[slot]
        following = jnp.concatenate([last[0][:, None], drafts[0]], axis=1)
        offset = jnp.clip(offset, 0, following.shape[1] - 1)
        ids = fields["token_ids"]
        ids = jnp.where(ids == FROM_DEVICE, following[slot, offset], ids)
        resolved = fields | {"token_ids": ids, "kv_length": length}
        after = jnp.where(fed > 0, length, lengths[0])
        return jnp.concatenate([*resolved.values()])[None], after[None]

    groups, state = programs.groups, (programs.groups, slots)
    return Program(
        "resolve",
        body,
        programs.mesh,
        (
            programs.shape(groups, layout.width),
            programs.shape(*state),
            programs.shape(*state),
            programs.shape(*state, programs.deployment.drafts),
        ),
        (ROWS, ROWS),
    )


def history_width(programs: TokenPrograms) -> int:
    """Tokens of a sequence that `draft` looks through."""
    limits, cache = programs.deployment.scheduler, programs.deployment.cache
    return limits.page_buckets[-1] * cache.page_size


def draft(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(history, batch, last_tokens, lengths) → (history, drafts), after a step that fed `batch`."""
    slots, count = programs.slots, programs.deployment.drafts
    width = history_width(programs)

    def body(history: Array, batch: Array, last: Array, lengths: Array) -> tuple[Array, Array]:
        fields = BatchLayout(bucket.tokens, slots).fields(batch[0])
        slot, position, _ = positions(fields["query_start"], fields["kv_length"], bucket.tokens)
        position = jnp.where(position < 0, width, position)
        said = history[0].at[slot, position].set(fields["token_ids"], mode="drop")
        fed = jnp.diff(fields["query_start"]) > 0
        end = jnp.where(fed, lengths[0], width)
        said = said.at[jnp.arange(slots), end].set(last[0], mode="drop")
        return said[None], looked_up(said, lengths[0], count)[None]

    groups = programs.groups
    return Program(
        "draft",
        body,
        programs.mesh,
        (
            programs.shape(groups, slots, width),
            programs.shape(groups, BatchLayout(bucket.tokens, slots).width),
            programs.shape(groups, slots),
            programs.shape(groups, slots),
        ),
        (ROWS, ROWS),
        donates=(0,),
    )


def recall(programs: TokenPrograms) -> Program:
    """(history, words) → history: writes tokens as `recall_words` has them, `RECALLED` a DP
    group."""
    slots, width = programs.slots, history_width(programs)

    def body(history: Array, words: Array) -> Array:
        slot, place, token = words[0]
        return history.at[0, slot, place].set(token, mode="drop")

    return Program(
        "recall",
        body,
        programs.mesh,
        (
            programs.shape(programs.groups, slots, width),
            programs.shape(programs.groups, 3, RECALLED),
        ),
        ROWS,
        donates=(0,),
    )


def recall_words(said: Sequence[SaidTokens], groups: int, slots: int) -> np.ndarray:
    """int32 `[groups, 3, tokens]`: slot, place in the sequence, and id of each token. Whole runs of
    `RECALLED`, padded with a slot that does not exist."""
    parts: list[list[np.ndarray]] = [[] for _ in range(groups)]
    for row, start, data in said:
        tokens = np.frombuffer(data, "<i4")
        group, slot = divmod(row, slots)
        place = np.arange(start, start + len(tokens))
        parts[group].append(np.stack([np.full_like(place, slot), place, tokens]))
    most = max(sum(part.shape[1] for part in own) for own in parts)
    words = np.full((groups, 3, -(-most // RECALLED) * RECALLED), slots, np.int32)
    for group, own in enumerate(parts):
        if own:
            joined = np.concatenate(own, axis=1)
            words[group, :, : joined.shape[1]] = joined
    return words


def looked_up(
    said: Int[Array, "slots width"], last: Int[Array, " slots"], count: int
) -> Int[Array, "slots count"]:
    """Proposes the tokens that followed the latest earlier place of each sequence's last tokens.

    Args:
      said: the sequence's tokens.
      last: the place of its last token.
      count: tokens to propose. A match may overlap the end; the proposal then repeats its period.
    """
    width = said.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    best = jnp.full(last.shape, -1, jnp.int32)
    for size in sorted(LOOKED_UP):
        alike = (place >= size - 1) & (place < last[:, None])
        for back in range(size):
            wanted = jnp.maximum(last - back, 0)[:, None]
            key = jnp.take_along_axis(said, jnp.minimum(wanted, width - 1), axis=1)
            alike &= jnp.roll(said, back, axis=1) == key
        found = jnp.max(jnp.where(alike, place, -1), axis=1)
        best = jnp.where(found >= 0, found, best)
    period = jnp.maximum(last - best, 1)[:, None]
    ahead = best[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None] % period
    ahead = jnp.where(best[:, None] >= 0, ahead, last[:, None])
    return jnp.take_along_axis(said, jnp.minimum(ahead, width - 1), axis=1)
