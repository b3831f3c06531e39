"""Sizes of steps: the padded sizes that programs are compiled for, and limits of a request.

Pure numbers: no JAX.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment

NO_TOKEN = -2
"""Sampled in place of a token where logits are not finite (NaN or infinite)."""

MAX_LOGPROBS = 20
"""Most alternatives reported beside a token."""

MAX_BIASES = 384
"""Most token ids of a slot whose logits a step shifts or bans."""


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
    spread: bool = False
    """Whether DP groups exchange the pages that they compute of one prompt's chunk."""

    @property
    def of_tokens(self) -> "Bucket":
        """The bucket for programs that read no pages; its `pages` is fixed."""
        return Bucket(self.tokens, 1, self.drafts)

    def is_small(self, slots: int) -> bool:
        """Returns whether the step has fewer tokens than a DP group has slots. A small step samples
        after each of its tokens instead of in each slot, and its requests have no options
        (`roles/sampling.py`)."""
        return not self.drafts and self.tokens < slots

    def holds(self, one: "Bucket") -> bool:
        """Returns whether every step of one bucket fits this one."""
        alike = (self.drafts, self.spread) == (one.drafts, one.spread)
        return alike and self.tokens >= one.tokens and self.pages >= one.pages

    @property
    def undrafted(self) -> "Bucket":
        """The bucket for programs that do not depend on drafts: without drafts."""
        return msgspec.structs.replace(self, drafts=0)


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


def step_multiple(deployment: Deployment) -> int:
    """Returns the divisor of a DP group's tokens that makes all pieces of a message equal."""
    return 1 if deployment.topology.has("colocated") else deployment.attention.tp


def deployment_buckets(deployment: Deployment) -> list[Bucket]:
    """All buckets that a step may use, ascending; tokens are rounded up to `step_multiple`."""
    limits, multiple = deployment.scheduler, step_multiple(deployment)
    tokens = sorted({-(-size // multiple) * multiple for size in limits.token_buckets})
    return [
        Bucket(size, pages, drafts, spread)
        for size in tokens
        for pages in limits.page_buckets
        for drafts in ((0, deployment.drafts) if size > deployment.drafts > 0 else (0,))
        for spread in ((False, True) if limits.spread and size == tokens[-1] else (False,))
    ]


def token_sizes(deployment: Deployment) -> list[int]:
    """The sizes of steps in tokens a DP group, ascending."""
    return sorted({bucket.tokens for bucket in deployment_buckets(deployment)})
