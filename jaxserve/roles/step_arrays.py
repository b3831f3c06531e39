"""Turns step plans into the int32 arrays that the programs of a step take: the batch array, the
page table, and the rules of requests.

Programs read the arrays by the same layouts. Every process of the attention role holds one
`LaneState` for each lane and gives it each of the lane's plans once, in order; equal plans give
equal arrays in every process. `rules_array` and `targets_array` serve only steps with such options.
Uses NumPy: no JAX, no devices.
"""

import sys
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.roles.layout import MAX_BIASES, MAX_LOGPROBS
from jaxserve.roles.step_plan import SlotRules, StepPlan

FROM_DEVICE = -1
"""Stands for a value that only the device knows. As the first token id of a row: the token that its
slot sampled last. As a later token id: the draft that follows it. As a KV length: the length after
the slot's steps so far."""

REJECTED = -3
"""Returned by a step with drafts in place of all tokens behind the first wrong draft."""

SAMPLER_FIELDS = 5
"""Words for each slot in the batch array's sampler block: temperature to seed."""


class BatchLayout(msgspec.Struct, frozen=True):
    """Where each field of a step lies in a DP group's row of the batch array.

    The batch array is int32 `[dp, width]`; its fields, in order: `token_ids[tokens]`,
    `query_start[slots + 1]`, `kv_length[slots]`, `sample[slots]`, `spread[1]`, and per slot the
    sampler's temperature, top_k, top_p, min_p and seed (floats and the uint32 seed as raw bits).
    Slots without tokens in this step have an empty query range. `sample` is the number of a slot's
    last tokens after which one is sampled: 0, 1, or 1 + its drafts. `spread` is the slot of the
    prompt whose chunk several groups compute, counted from 1; 0: none here. With prediction modules
    `upcoming[slots * modules]` follows: the prompt tokens behind a slot's last one, -1 where they
    are unknown.
    """

    tokens: int
    slots: int
    modules: int = 0

    @property
    def width(self) -> int:
        return self.tokens + (self.slots + 1) + 1 + (2 + SAMPLER_FIELDS + self.modules) * self.slots

    def fields(self, row: Any) -> dict[str, Any]:
        """Cuts one row (NumPy or JAX, shape `[width]`) into its named fields."""
        sizes = {
            "token_ids": self.tokens,
            "query_start": self.slots + 1,
            "kv_length": self.slots,
            "sample": self.slots,
            "spread": 1,
            "temperature": self.slots,
            "top_k": self.slots,
            "top_p": self.slots,
            "min_p": self.slots,
            "seed": self.slots,
            "upcoming": self.slots * self.modules,
        }
        return _cut(row, sizes)


