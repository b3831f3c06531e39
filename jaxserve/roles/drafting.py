"""Keeps drafts on the device, so that a lane's next step can use them before the host knows them.

`TokenLanes` runs these programs around every step of a deployment with drafts, and keeps what
drafters propose. A wrong or stale draft costs time and changes no token (`TokenPrograms.draw`). The
device alone knows how many drafts of a step in flight are right. `resolve` writes the resulting
tokens and lengths into the batch array of the next step, so that only the sampling program has to
know of drafts.

`draft` and `recall` are the drafter without weights: prompt lookup (Saxena, 2023, "Prompt lookup
decoding"), which proposes the tokens that followed an earlier occurrence of the last tokens.

The other drafters are prediction modules, which run as layers of the workers; the functions from
`first_pass` on are parts of their programs. A pass is a step of one decoder layer whose batch array
the device writes itself. Each row is a hidden state with the token id that follows it. The module's
layer runs at the rows' positions on pages of its own, and the head makes a draft from each slot's
last row (DeepSeek-V3 §2.2, xDeepServe §4.6). Passes of different modules run on all rows of a step,
so that each module has the KV of whole prompts. With more drafts than modules, the last module runs
again on one row for each slot, one position further, on its own hidden state and draft.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.mesh import cached_sharding, sharded_zeros
from jaxserve.model.attention.batch import positions
from jaxserve.model.residual import widened
from jaxserve.roles.compilation import ROWS, Get, Program
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_arrays import FROM_DEVICE, BatchLayout
from jaxserve.roles.step_plan import SaidTokens, StepPlan
from jaxserve.roles.token_programs import TokenPrograms, drawn_tokens, sampler_state

LOOKED_UP = (3, 2)
"""Lengths of the token suffix to look up; the first length with a match counts."""
RECALLED = 1024
"""Tokens of a DP group that one call of `recall` writes."""


def resolve(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(batch, last_tokens, lengths, drafts) → (batch, lengths): the batch with every `FROM_DEVICE`
    replaced, and the lengths after the step if all drafts are right."""
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


def recall(programs: TokenPrograms, _any: Bucket) -> Program:
    """(history, words) → history: writes `RECALLED` tokens a DP group (`recall_words`)."""
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
    """Returns int32 `[groups, 3, tokens]`: slot, place in the sequence, and id of each token.
    `tokens` is a multiple of `RECALLED`; padding names a slot that does not exist."""
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


_ANY = Bucket(1, 1)


class StepEnd(NamedTuple):
    """A step whose tokens are sampled; all arrays are on the attention mesh."""

    plan: StepPlan
    batch: jax.Array
    """Batch array of the step, with `FROM_DEVICE` resolved."""
    table: jax.Array
    stream: Sequence[jax.Array]
    """Arrays that add up to the residual stream after the last layer (`TokenPrograms.stream`)."""
    sampled: jax.Array
    """Sampled tokens, in the form of `Finished.sampled`."""
    last: jax.Array
    """int32 [groups, slots]: every slot's last token, which is not in the cache."""
    lengths: jax.Array
    """int32 [groups, slots]: tokens of every slot in the cache, without rejected drafts."""
    drafts: jax.Array
    """int32 [groups, slots, drafts]: drafts that the step verified. A slot for which no new ones
    are proposed keeps them."""


class DraftingExecutables(NamedTuple):
    """Drafting programs of one bucket. Where prediction modules make the drafts, the two programs
    of `PromptLookup` are None."""

    resolve: jax.stages.Compiled
    draft: jax.stages.Compiled | None = None
    recall: jax.stages.Compiled | None = None


def drafting_executables(
    programs: TokenPrograms, bucket: Bucket, get: Get
) -> DraftingExecutables | None:
    """Collects the drafting programs of one bucket; None if the deployment has no drafts."""
    if not programs.deployment.drafts:
        return None
    tokens = bucket.of_tokens.undrafted
    if programs.config.modules:
        return DraftingExecutables(get(resolve, tokens))
    return DraftingExecutables(get(resolve, tokens), get(draft, tokens), get(recall, _ANY))


