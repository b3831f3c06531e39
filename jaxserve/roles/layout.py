"""The size of a step and the layout of its int32 batch array.

Shared by the programs that read the array and by those who fill it (`step_arrays.py`). Pure shapes:
no JAX.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

NO_TOKEN = -2
"""What the sampler gives in place of a token for logits that are not numbers (NaN or infinite)."""

FROM_DEVICE = -1
"""What only the device knows. As the first token id of a row: the token that its slot sampled last;
as a later one: the draft that follows it. As a KV length: what the slot's steps have brought it
to."""

REJECTED = -3
"""What a step with drafts gives in place of the tokens behind the first draft that is wrong."""

MAX_LOGPROBS = 20
"""Most alternatives that are reported beside a token."""

MAX_BIASES = 384
"""Most token ids of a slot whose logits a step shifts or bans."""

SAMPLER_FIELDS = 5
"""Words a slot in the batch array's sampler block: temperature, top_k, top_p, min_p, seed."""


class Bucket(msgspec.Struct, frozen=True):
    """The padded size of a step: one compiled executable a bucket and kind."""

    tokens: int
    """Tokens a DP group, padding included."""
    pages: int
    """Pages a sequence, padding included."""
    drafts: int = 0
    """Most drafts that a row may have; 0: the step has none, whatever the deployment."""

    @property
    def of_tokens(self) -> "Bucket":
        """The same for what sees no pages."""
        return Bucket(self.tokens, 1, self.drafts)

    def is_small(self, slots: int) -> bool:
        """Whether a step has fewer tokens than a DP group has slots: then it samples after each of
        its tokens, not in each slot, and no request of it has options (`roles/sampling.py`)."""
        return not self.drafts and self.tokens < slots

    @property
    def undrafted(self) -> "Bucket":
        """The same for what does not know of drafts."""
        return Bucket(self.tokens, self.pages)


class StepLoad(msgspec.Struct, frozen=True, gc=False):
    """What a step has to do, over all DP groups of its domain: what its times depend on."""

    bucket_tokens: int
    """Of a DP group, padding included."""
    bucket_pages: int
    """Of a sequence, padding included."""
    sequences: int
    tokens: int
    context: int
    """Tokens in the caches of all sequences after the step, together."""
    pairs: int
    """Of a token of the step with a token that it attends to."""


class PageRun(NamedTuple):
    """Where the KV entries of tokens in a row lie in the pages of a DP group."""

    group: int
    page_ids: Sequence[int]
    """Page ids in the group's pools, those of a page's tables side by side; the first page holds
    the first token."""
    offset: int = 0
    """Offset of the first token in the first page, in tokens."""


class BatchLayout(msgspec.Struct, frozen=True):
    """Where each field of a step lies in a DP group's row of the batch array.

    The batch array is int32 `[dp, width]`; its fields, in order: `token_ids[tokens]`,
    `query_start[slots + 1]`, `kv_length[slots]`, `sample[slots]`, and per slot the sampler's
    temperature, top_k, top_p, min_p and seed (floats and the uint32 seed as raw bits).
    Slots without tokens in this step have an empty query range. `sample` says after how many of a
    slot's tokens, its last ones, something is sampled: 0, 1, or 1 and its drafts. With prediction
    modules `upcoming[slots * modules]` follows: the tokens behind a slot's last one where its
    prompt goes on, -1 where they are unknown.
    """

    tokens: int
    slots: int
    modules: int = 0

    @property
    def width(self) -> int:
        return self.tokens + (self.slots + 1) + (2 + SAMPLER_FIELDS + self.modules) * self.slots

    def fields(self, row: Any) -> dict[str, Any]:
        """Cuts one row (NumPy or JAX, shape `[width]`) into its named fields."""
        sizes = {
            "token_ids": self.tokens,
            "query_start": self.slots + 1,
            "kv_length": self.slots,
            "sample": self.slots,
            "temperature": self.slots,
            "top_k": self.slots,
            "top_p": self.slots,
            "min_p": self.slots,
            "seed": self.slots,
            "upcoming": self.slots * self.modules,
        }
        return _cut(row, sizes)


class RulesLayout(msgspec.Struct, frozen=True):
    """Where each field of a slot's rules lies in its row of the rules array.

    The rules array is int32 `[dp, slots, width]`. It exists only for steps in which some request
    has rules (penalties, biases, banned or allowed tokens). Then the temperatures are here, and 0
    in the batch array: a token is drawn once, after the rules. Floats and bitmasks are raw bits;
    bit t % 32 of word t // 32 of a bitmask stands for token t.
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
