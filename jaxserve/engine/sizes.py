"""Sizes of a domain's scheduler, from the deployment.

Called by the engine's assembly, the simulator and the planner.
"""

from collections.abc import Sequence

import msgspec

from jaxserve.config.deployment import Deployment, scratch_pages
from jaxserve.roles.layout import Bucket


class SchedulerSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a domain's scheduler.

    Attributes:
      groups: DP groups; each has its own pages.
      lanes: lanes that share each group's pages.
      slots: sequences a DP group and lane.
      pages: pages a DP group, `scratch` included.
      page_size: tokens a page.
      max_length: longest sequence, prompt and output together, in tokens.
      token_budget: most tokens a DP group and step.
      token_buckets: padded step sizes, ascending, ending at token_budget.
      page_buckets: padded pages a sequence, ascending, the last one covering max_length.
      max_waiting: requests that may wait before new ones are refused.
      prefill_tokens: most prefill tokens a DP group and step beside decoding; 0: the rest of the
        token budget.
      prefix_cache: whether computed pages are kept for sequences that begin alike.
      side_by_side: whether lanes that wait for grammars are to start together.
      drafts: most drafts of a sequence and step.
      modules: prediction modules that make them; 0: they are looked up.
      automatic_drafts: whether steps have them only where they make it faster.
      ring_pages: pages a DP group for layers with a window (`kv_cache.ring_pages`); 0: none.
      window: tokens that a token sees in layers with a window; 0 with ring pages: these hold the
        states of sequences.

    Raises:
      ValueError: the budget or the buckets are too small.
    """

    groups: int
    lanes: int
    slots: int
    pages: int
    page_size: int
    max_length: int
    token_budget: int
    token_buckets: Sequence[int]
    page_buckets: Sequence[int]
    max_waiting: int
    prefill_tokens: int = 0
    prefix_cache: bool = False
    side_by_side: bool = False
    drafts: int = 0
    modules: int = 0
    automatic_drafts: bool = False
    ring_pages: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        budget, pages, longest = self.token_budget, self.page_buckets, self.max_length
        if budget < self.slots * (1 + self.drafts):
            least = f"slots x (1 + drafts) = {self.slots} x {1 + self.drafts}"
            raise ValueError(f"token_budget = {budget} is below {least}")
        if self.token_buckets[-1] != budget:
            raise ValueError(f"token_buckets {self.token_buckets} do not end at {budget}")
        if pages[-1] * self.page_size < longest:
            raise ValueError(f"page_buckets {pages} do not cover {longest} tokens")

    @property
    def recurrent(self) -> bool:
        """True if sequences have states, which each step replaces."""
        return self.ring_pages > 0 and not self.window

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        token_buckets: Sequence[int],
        ring_pages: int = 0,
        window: int = 0,
    ) -> "SchedulerSizes":
        """Returns the sizes that a deployment's domains have."""
        limits, cache = deployment.scheduler, deployment.cache
        return cls(
            groups=deployment.attention.dp,
            lanes=deployment.lanes,
            slots=limits.slots,
            pages=cache.pages,
            page_size=cache.page_size,
            max_length=limits.max_length,
            token_budget=token_buckets[-1],
            token_buckets=token_buckets,
            page_buckets=limits.page_buckets,
            max_waiting=limits.max_waiting,
            prefill_tokens=limits.prefill_tokens,
            prefix_cache=cache.prefix,
            side_by_side=deployment.topology.has("ffn"),
            drafts=deployment.drafts,
            modules=deployment.modules,
            automatic_drafts=deployment.speculative.automatic,
            ring_pages=ring_pages,
            window=window,
        )

    def bucket(self, tokens: int, pages: int, drafts: int = 0) -> Bucket:
        """Returns the smallest bucket for these tokens a DP group and pages a sequence."""
        return Bucket(
            next(size for size in self.token_buckets if size >= tokens and size > drafts),
            next(size for size in self.page_buckets if size >= pages),
            drafts,
        )

    @property
    def scratch(self) -> int:
        """First pages of a DP group, which belong to no sequence."""
        return scratch_pages(self.drafts, self.modules)

    @property
    def looks_up(self) -> bool:
        """True if workers look up drafts in a sequence's tokens, so that they must be sent the
        tokens that none of their steps produced."""
        return self.drafts > 0 and not self.modules

    @property
    def ahead(self) -> int:
        """Cache entries behind those of a step that the last module writes for its own drafts, if
        the cache has room."""
        return max(self.drafts - self.modules, 0) if self.modules else 0
