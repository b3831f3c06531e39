"""The next step of a lane as plain data: decided by the leader, carried out by all processes.

The scheduler (`engine/scheduler.py`) writes step plans, `fleet/control.py` carries them to the
followers, and every process of the attention role turns them into arrays (`roles/step_arrays.py`).
A plan adds to the lane's earlier plans: sampling parameters come once a sequence, page ids once a
page. Knows neither requests, queues nor JAX devices.

A *row* is a slot of a lane counted over all DP groups: `group * slots + slot`.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.roles.layout import Bucket, StepLoad


class SlotRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes to one sequence's logits in one step (`sampler.adjust`).

    Bytes are little-endian words in the form of the rules array: they are made once a request and
    copied in every step.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    counts_from: int | None = None
    """Prompt length of a sequence with penalties: tokens from here on are counted. Such a sequence
    has rules in every step, so that none of its tokens is missed."""
    fresh: bool = False
    """Whether the slot has just got this sequence, so that its counts start now."""
    prompt: bytes = b""
    """Bitmask of the prompt's tokens, if `fresh` and repetition is penalised."""
    bias_ids: bytes = b""
    biases: bytes = b""
    """int32 token ids, and float32 summands of their logits."""
    allowed: bytes = b""
    """Bitmask of the allowed tokens; empty: all."""


class NewSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of a sequence that takes a row, valid until the row gets another one.

    The row's earlier contents, pages included, are forgotten.
    """

    row: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """uint32; the noise of a draw depends on it and on the token's position alone."""


class SaidTokens(NamedTuple):
    """Cached tokens of a sequence that no step with proposals contains; drafts are looked up among
    a sequence's tokens, so the workers must be told."""

    row: int
    start: int
    """Place of the first one in the sequence."""
    tokens: bytes
    """int32."""


class RowOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of a row in a step: everything that it asks beyond a token."""

    row: int
    rules: SlotRules | None = None
    logprobs: int | None = None
    """Alternatives to report beside the sampled token's log-probability; None reports nothing. Only
    for rows that sample."""
    targets: list[int] = []
    """Tokens that follow those of the step, if their log-probabilities are wanted."""
    target_logprobs: int = 0
    """Alternatives to report beside the log-probabilities of the targets."""
    logprob_ids: list[int] = []
    """Tokens to report in place of the likeliest alternatives."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step of one lane, for all DP groups of its domain.

    It applies to the state that the lane's earlier plans have built up, each of them once and in
    order. A row that does not take part is not mentioned. A DP group without rows still takes part
    in the step, all padding.
    """

    lane: int
    number: int
    """Ascending over all lanes of the domain."""
    bucket: Bucket
    columns: bytes
    """int32 `[4, rows]`: `rows`, `token_counts`, `kv_lengths`, `sample_counts`."""
    tokens: bytes
    """int32 tokens of all rows, row after row: see `token_ids`."""
    new_sequences: list[NewSequence] = []
    pages: bytes = b""
    """int32 `[3, pages]`: see `new_pages`."""
    options: list[RowOptions] = []
    """Options of the rows that have any, ascending."""
    row_temperatures: bytes = b""
    """float32, one a row; only if a row has rules: see `temperatures`."""
    domain: int = 0
    """Number of the domain in its runtime; `lane` is one of the domain's lanes."""
    on_device: bytes = b""
    """int32: see `unknown_lengths`."""
    proposes: bool = False
    """Whether drafts are proposed after the step, for the next step of its sequences. False if
    steps are faster without drafts: the step then runs nothing for drafts."""
    said: list[SaidTokens] = []
    spread: list[int] = []
    """Rows, of different DP groups, that feed parts of one prompt's chunk. Each has pages for the
    whole chunk, and takes the others' parts over. A part may be empty, and ends with a page unless
    it is the chunk's last."""
    upcoming: bytes = b""
    """int32 `[n, 1 + modules]`, where prediction modules run: rows that are in the middle of their
    prompts, and the tokens behind those of the step; -1 where they are unknown."""

    def in_domain(self, domain: int) -> "StepPlan":
        """Returns the same step for this domain of the runtime."""
        return msgspec.structs.replace(self, domain=domain) if domain != self.domain else self

    @property
    def rows(self) -> np.ndarray:
        """The rows that take part, ascending: `group * slots + slot`."""
        return self.numbers[0]

    @property
    def token_counts(self) -> np.ndarray:
        """Tokens of each row in this step."""
        return self.numbers[1]

    @property
    def kv_lengths(self) -> np.ndarray:
        """Tokens of each row's sequence in the cache after this step; a lower bound for rows in
        `unknown_lengths`."""
        return self.numbers[2]

    @property
    def unknown_lengths(self) -> np.ndarray:
        """Rows, ascending, for which only the device knows the number of cached tokens, because
        their drafts are in flight."""
        return np.frombuffer(self.on_device, "<i4")

    @property
    def sample_counts(self) -> np.ndarray:
        """Number of each row's last tokens that are followed by sampling: 1 and its drafts; 0 for a
        prefill chunk that does not end its prompt."""
        return self.numbers[3]

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens of the rows, one row after the other; `FROM_DEVICE` for a decode token that the
        host has not seen, and for drafts."""
        return np.frombuffer(self.tokens, "<i4")

    @property
    def new_pages(self) -> np.ndarray:
        """New pages of sequences, int32 `[3, pages]`: row, the page's index in its sequence, page
        id. With the pages of earlier plans they cover `kv_lengths`, and the upper bounds of lengths
        that only the device knows."""
        return np.frombuffer(self.pages, "<i4").reshape(3, -1)

    @property
    def temperatures(self) -> np.ndarray:
        """Temperatures of the rows, float32, if a row has rules; otherwise empty."""
        return np.frombuffer(self.row_temperatures, "<f4")

    @property
    def load(self) -> StepLoad:
        """Work of the step; counts the lower bound of lengths that only the device knows."""
        tokens, lengths = self.token_counts.astype(np.int64), self.kv_lengths.astype(np.int64)
        return StepLoad(
            self.bucket.tokens,
            self.bucket.pages,
            len(tokens),
            int(tokens.sum()),
            int(lengths.sum()),
            int((tokens * lengths - tokens * (tokens - 1) // 2).sum()),
        )

    @property
    def has_rules(self) -> bool:
        """Returns whether a row has rules."""
        return any(row.rules is not None for row in self.options)

    @property
    def has_logprobs(self) -> bool:
        """Returns whether the log-probability of a sampled token is wanted."""
        return any(row.logprobs is not None for row in self.options)

    @property
    def has_targets(self) -> bool:
        """Returns whether the log-probability of a prompt token is wanted."""
        return any(row.targets for row in self.options)

    def token_starts(self, slots: int) -> dict[int, tuple[int, int]]:
        """Maps each row to its DP group and the place of its first token in the group.

        Args:
          slots: slots of a DP group.
        """
        starts: dict[int, tuple[int, int]] = {}
        last, start = -1, 0
        for row, count in zip(self.rows.tolist(), self.token_counts.tolist(), strict=True):
            group = row // slots
            last, start = group, start if group == last else 0
            starts[row] = group, start
            start += count
        return starts

    @property
    def numbers(self) -> np.ndarray:
        """The columns as int32 `[4, rows]`."""
        return np.frombuffer(self.columns, "<i4").reshape(4, -1)


def words(values: np.ndarray, kind: str = "<i4") -> bytes:
    """An array as the little-endian words of a plan's field."""
    return values.astype(kind, copy=False).tobytes()
