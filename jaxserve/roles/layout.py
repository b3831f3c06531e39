"""The size of a step and the layout of its int32 batch array.

Shared by the programs that read the array and by `step_arrays.py`, which fills it. Pure shapes: no
JAX.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment

NO_TOKEN = -2
"""Sampled in place of a token where logits are not finite (NaN or infinite)."""

FROM_DEVICE = -1
"""Stands for a value that only the device knows. As the first token id of a row: the token that its
slot sampled last. As a later token id: the draft that follows it. As a KV length: the length after
the slot's steps so far."""

REJECTED = -3
"""Returned by a step with drafts in place of all tokens behind the first wrong draft."""

MAX_LOGPROBS = 20
"""Most alternatives reported beside a token."""

MAX_BIASES = 384
"""Most token ids of a slot whose logits a step shifts or bans."""

SAMPLER_FIELDS = 5
"""Words for each slot in the batch array's sampler block: temperature to seed."""


def pages_for(tokens: int, page_size: int) -> int:
    """Returns the number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class Bucket(msgspec.Struct, frozen=True):
    """Padded size of a step. Each bucket and kind of program has one compiled executable."""

    tokens: int
    """Tokens a DP group, padding included."""
    pages: int
    """Pages a sequence, padding included."""
    drafts: int = 0
    """Most drafts that a row may have; 0: the step has none, whatever the deployment."""

    @property
    def of_tokens(self) -> "Bucket":
        """The bucket for programs that read no pages; its `pages` is fixed."""
        return Bucket(self.tokens, 1, self.drafts)

    def is_small(self, slots: int) -> bool:
        """Returns whether the step has fewer tokens than a DP group has slots. A small step samples
        after each of its tokens instead of in each slot, and its requests have no options
        (`roles/sampling.py`)."""
        return not self.drafts and self.tokens < slots

    @property
    def undrafted(self) -> "Bucket":
        """The bucket for programs that do not depend on drafts: without drafts."""
        return Bucket(self.tokens, self.pages)


class StepLoad(msgspec.Struct, frozen=True, gc=False):
    """Work of a step over all DP groups of its domain, on which the times of its stages depend."""

    bucket_tokens: int
    """Tokens of a DP group, padding included."""
    bucket_pages: int
    """Pages of a sequence, padding included."""
    sequences: int
    tokens: int
    context: int
    """Tokens in the caches after the step, summed over its sequences."""
    pairs: int
    """Pairs of a token of the step and a token that it attends to."""


class PageRun(NamedTuple):
    """Pages of a DP group that hold the KV entries of consecutive tokens."""

    group: int
    page_ids: Sequence[int]
    """Page ids in the group's pools, a page's ids in all tables side by side. The first page holds
    the first token."""
    offset: int = 0
    """Offset of the first token in the first page, in tokens."""


class BatchLayout(msgspec.Struct, frozen=True):
    """Where each field of a step lies in a DP group's row of the batch array.

    The batch array is int32 `[dp, width]`; its fields, in order: `token_ids[tokens]`,
    `query_start[slots + 1]`, `kv_length[slots]`, `sample[slots]`, and per slot the sampler's
    temperature, top_k, top_p, min_p and seed (floats and the uint32 seed as raw bits).
    Slots without tokens in this step have an empty query range. `sample` is the number of a slot's
    last tokens after which one is sampled: 0, 1, or 1 + its drafts. With prediction modules
    `upcoming[slots * modules]` follows: the prompt tokens behind a slot's last one, -1 where they
    are unknown.
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


def step_multiple(deployment: Deployment) -> int:
    """Returns the number that a DP group's tokens are a multiple of, so that all pieces of a
    message are equal."""
    return 1 if deployment.topology.has("colocated") else deployment.attention.tp


def deployment_buckets(deployment: Deployment) -> list[Bucket]:
    """All buckets that a step may use, ascending; tokens are rounded up to `step_multiple`."""
    limits, multiple = deployment.scheduler, step_multiple(deployment)
    tokens = sorted({-(-size // multiple) * multiple for size in limits.token_buckets})
    return [
        Bucket(size, pages, drafts)
        for size in tokens
        for pages in limits.page_buckets
        for drafts in ((0, deployment.drafts) if size > deployment.drafts > 0 else (0,))
    ]


def token_sizes(deployment: Deployment) -> list[int]:
    """The sizes of steps in tokens a DP group, ascending."""
    return sorted({bucket.tokens for bucket in deployment_buckets(deployment)})
