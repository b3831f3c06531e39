"""What one lane does next, as plain data: decided once by the leader, followed by everybody.

The scheduler (`engine/scheduler.py`) writes step plans, `cluster/control.py` carries them to the
followers, and the driver turns them into the two int32 arrays that every attention program of the
step takes. Nothing here knows requests, queues or JAX devices.
"""

import msgspec
import numpy as np

from jaxserve.step import FROM_DEVICE, BatchLayout, Bucket

__all__ = [
    "FROM_DEVICE",
    "Bucket",
    "SequenceRow",
    "StepPlan",
    "batch_array",
    "page_table_array",
]


class SequenceRow(msgspec.Struct, frozen=True):
    """The part of one sequence in one step."""

    slot: int
    """Row of the lane's state in its DP group, 0 … slots-1."""
    token_ids: list[int]
    """The tokens of this step; `[FROM_DEVICE]` for a decode token the host has not seen yet."""
    kv_length: int
    """Tokens of the sequence in the cache after this step."""
    page_ids: list[int]
    """Every page of the sequence so far, in order; they cover `kv_length` tokens."""
    sample: bool
    """Whether the last token is followed by sampling (False for a prefill chunk with a rest)."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """uint32; the noise of a draw depends on it and on the token's position alone."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step of one lane, for all DP groups of its domain."""

    lane: int
    number: int
    """Global and ascending over all lanes; followers check that none is missing."""
    bucket: Bucket
    groups: list[list[SequenceRow]]
    """One list a DP group, sorted by slot. A group without work still takes part, all padding."""


def batch_array(plan: StepPlan, slots: int) -> np.ndarray:
    """The plan as int32 `[dp, BatchLayout.width]` (see `BatchLayout`)."""
    layout = BatchLayout(plan.bucket.tokens, slots)
    batch = np.zeros((len(plan.groups), layout.width), np.int32)
    for group, rows in enumerate(plan.groups):
        fields = layout.fields(batch[group])
        lengths = np.zeros(slots, np.int32)
        tokens: list[int] = []
        for row in rows:
            lengths[row.slot] = len(row.token_ids)
            tokens += row.token_ids
            fields["kv_length"][row.slot] = row.kv_length
            fields["sample"][row.slot] = row.sample
            fields["top_k"][row.slot] = row.top_k
            for name in ("temperature", "top_p", "min_p"):
                fields[name].view(np.float32)[row.slot] = getattr(row, name)
            fields["seed"].view(np.uint32)[row.slot] = row.seed
        fields["token_ids"][: len(tokens)] = tokens
        np.cumsum(lengths, out=fields["query_start"][1:])
    return batch


def page_table_array(plan: StepPlan, slots: int) -> np.ndarray:
    """The plan's page tables as int32 `[dp, slots, bucket.pages]`; unused entries are page 0."""
    table = np.zeros((len(plan.groups), slots, plan.bucket.pages), np.int32)
    for group, rows in enumerate(plan.groups):
        for row in rows:
            table[group, row.slot, : len(row.page_ids)] = row.page_ids
    return table
