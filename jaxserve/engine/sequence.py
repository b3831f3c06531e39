"""Sizes of a domain's scheduler, and state of a request there from its arrival to its end.

The sizes come from the deployment. Sequences, with their rules for logits, are made and changed by
the scheduler alone. Values that change at every step (how many tokens are cached or in flight) are
kept in arrays while the sequence has a slot: see `lane_slots.py`. The rules are packed once a
request and sent with each of its steps; the device applies them (`sampler.adjust`).
"""

import math
import struct
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment, scratch_pages
from jaxserve.engine.pages import PageKeys, PageNode
from jaxserve.engine.request import Request, TokenLogprobs
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_plan import NewSequence, RowOptions, SlotRules


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
      step_seconds: longest time of a step that decodes and prefills, 0 for any.
      prefix_cache: whether computed pages are kept for sequences that begin alike.
      side_by_side: whether lanes that wait for grammars are to start together.
      drafts: most drafts of a sequence and step.
      modules: prediction modules that make them; 0: they are looked up.
      automatic_drafts: whether steps have them only where they make it faster.
      ring_pages: pages a DP group for layers with a window (`kv_cache.ring_pages`); 0: none.
      spread: whether long prompts are divided over DP groups (`engine/spread.py`).
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
    token_buckets: Items[int]
    page_buckets: Items[int]
    max_waiting: int
    prefill_tokens: int = 0
    step_seconds: float = 0.0
    prefix_cache: bool = False
    side_by_side: bool = False
    drafts: int = 0
    modules: int = 0
    automatic_drafts: bool = False
    ring_pages: int = 0
    spread: bool = False
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
        token_buckets: Items[int],
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
            step_seconds=limits.token_ms / 1e3 / (deployment.lanes * deployment.domains),
            prefix_cache=cache.prefix,
            side_by_side=deployment.topology.has("ffn"),
            drafts=deployment.drafts,
            modules=deployment.modules,
            automatic_drafts=deployment.speculative.automatic,
            ring_pages=ring_pages,
            spread=limits.spread,
            window=window,
        )

    def bucket(self, tokens: int, pages: int, drafts: int = 0, *, spread: bool = False) -> Bucket:
        """Returns the smallest bucket for these tokens a DP group and pages a sequence."""
        return Bucket(
            next(size for size in self.token_buckets if size >= tokens and size > drafts),
            next(size for size in self.page_buckets if size >= pages),
            drafts,
            spread,
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


BANNED = -1e30
"""Added to the logit of a token that may not come yet. Finite, so that the token is still drawn if
a grammar allows nothing else."""


class RequestRules:
    """Rules of one request for its logits."""

    def __init__(self, request: Request):
        params = request.params
        self._params = params
        banned = dict.fromkeys(sorted(request.end_ids), BANNED)
        self._packed = _pack(params.logit_bias)
        self._packed_with_banned = _pack({**params.logit_bias, **banned})
        self._prompt = b""
        if params.repetition_penalty != 1.0:
            self._prompt = bitmask(request.prompt)
        self._counts_from = len(request.prompt) if params.penalises else None

    def of_step(
        self, *, generated: int, fresh: bool, samples: bool, allowed: bytes
    ) -> SlotRules | None:
        """Returns the rules of the next step; None if it has none.

        Args:
          generated: tokens before the one that the step samples.
          fresh: whether this is the first step since the sequence got its slot.
          samples: whether the step samples.
          allowed: bitmask of the tokens that may come; empty: all.
        """
        bias_ids, biases = b"", b""
        if samples:
            banned = generated < self._params.min_tokens
            bias_ids, biases = self._packed_with_banned if banned else self._packed
        else:
            allowed = b""
        if self._counts_from is None and not bias_ids and not allowed:
            return None
        fresh = fresh and self._counts_from is not None
        return SlotRules(
            repetition_penalty=self._params.repetition_penalty,
            presence_penalty=self._params.presence_penalty,
            frequency_penalty=self._params.frequency_penalty,
            counts_from=self._counts_from,
            fresh=fresh,
            prompt=self._prompt if fresh else b"",
            bias_ids=bias_ids,
            biases=biases,
            allowed=allowed,
        )


def bitmask(token_ids: list[int]) -> bytes:
    """Returns a bitmask of token ids, with as many words as the largest id needs."""
    bits = np.zeros(-(-(max(token_ids) + 1) // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _pack(biases: Mapping[int, float]) -> tuple[bytes, bytes]:
    ids = np.asarray(list(biases), "<i4")
    return ids.tobytes(), np.asarray(list(biases.values()), "<f4").tobytes()


class Home(NamedTuple):
    """Slot of a resident sequence."""

    group: int
    lane: int
    row: int
    """Number of the slot among those of all DP groups, as in `StepPlan`."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's state. It is resident (has a slot and pages) or not, and:

    | status | resident | means |
    |---|---|---|
    | waiting | no | queued for pages and a slot |
    | waiting | yes | preempted; leaves its slot when its steps in flight are complete |
    | running | yes | gets steps, once the pages have come that a prefill worker holds for it |
    | ended | yes | reported to the caller; leaves its slot when its steps in flight are complete |
    | ended | no | forgotten |
    """

    request: Request
    rank: tuple[float, int]
    """Due time, and number among all requests: the order of admission, which never changes."""
    max_generated: int
    """Generated tokens at which it ends: `max_tokens`, or fewer to stay within `max_length`."""
    tokens: array[int]
    """The prompt and every generated token that the host knows; see `token_array`."""
    keys: PageKeys
    """Keys of the sequence's full pages in prefix caches."""
    status: Literal["waiting", "running", "ended"] = "waiting"
    home: Home | None = None
    page_ids: list[int] = field(default_factory=list)
    """Pages of its cache entries, in order."""
    ring: dict[int, int] = field(default_factory=dict)
    """Pages in layers with a window, by their place in the sequence, ascending."""
    ring_end: int = 0
    """Place behind the last page that was ever in its ring."""
    prefix: list[PageNode] = field(default_factory=list)
    """Path held in the prefix cache: the sequence's first pages, if the cache owns them."""
    rules: RequestRules | None = None
    """Rules for the logits; None: the request has none."""
    allowed: bytes = b""
    """Mask that the grammar gives for the next token."""
    found: int | None = None
    """Prompt tokens that were in the prefix cache when it was first admitted."""
    queue_seconds: float = 0.0
    """Seconds from arrival to first admission, set by the engine."""
    hand_off_seconds: float = 0.0
    """Seconds from then until the pages from `source` were written; 0: none came, or not all."""
    source: PagesSource | None = None
    """Where a prefill worker holds its first pages; None: nowhere, or they have arrived."""
    ticket: int | None = None
    """Ticket of its fetch, while it waits for pages from `source`."""
    suspect: bool = False
    """True once its logits were not finite: no other sequence may use its cache entries."""
    poisoned: list[int] | None = None
    """Pages at the time of logits that were not finite, since when it is computed anew."""
    copies: list["Sequence"] = field(default_factory=list)
    """Residents of other DP groups that compute parts of its prompt (`spread.py`)."""
    scores: list[TokenLogprobs | None] | None = None
    """Log-probabilities of prompt tokens computed so far and not yet reported; None: not wanted."""

    @property
    def place(self) -> Home:
        """Slot of the sequence, which must be resident."""
        assert self.home is not None
        return self.home

    @property
    def is_copy(self) -> bool:
        """True if it is the copy of another sequence, which no request waits for."""
        return self.rank[0] == math.inf

    @property
    def generated(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def has_grammar(self) -> bool:
        """True if a grammar decides, from the tokens so far, which one may be next."""
        return self.request.params.grammar is not None

    @property
    def has_options(self) -> bool:
        """True if the request needs more from a step than a sampled token."""
        params = self.request.params
        asked = params.logprobs, params.prompt_logprobs, self.rules
        return any(option is not None for option in asked)

    @property
    def draftable(self) -> bool:
        """True if its next tokens may be drafted: not if the host must know each token before it
        can say which one may be next."""
        return self.request.params.speculative and not (self.has_grammar or self.unscored)

    @property
    def banned_until(self) -> int:
        """Number of tokens, prompt included, below which the sequence may not end."""
        return len(self.request.prompt) + self.request.params.min_tokens

    @property
    def longest(self) -> int:
        """Tokens at its end, prompt and output together."""
        return len(self.request.prompt) + self.max_generated

    @property
    def longest_cache(self) -> int:
        """Cache entries at its longest: the last generated token is never fed."""
        return self.longest - 1

    @property
    def unscored(self) -> bool:
        """True while log-probabilities of its prompt are missing."""
        return self.scores is not None and len(self.scores) < len(self.request.prompt)

    @property
    def reusable(self) -> int:
        """Number of its tokens that may come from the prefix cache.

        At least one token is fed, so that the next can be sampled. Tokens that are counted or
        scored must pass through a step.
        """
        if self.unscored:
            return 0
        reusable = len(self.tokens) - 1
        if self.request.params.penalises:
            reusable = min(reusable, len(self.request.prompt))
        return reusable

    def leave_slot(self) -> None:
        """Clears the state of its slot: pages, prefix path, and unreported scores, which may belong
        to a pass that is computed anew."""
        self.home, self.page_ids, self.prefix, self.ring, self.ring_end = None, [], [], {}, 0
        if self.scores is not None:
            self.scores = [None]

    def take_mask(self) -> None:
        """Asks the grammar for the tokens that may come next.

        Raises:
          ValueError: the grammar allows none.
        """
        self.allowed = np.ascontiguousarray(self.request.params.grammar.mask(), "<u4").tobytes()
        if not any(self.allowed):
            raise ValueError("the grammar allows no token")

    def sampling(self, row: int) -> NewSequence:
        """Returns its sampling parameters, in the form that workers keep."""
        params = self.request.params
        return NewSequence(
            row, params.temperature, params.top_k, params.top_p, params.min_p, self.request.seed
        )

    def options(
        self, row: int, *, length: int, cached: int, count: int, fresh: bool, samples: bool
    ) -> RowOptions | None:
        """Returns its options for a step; None if it has none.

        Args:
          length: tokens of the sequence before the step, including those in flight.
          cached: tokens in the KV cache.
          count: tokens that the step feeds.
          fresh: whether this is its first step in its slot.
          samples: whether the step samples.
        """
        params, rules, targets = self.request.params, None, []
        if self.rules is not None:
            generated = length - len(self.request.prompt)
            rules = self.rules.of_step(
                generated=generated, fresh=fresh, samples=samples, allowed=self.allowed
            )
        if self.unscored:
            targets = self.request.prompt[cached + 1 : cached + count + 1]
        logprobs = params.logprobs if samples else None
        if rules is None and logprobs is None and not targets:
            return None
        ids = [] if logprobs is None else list(params.logprob_token_ids)
        return RowOptions(row, rules, logprobs, targets, params.prompt_logprobs or 0, ids)


def token_array(*parts: list[int]) -> array[int]:
    """Joins token ids, at four bytes each: lists of Python ints are slow to read."""
    packed = array("i")
    for tokens in parts:  # array("i", tokens) would take four times as long
        packed.frombytes(struct.pack(f"{len(tokens)}i", *tokens))
    return packed
