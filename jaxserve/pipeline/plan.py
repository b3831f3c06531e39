"""What one lane does next, as plain data: decided once by the leader, followed by everybody.

The scheduler (`engine/scheduler.py`) writes step plans, `cluster/control.py` carries them to the
followers, and the driver turns them into the two int32 arrays that every attention program of the
step takes. Nothing here knows requests, queues or JAX devices.
"""

import msgspec
import numpy as np

from jaxserve.step import FROM_DEVICE, MAX_BIASES, BatchLayout, Bucket, RulesLayout

__all__ = [
    "FROM_DEVICE",
    "Bucket",
    "SequenceRow",
    "SlotRules",
    "StepPlan",
    "batch_array",
    "page_table_array",
    "rules_array",
    "targets_array",
]


class SlotRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What changes one sequence's logits in one step, where something does (`sampler.adjust`).

    Bytes are little-endian words, as the rules array takes them: they are made once a request and
    copied in every step.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    counts_from: int | None = None
    """Prompt length of a sequence with penalties: tokens from here on are counted. Such a sequence
    has rules in every step, so that none of its tokens is missed."""
    fresh: bool = False
    """The slot has just got this sequence: its counts start now."""
    prompt: bytes = b""
    """Bitmask of the prompt's tokens, where `fresh` and repetition is penalised."""
    bias_ids: bytes = b""
    biases: bytes = b""
    """int32 token ids and what is added to their logits, float32."""
    allowed: bytes = b""
    """Bitmask of the tokens that may come; empty: all."""


class SequenceRow(msgspec.Struct, frozen=True, omit_defaults=True):
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
    rules: SlotRules | None = None
    logprobs: int | None = None
    """Alternatives to report beside the sampled token's log-probability; None: report nothing."""
    targets: list[int] = []
    """The tokens that follow those of `token_ids`, where their log-probabilities are wanted."""
    target_logprobs: int = 0
    """Alternatives to report beside those."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step of one lane, for all DP groups of its domain."""

    lane: int
    number: int
    """Global and ascending over all lanes; followers check that none is missing."""
    bucket: Bucket
    groups: list[list[SequenceRow]]
    """One list a DP group, sorted by slot. A group without work still takes part, all padding."""

    @property
    def has_rules(self) -> bool:
        """Whether some row has rules."""
        return any(row.rules is not None for rows in self.groups for row in rows)

    @property
    def has_logprobs(self) -> bool:
        """Whether some sampled token's log-probability is wanted."""
        return any(row.sample and row.logprobs is not None for rows in self.groups for row in rows)

    @property
    def has_targets(self) -> bool:
        """Whether some prompt token's log-probability is wanted."""
        return any(row.targets for rows in self.groups for row in rows)


def batch_array(plan: StepPlan, slots: int) -> np.ndarray:
    """The plan as int32 `[dp, BatchLayout.width]` (see `BatchLayout`)."""
    layout, has_rules = BatchLayout(plan.bucket.tokens, slots), plan.has_rules
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
                if name != "temperature" or not has_rules:  # else the rules array has it
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


def rules_array(plan: StepPlan, slots: int, vocab: int) -> np.ndarray:
    """The plan's rules as int32 `[dp, slots, RulesLayout.width]`."""
    layout = RulesLayout(vocab)
    array = np.zeros((len(plan.groups), slots, layout.width), np.int32)
    fields = layout.fields(array)
    fields["repetition"].view(np.float32)[...] = 1.0
    for name in ("prompt_length", "token_ids"):
        fields[name][...] = np.iinfo(np.int32).max  # counts nothing; beyond every vocabulary
    for group, rows in enumerate(plan.groups):
        for row in rows:
            fields["temperature"].view(np.float32)[group, row.slot] = row.temperature
            if row.rules is not None:
                mine = {name: field[group, row.slot] for name, field in fields.items()}
                _write_rules(row.rules, mine)
    return array


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


def targets_array(plan: StepPlan) -> np.ndarray:
    """The plan's targets as int32 `[dp, tokens]`, each at its token's place; elsewhere 0."""
    targets = np.zeros((len(plan.groups), plan.bucket.tokens), np.int32)
    for group, rows in enumerate(plan.groups):
        start = 0
        for row in rows:
            targets[group, start : start + len(row.targets)] = row.targets
            start += len(row.token_ids)
    return targets
