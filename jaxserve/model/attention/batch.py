"""Flat, ragged batch of a step, in the form that attention of every layer takes.

Built once a step from its int32 arrays (`roles/step_plan.py`), in the first program, and passed to
every layer.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int


class Shared(NamedTuple):
    """Values computed from positions alone, which attention layers with the same spec share."""

    angles: tuple[Float32[Array, "tokens half"], Float32[Array, "tokens half"]] | None = None
    """Cosine and sine of each token's angles (`rope.py`); None: layers compute them."""
    places: Any = ()
    """The walk of the attention kernels over the pages."""


class RaggedBatch(NamedTuple):
    """One DP group's batch: the tokens of several sequences, concatenated."""

    sequence_of_token: Int[Array, " tokens"]
    """Slot of each token's sequence; for padding tokens the last slot."""
    position: Int[Array, " tokens"]
    """Position of each token in its sequence; -1 for padding."""
    page_table: Int[Array, "slots pages"]
    """Page ids of each sequence, within the DP group's pool."""
    chunk_start: Int[Array, " tokens"]
    """Position of the first token in this batch of each token's sequence."""
    shared: tuple[Shared, ...] = ()
    """One entry for each of the model's attention specs (`family.with_shared`)."""
    own: Shared = Shared()
    """The entry of the layer that the batch is passed to."""
    token_ids: Int[Array, " tokens"] | None = None
    """For routers with a table of experts by token; None: the model has none."""
    drafts: Int[Array, " slots"] | None = None
    """Drafts at the end of each sequence, which may turn out wrong; None: no layer must know."""
    choice: Any = None
    """Columns behind a row of the residual: where layers share an indexer, the positions that the
    last one has chosen, [tokens, columns] (`mla.as_columns`)."""
    ring_table: Int[Array, "slots pages"] | None = None
    """Page ids of a layer's last tokens, where it has other rows in the page table's pages; None:
    all its rows are in pages of one table."""
    spread: Any = None
    """Pages that groups exchange (`exchanged_pages.py`); None: each computes its sequences."""

    def of_layer(self, spec: int) -> "RaggedBatch":
        """Returns the batch for a layer with the attention spec of this number."""
        return self._replace(shared=(), own=self.shared[spec]) if self.shared else self

    def exchanged(self, pages: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds what other groups have computed of a prompt to pages with this group's rows."""
        return self.spread.exchange(pages, self.page_table) if self.spread and pages else pages

    @property
    def where(self) -> tuple[Array, Array, Array]:
        """Page table, sequence and position of each token, as the cache kernels take them."""
        return self.page_table, self.sequence_of_token, self.position


def ragged_batch(
    query_start: Int[Array, " slots_plus_one"],
    kv_length: Int[Array, " slots"],
    page_table: Int[Array, "slots pages"],
    tokens: int,
) -> RaggedBatch:
    """Builds the batch from query ranges and KV lengths."""
    slot, position, chunk_start = positions(query_start, kv_length, tokens)
    return RaggedBatch(slot, position, page_table, chunk_start)


def positions(
    query_start: Int[Array, " slots_plus_one"], kv_length: Int[Array, " slots"], tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Slot, position and chunk start of every token; see `RaggedBatch`.

    Token t belongs to the slot s with query_start[s] <= t < query_start[s+1]; the last token of a
    sequence sits at position kv_length - 1.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)
    slot = jnp.sum(token[:, None] >= query_start[None, 1:], axis=1, dtype=jnp.int32)
    valid = slot < kv_length.shape[0]
    slot = jnp.minimum(slot, kv_length.shape[0] - 1)
    position = kv_length[slot] - (query_start[slot + 1] - token)
    chunk_start = kv_length[slot] - (query_start[slot + 1] - query_start[slot])
    return slot, jnp.where(valid, position, -1), chunk_start