class PromptLookup:
    """Drafter without weights; keeps the tokens of every sequence on the device."""

    def __init__(self, programs: TokenPrograms, put: Callable[[np.ndarray], jax.Array]):
        self._put = put
        self._groups, self._slots = programs.groups, programs.slots
        self._width = history_width(programs)
        shape = programs.groups, programs.slots, self._width
        sharding = cached_sharding(programs.mesh, ROWS)
        lanes = range(programs.deployment.lanes)
        self._said = [sharded_zeros(shape, np.dtype(np.int32), sharding) for _ in lanes]

    def take_in(self, executables: DraftingExecutables, plan: StepPlan) -> None:
        """Adds the tokens that the plan reports of sequences, `RECALLED` in each call."""
        assert executables.recall is not None
        words = recall_words(plan.said, self._groups, self._slots)
        at_once = RECALLED
        for start in range(0, words.shape[2], at_once):
            some = self._put(np.ascontiguousarray(words[:, :, start : start + at_once]))
            self._said[plan.lane] = executables.recall(self._said[plan.lane], some)

    def draft(self, executables: DraftingExecutables, end: StepEnd) -> jax.Array:
        """Proposes the tokens that followed an earlier occurrence of each slot's last tokens."""
        lane = end.plan.lane
        assert executables.draft is not None
        self._said[lane], drafts = executables.draft(
            self._said[lane], end.batch, end.last, end.lengths
        )
        return drafts


class PassStart(NamedTuple):
    """Inputs of a pass on one DP group."""

    hidden: Float[Array, "tokens d_model"]
    """Hidden states, in the form that `Prediction.enter` takes."""
    batch: Int[Array, " width"]
    """Batch row in the layout of `BatchLayout`: `token_ids` are the tokens that follow each row,
    and `kv_length` counts the rows' own positions."""


def first_pass(
    programs: TokenPrograms,
    tokens: int,
    x: Float[Array, "tokens d_model"],
    batch: Int[Array, " width"],
    sampled: Int[Array, "slots rows"],
    lengths: Int[Array, " slots"],
    head: Sequence[Array],
) -> PassStart:
    """Builds the first pass after a step, from all its rows but those of rejected drafts.

    Args:
      x: the residual stream after the last layer.
      batch: the step's batch row, without `FROM_DEVICE`.
      sampled: tokens that the step sampled in this DP group.
      lengths: tokens of each slot in the cache, without rejected drafts.
    """
    fields = programs.layout(tokens).fields(batch)
    start, counts = fields["query_start"], fields["sample"]
    fed = jnp.diff(start)
    held = jnp.where(fed > 0, fed - (fields["kv_length"] - lengths), 0)
    slot, offset, query_start = _rows(held, tokens)
    row = jnp.minimum(start[slot] + offset, tokens - 1)
    place = offset - (fed - counts)[slot]  # among the slot's sampled tokens
    drawn = sampled[slot, jnp.clip(place, 0, sampled.shape[1] - 1)]
    fed_next = fields["token_ids"][jnp.minimum(row + 1, tokens - 1)]
    # The row behind the last one of a prompt's chunk belongs to another sequence.
    known, upcoming = _upcoming(programs, fields)
    fed_next = jnp.where((counts[slot] == 0) & (place == -1), known[slot], fed_next)
    fields |= {
        "token_ids": _a_token(jnp.where(place >= 0, drawn, fed_next)),
        "query_start": query_start,
        "kv_length": jnp.where(fed > 0, lengths, 0),
        "upcoming": upcoming,
    }
    block = programs.templates.head.merge(head)
    own, hidden = programs.config.own_heads, x[row]
    hidden = hidden if own else widened(programs.config, block.normed(hidden))
    return PassStart(hidden, _joined(fields))


def enter_module(
    programs: TokenPrograms,
    tokens: int,
    start: PassStart,
    embedding: Sequence[Array],
    module: Sequence[Array],
) -> Float[Array, "tokens d_model"]:
    """Returns the input of the module's layer."""
    fields = programs.layout(tokens).fields(start.batch)
    with jax.named_scope("predict"):
        embedded = programs.templates.embedding.merge(embedding)(fields["token_ids"])
        return programs.templates.prediction.merge(module).enter(start.hidden, embedded)


