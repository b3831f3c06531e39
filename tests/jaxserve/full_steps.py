"""Step plans in full: every row with everything about its sequence, whatever earlier plans said.

Plans say only what is new. `Replica` keeps what they have said, as workers do but in dictionaries
and lists, and `arrays` is the slow way from full rows to the arrays of a step; neither shares code
with `roles/step_arrays.py`.
"""

from dataclasses import dataclass, field

import numpy as np

from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_arrays import BatchLayout
from jaxserve.roles.step_plan import NewSequence, RowOptions, StepPlan
from jaxserve.roles.written_steps import SequenceRow


@dataclass
class FullStep:
    """A step with all of its rows; equal to another whose rows are equal."""

    lane: int
    number: int
    bucket: Bucket
    groups: list[list[SequenceRow]]
    plan: StepPlan | None = field(default=None, compare=False)
    slots: int = field(default=0, compare=False)
    rings: np.ndarray | None = field(default=None, compare=False)
    """Page table of rings, `[groups, slots, pages]`."""

    @property
    def spread(self) -> list[tuple[int, SequenceRow]]:
        """Groups and rows that feed parts of one chunk."""
        slots = {divmod(row, self.slots) for row in self.plan.spread}
        rows = ((group, row) for group, rows in enumerate(self.groups) for row in rows)
        return [(group, row) for group, row in rows if (group, row.slot) in slots]

    def span(self, group: int, row: SequenceRow) -> tuple[int, int]:
        """First token that a row gets in its pages, and the end of the last."""
        rows = [one for _, one in self.spread] if (group, row) in self.spread else [row]
        starts = (one.kv_length - len(one.token_ids) for one in rows)
        return min(starts), max(one.kv_length for one in rows)


class Replica:
    """A worker's state of one lane."""

    def __init__(self, groups: int, slots: int, tables: int = 1):
        self._groups, self._slots, self._tables = groups, slots, tables
        self._sampling: dict[int, NewSequence] = {}
        self._pages: dict[int, list[int]] = {}

    def full(self, plan: StepPlan) -> FullStep:
        """Takes in a plan, and returns it in full."""
        for sequence in plan.new_sequences:
            self._sampling[sequence.row] = sequence
            self._pages[sequence.row] = []
        for row, index, page_id in plan.new_pages.T.tolist():
            index, table = divmod(index, self._tables)
            if table:
                continue
            assert index == len(self._pages[row]), "pages come in order, each once"
            self._pages[row].append(page_id)
        options = {one.row: one for one in plan.options}
        assert list(options) == sorted(options)
        groups: list[list[SequenceRow]] = [[] for _ in range(self._groups)]
        tokens = plan.token_ids.tolist()
        columns = [plan.rows, plan.token_counts, plan.kv_lengths, plan.sample_counts]
        unknown = plan.unknown_lengths.tolist()
        assert unknown == sorted(set(unknown))
        assert plan.rows.tolist() == sorted(set(plan.rows.tolist()))
        for row, count, kv_length, sampled in zip(*map(np.ndarray.tolist, columns), strict=True):
            sampling, own = self._sampling[row], options.get(row, RowOptions(row))
            groups[row // self._slots].append(
                SequenceRow(
                    row % self._slots,
                    tokens[:count],
                    kv_length,
                    list(self._pages[row]),
                    sampled > 0,
                    sampling.temperature,
                    sampling.top_k,
                    sampling.top_p,
                    sampling.min_p,
                    sampling.seed,
                    own.rules,
                    own.logprobs,
                    own.targets,
                    own.target_logprobs,
                    drafts=max(sampled - 1, 0),
                    length_on_device=row in unknown,
                )
            )
            del tokens[:count]
        assert not tokens
        return FullStep(plan.lane, plan.number, plan.bucket, groups, plan, self._slots)


def arrays(step: FullStep, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch array and the page table, row by row; rows that take no part have -1 in the latter,
    since what is there means nothing."""
    layout = BatchLayout(step.bucket.tokens, slots)
    has_rules = any(row.rules is not None for rows in step.groups for row in rows)
    batch = np.zeros((len(step.groups), layout.width), np.int32)
    table = np.full((len(step.groups), slots, step.bucket.pages), -1, np.int32)
    for group, rows in enumerate(step.groups):
        fields = layout.fields(batch[group])
        lengths = np.zeros(slots, np.int32)
        tokens: list[int] = []
        for row in rows:
            lengths[row.slot] = len(row.token_ids)
            tokens += row.token_ids
            fields["kv_length"][row.slot] = -1 if row.length_on_device else row.kv_length
            fields["sample"][row.slot] = row.sample * (1 + row.drafts)
            fed = bool(row.token_ids)
            fields["top_k"][row.slot] = row.top_k * fed
            for name in ("temperature", "top_p", "min_p"):
                if name != "temperature" or not has_rules or step.bucket.drafts:
                    fields[name].view(np.float32)[row.slot] = getattr(row, name) * fed
            fields["seed"].view(np.uint32)[row.slot] = row.seed * fed
            table[group, row.slot] = 0
            page_ids = row.page_ids[: step.bucket.pages]
            table[group, row.slot, : len(page_ids)] = page_ids
        fields["token_ids"][: len(tokens)] = tokens
        fields["spread"][:] = sum(1 + row.slot for at, row in step.spread if at == group)
        np.cumsum(lengths, out=fields["query_start"][1:])
    return batch, table
