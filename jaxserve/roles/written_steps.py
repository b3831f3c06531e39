"""Steps that are written by hand: by benchmarks, preflight checks and tests, without a scheduler.

A written step describes its sequences completely, where a scheduler's `StepPlan` adds to earlier
ones. The serving path does not import this module.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_plan import NewSequence, RowOptions, SlotRules, StepPlan, words


class SequenceRow(msgspec.Struct, frozen=True, kw_only=False):
    """One sequence in one step; see `plan_of_rows`."""

    slot: int
    """In its DP group, 0 … slots-1."""
    token_ids: list[int]
    kv_length: int
    page_ids: list[int]
    """Every page of the sequence so far, in order; they cover `kv_length` tokens."""
    sample: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    rules: SlotRules | None = None
    logprobs: int | None = None
    targets: list[int] = []
    target_logprobs: int = 0
    drafts: int = 0
    """Number of the last tokens that are drafts."""
    length_on_device: bool = False
    """Whether `kv_length` is only the least that it may be."""
    upcoming: list[int] = []
    """One for each prediction module, where `sample` is false: the tokens behind `token_ids`."""


def plan_of_rows(
    lane: int,
    number: int,
    bucket: Bucket,
    groups: Sequence[Sequence[SequenceRow]],
    *,
    slots: int,
    rings: int = 0,
) -> StepPlan:
    """Makes a step that needs no earlier plan, because it describes its sequences completely.

    Args:
      groups: the sequences of each DP group, ascending by slot.
      slots: slots of a DP group.
      rings: pages of a DP group for layers with a window (`kv_cache.ring_pages`). They hold whole
        sequences if these have lower page ids.
    """
    rows = [(group * slots + row.slot, row) for group, own in enumerate(groups) for row in own]
    columns = [
        (at, len(row.token_ids), row.kv_length, row.sample * (1 + row.drafts)) for at, row in rows
    ]
    unknown = [at for at, row in rows if row.length_on_device]
    tables = 2 if rings else 1
    pages = [
        (at, place * tables + table, page_id % rings if table else page_id)
        for at, row in rows
        for place, page_id in enumerate(row.page_ids)
        for table in range(tables)
    ]
    options = [
        RowOptions(
            at, row.rules, row.logprobs if row.sample else None, row.targets, row.target_logprobs
        )
        for at, row in rows
    ]
    has_rules = any(row.rules is not None for _, row in rows)
    upcoming = [(at, *row.upcoming) for at, row in rows if row.upcoming]
    temperatures = [row.temperature for _, row in rows] if has_rules else []
    return StepPlan(
        lane,
        number,
        bucket,
        columns=words(np.asarray(columns, np.int32).reshape(-1, 4).T),
        tokens=words(np.asarray([token for _, row in rows for token in row.token_ids])),
        new_sequences=[
            NewSequence(at, row.temperature, row.top_k, row.top_p, row.min_p, row.seed)
            for at, row in rows
        ],
        pages=words(np.asarray(pages, np.int32).reshape(-1, 3).T),
        options=[one for one in options if one != RowOptions(one.row)],
        row_temperatures=words(np.asarray(temperatures), "<f4"),
        on_device=words(np.asarray(unknown)),
        proposes=bucket.drafts > 0,
        upcoming=words(np.asarray(upcoming)),
    )