def leave_module(
    programs: TokenPrograms,
    tokens: int,
    x: Float[Array, "tokens d_model"],
    batch: Int[Array, " width"],
    ahead: int | Int[Array, ""],
    module: Sequence[Array],
    head: Sequence[Array],
) -> tuple[Float[Array, "tokens d_model"], Int[Array, " slots"]]:
    """Returns the module's hidden states, and the draft after each slot's last row.

    Args:
      x: output of the module's layer.
      batch: batch row of the pass.
      ahead: distance of the draft's position from `kv_length`.
    """
    fields = programs.layout(tokens).fields(batch)
    block = programs.templates.prediction.merge(module)
    hidden = block.leave(x)
    last = jnp.maximum(fields["query_start"][1:] - 1, 0)
    with jax.named_scope("head"):
        logits = block.logits(hidden[last], programs.templates.head.merge(head))
    # The same noise as in the model's own draw at that position: similar logits give equal tokens.
    state = sampler_state(fields | {"kv_length": fields["kv_length"] + ahead})
    return hidden, _a_token(drawn_tokens(logits, state, programs.config.vocab))


def next_pass(
    programs: TokenPrograms,
    tokens: int,
    hidden: Float[Array, "tokens d_model"],
    batch: Int[Array, " width"],
    draft: Int[Array, " slots"],
    *,
    again: bool,
    longest: int | Int[Array, ""],
) -> PassStart:
    """Builds the pass after one that gave these hidden states and drafts.

    Args:
      again: True runs the same module again, on one row of each slot that samples; False the next
        module, on the same rows, each one token further.
      longest: positions that the step's page table has room for.
    """
    fields = programs.layout(tokens).fields(batch)
    start = fields["query_start"]
    last = jnp.maximum(start[1:] - 1, 0)
    if again:
        runs = (fields["sample"] > 0) & (fields["kv_length"] < longest)
        runs = runs.astype(jnp.int32)
        slot, _, query_start = _rows(runs, tokens)
        length = jnp.where(runs > 0, fields["kv_length"] + 1, 0)
        fields |= {"token_ids": draft[slot], "query_start": query_start, "kv_length": length}
        return PassStart(hidden[last[slot]], _joined(fields))
    slot, _, _ = _rows(jnp.diff(start), tokens)
    row = jnp.arange(tokens, dtype=jnp.int32)
    further = fields["token_ids"][jnp.minimum(row + 1, tokens - 1)]
    known, upcoming = _upcoming(programs, fields)
    behind = jnp.where(known >= 0, known, draft)
    fields |= {
        "token_ids": jnp.where(row == last[slot], behind[slot], further),
        "upcoming": upcoming,
    }
    return PassStart(hidden, _joined(fields))


def _rows(
    counts: Int[Array, " slots"], tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"], Int[Array, " slots_plus_one"]]:
    """Lays out slots with these numbers of rows one after another. Returns each row's slot and its
    place there, and the start of each slot. Rows behind the last slot count as part of it."""
    start = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    row = jnp.arange(tokens, dtype=jnp.int32)
    slot = jnp.sum(row[:, None] >= start[None, 1:], axis=1, dtype=jnp.int32)
    slot = jnp.minimum(slot, counts.shape[0] - 1)
    return slot, jnp.maximum(row - start[slot], 0), start


def _upcoming(
    programs: TokenPrograms, fields: dict[str, Array]
) -> tuple[Int[Array, " slots"], Int[Array, " words"]]:
    """Takes the next of each slot's upcoming tokens; returns them and the field without them."""
    rest = fields["upcoming"].reshape(programs.slots, -1)
    shifted = jnp.pad(rest[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return rest[:, 0], shifted.reshape(-1)


def _a_token(drawn: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Returns valid token ids; a placeholder becomes some token."""
    return jnp.maximum(drawn, 0)


def _joined(fields: dict[str, Array]) -> Int[Array, " width"]:
    return jnp.concatenate([*fields.values()])