class RulesLayout(msgspec.Struct, frozen=True):
    """Layout of a slot's row in the rules array.

    The rules array is int32 `[dp, slots, width]`. It exists only for steps in which some request
    has rules (penalties, biases, banned or allowed tokens). Such a step has its temperatures here,
    and 0 in the batch array, so that each token is drawn once, after the rules. Floats and bitmasks
    are raw bits; bit t % 32 of word t // 32 of a bitmask stands for token t.
    """

    vocab: int

    @property
    def words(self) -> int:
        """Words of a bitmask over the vocabulary."""
        return -(-self.vocab // 32)

    @property
    def width(self) -> int:
        return sum(self._sizes().values())

    def fields(self, rows: Any) -> dict[str, Any]:
        """Cuts rows (NumPy or JAX, shape `[..., width]`) into named fields `[..., size]`."""
        return _cut(rows, self._sizes())

    def _sizes(self) -> dict[str, int]:
        return {
            "temperature": 1,
            "repetition": 1,
            "presence": 1,
            "frequency": 1,
            "prompt_length": 1,
            "fresh": 1,
            "masked": 1,
            "token_ids": MAX_BIASES,
            "biases": MAX_BIASES,
            "allowed": self.words,
            "prompt": self.words,
        }


def _cut(rows: Any, sizes: dict[str, int]) -> dict[str, Any]:
    fields, start = {}, 0
    for name, size in sizes.items():
        fields[name] = rows[..., start : start + size]
        start += size
    return fields


class StepArrays(NamedTuple):
    """Arrays of one step. They do not change while something refers to them, because the device may
    read them until the step ends."""

    batch: np.ndarray
    """int32 `[groups, BatchLayout.width]`."""
    page_table: np.ndarray
    """int32 `[groups, slots, bucket.pages * tables]`; entries beyond the pages of a sequence are 0.

    Includes sequences that take no part in the step.
    """


class LaneState:
    """State of the sequences in one lane's slots, accumulated from the lane's plans.

    Args:
      groups: DP groups.
      slots: Slots of each group.
      pages: Most pages of a sequence.
      modules: Prediction modules, which take the tokens behind a prompt's chunk.
      tables: Page tables, whose entries of a page lie side by side.
    """

    def __init__(self, groups: int, slots: int, pages: int, modules: int = 0, tables: int = 1):
        self._groups, self._slots, self._modules = groups, slots, modules
        self._tables = tables
        kinds = {"temperature": "f4", "top_k": "i4", "top_p": "f4", "min_p": "f4", "seed": "u4"}
        self._sampling = {name: np.zeros(groups * slots, kind) for name, kind in kinds.items()}
        self._page_tables = _PageTables(groups, slots, pages * tables)
        self._before: tuple[Any, ...] = (None,)
        """The last step that may be copied: what makes steps alike, its batch array, and the places
        of its rows' lengths in it. (None,): the last step may not be."""

    def step(self, plan: StepPlan) -> StepArrays:
        """Updates the state from a plan and returns the arrays of its step. The page table is that
        of the step before, the same object, if nothing in it has changed."""
        for sequence in plan.new_sequences:
            for name, values in self._sampling.items():
                values[sequence.row] = getattr(sequence, name)
        if plan.new_sequences or plan.pages:
            self._page_tables.change([new.row for new in plan.new_sequences], plan.new_pages)
        table = self._page_tables.of_step(plan.bucket.pages * self._tables)
        return StepArrays(self._batch(plan), table)

    def _batch(self, plan: StepPlan) -> np.ndarray:
        """Builds the batch array. Most steps only lengthen the sequences of the step before: such a
        step copies that one's array, which the device may still read, and writes the lengths."""
        groups, slots, part = self._groups, self._slots, len(plan.columns) // 4
        same = plan.bucket.tokens, plan.tokens, plan.columns[: 2 * part], plan.columns[3 * part :]
        alone = plan.new_sequences or plan.options or plan.on_device or plan.upcoming or plan.spread
        if same == self._before[0] and not alone:
            np.put(batch := self._before[1].copy(), self._before[2], plan.kv_lengths)
            return batch
        layout = BatchLayout(plan.bucket.tokens, slots, self._modules)
        batch = np.zeros((groups, layout.width), np.int32)
        fields = layout.fields(batch)

        # The columns of all slots, with 0 where a slot takes no part.
        dense = np.zeros((3, groups * slots), np.int32)
        dense[:, plan.rows] = plan.numbers[1:]
        dense[1, plan.unknown_lengths] = FROM_DEVICE
        counts, fields["kv_length"][...], fields["sample"][...] = dense.reshape(3, groups, slots)
        ends = fields["query_start"][:, 1:]
        np.cumsum(counts, axis=1, dtype=np.int32, out=ends)
        fields["token_ids"][np.arange(plan.bucket.tokens) < ends[:, -1:]] = plan.token_ids
        for row in plan.spread:
            fields["spread"][row // slots] = 1 + row % slots
        if self._modules:
            upcoming = np.frombuffer(plan.upcoming, "<i4").reshape(-1, 1 + self._modules)
            own = fields["upcoming"].reshape(groups, slots, self._modules)
            own[...] = -1
            own[upcoming[:, 0] // slots, upcoming[:, 0] % slots] = upcoming[:, 1:]
        takes_part = counts > 0
        for name, values in self._sampling.items():
            np.multiply(values.view(np.int32).reshape(groups, slots), takes_part, out=fields[name])
        if plan.has_rules and not plan.bucket.drafts:
            # The rules array has the temperatures; in steps with drafts these are drawn first.
            fields["temperature"][...] = 0
        self._before = (None,)
        if not alone:
            places = layout.fields(np.arange(batch.size).reshape(batch.shape))["kv_length"]
            self._before = same, batch, places.reshape(-1)[plan.rows]
        return batch


class _StepTable:
    """One copy of a lane's page table, passed to steps."""

    def __init__(self, rows: int, pages: int):
        self.array = np.zeros((rows, pages), np.int32)
        self.stale = np.ones(rows, bool)
        """True for rows that have changed since the copy was last brought up to date."""

    @property
    def is_free(self) -> bool:
        """True if neither a view nor a JAX array refers to the copy's memory any more."""
        ours = 2  # the attribute, and the argument of the call
        return sys.getrefcount(self.array) == ours


class _PageTables:
    """Page table of a lane, in several copies.

    Few rows change from step to step, and a table may have megabytes. Steps therefore get the copy
    of the step before while nothing changes, and then one that nothing refers to any more, brought
    up to date.
    """

    def __init__(self, groups: int, slots: int, pages: int):
        self._groups, self._slots = groups, slots
        self._newest = np.zeros((groups * slots, pages), np.int32)
        self._tables: list[_StepTable] = []
        self._current: np.ndarray | None = None

    def change(self, new_rows: list[int], new_pages: np.ndarray) -> None:
        """Records new pages, int32 `[3, pages]`: row, index, page id. Clears `new_rows` first."""
        self._current, (rows, places, page_ids) = None, new_pages
        self._newest[new_rows] = 0
        self._newest[rows, places] = page_ids
        for table in self._tables:
            table.stale[new_rows] = table.stale[rows] = True

    def of_step(self, pages: int) -> np.ndarray:
        """Returns the current table, int32 `[groups, slots, pages]`."""
        if self._current is not None and self._current.shape[2] == pages:
            return self._current
        self._tables = [table for table in self._tables if table.array.shape[1] == pages]
        table = next((table for table in self._tables if table.is_free), None)
        if table is None:
            table = _StepTable(len(self._newest), pages)
            self._tables.append(table)
        table.array[table.stale] = self._newest[table.stale, :pages]
        table.stale[:] = False
        self._current = table.array.reshape(self._groups, self._slots, pages)
        return self._current


def rules_array(plan: StepPlan, groups: int, slots: int, vocab: int) -> np.ndarray:
    """The plan's rules as int32 `[groups, slots, RulesLayout.width]`.

    Raises:
      ValueError: a row has more biases than fit.
    """
    layout = RulesLayout(vocab)
    array = np.zeros((groups * slots, layout.width), np.int32)
    fields = layout.fields(array)
    fields["repetition"].view(np.float32)[...] = 1.0
    for name in ("prompt_length", "token_ids"):
        fields[name][...] = np.iinfo(np.int32).max  # counts no token; ids beyond every vocabulary
    fields["temperature"].view(np.float32)[plan.rows, 0] = plan.temperatures
    for options in plan.options:
        if options.rules is not None:
            _write_rules(
                options.rules, {name: field[options.row] for name, field in fields.items()}
            )
    return array.reshape(groups, slots, layout.width)


def _write_rules(rules: SlotRules, fields: dict[str, np.ndarray]) -> None:
    for name in ("repetition", "presence", "frequency"):
        fields[name].view(np.float32)[0] = getattr(rules, f"{name}_penalty")
    if rules.counts_from is not None:
        fields["prompt_length"][0] = rules.counts_from
    fields["fresh"][0] = rules.fresh
    fields["masked"][0] = bool(rules.allowed)
    count = len(rules.bias_ids) // 4
    if count > MAX_BIASES:
        raise ValueError(f"{count} biases in a slot, at most {MAX_BIASES} fit")
    for name, data in (
        ("token_ids", rules.bias_ids),
        ("biases", rules.biases),
        ("allowed", rules.allowed),
        ("prompt", rules.prompt),
    ):
        words = np.frombuffer(data, "<i4")
        fields[name][: len(words)] = words


def targets_array(plan: StepPlan, groups: int, slots: int) -> np.ndarray:
    """Returns the plan's targets by token, int32 `[groups, tokens]`, 0 elsewhere."""
    targets = np.zeros((groups, plan.bucket.tokens), np.int32)
    starts = plan.token_starts(slots)
    for options in plan.options:
        group, start = starts[options.row]
        targets[group, start : start + len(options.targets)] = options.targets
    return targets


UNWANTED = -2
"""Fills a row of `wanted_array` that asks for nothing."""


def wanted_array(plan: StepPlan, groups: int, slots: int) -> np.ndarray:
    """Returns the tokens whose log-probabilities slots want beside their sampled token's, int32
    `[groups, slots, MAX_LOGPROBS]`; -1 stands for a likely one."""
    wanted = np.full((groups * slots, MAX_LOGPROBS), UNWANTED, np.int32)
    for options in plan.options:
        if options.logprobs is not None:
            wanted[options.row] = -1
            wanted[options.row, : len(options.logprob_ids)] = options.logprob_ids
    return wanted.reshape(groups, slots, MAX_LOGPROBS)
