"""Pure functions that compute the parts of a prediction module's pass; programs call them.

A pass is a step of one decoder layer whose batch array the device writes itself. Each row is a
hidden state with the token id that follows it. The module's layer runs at the rows' positions on
pages of its own, and the head makes a draft from each slot's last row (DeepSeek-V3 §2.2, xDeepServe
§4.6). Passes of different modules run on all rows of a step, so that each module has the KV of
whole prompts. With more drafts than modules, the last module runs again on one row for each slot,
one position further, on its own hidden state and draft.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.model.residual import widened
from jaxserve.roles.token_programs import TokenPrograms, drawn_tokens, sampler_state


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
