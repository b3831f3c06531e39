"""What the scheduler remembers of a request on its way, and where it lives: slots and pages.

Called by the scheduler alone. Decides nothing: the policy is in `scheduler.py`.

A sequence of P prompt tokens of which g are generated so far has P + g tokens. The last one is fed
in the next step, so the cache holds P + g - 1 entries before it. Steps run on the device while
the host plans the next, so two more counts matter: `pending`, the tokens that were sampled on the
device and that the host has not seen, and `in_flight`, the steps issued and not yet completed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.engine.logprobs import TokenLogprobs
from jaxserve.engine.pages import PageAllocator
from jaxserve.engine.prefix_cache import PageNode, PrefixCache
from jaxserve.engine.request import Request
from jaxserve.engine.rules import RequestRules
from jaxserve.pipeline.plan import FROM_DEVICE, SequenceRow


class Home(NamedTuple):
    """Where a sequence lives while it holds pages."""

    group: int
    lane: int
    slot: int


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's state. It is resident (has a home) or not, and:

    | status | resident | means |
    |---|---|---|
    | waiting | no | queued for pages and a slot |
    | waiting | yes | preempted; goes once its steps in flight have landed |
    | running | yes | gets steps |
    | ended | yes | reported to the caller; goes once its steps in flight have landed |
    | ended | no | forgotten |
    """

    request: Request
    rank: tuple[float, int]
    """When it is due, and the n-th request it is: who comes before whom, as long as it lives."""
    max_generated: int
    """Generated tokens at which it ends: max_tokens, or what max_length leaves."""
    tokens: list[int]
    """The prompt and every generated token that the host knows."""
    status: Literal["waiting", "running", "ended"] = "waiting"
    home: Home | None = None
    page_ids: list[int] = field(default_factory=list)
    prefix: list[PageNode] = field(default_factory=list)
    """The path it holds in the prefix cache: its first pages, where the cache owns them."""
    cached: int = 0
    """Tokens in the KV cache once every issued step has run."""
    pending: int = 0
    """Tokens sampled in steps that are in flight: they follow `tokens`, unknown to the host."""
    in_flight: int = 0
    """Steps issued and not yet completed."""
    stalled: bool = False
    """It runs, and missed its last step for want of a page: pages go to it before later ones."""
    rules: RequestRules | None = None
    """None: nothing changes its logits."""
    allowed: bytes = b""
    """Its grammar's mask for the next token."""
    fresh: bool = True
    """No step was issued since it got its home."""
    found: int | None = None
    """Prompt tokens that were in the prefix cache when it was first let in."""
    queue_seconds: float = 0.0
    """From its arrival to when it was first let in; the engine says."""
    scores: list[TokenLogprobs | None] | None = None
    """Of its prompt's tokens so far, where they are wanted and not yet reported."""

    @property
    def generated(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unfed(self) -> int:
        """Tokens not yet in the cache, nor on their way to it; at least 1."""
        return len(self.tokens) + self.pending - self.cached

    @property
    def wants_step(self) -> bool:
        """Whether it has a token to feed. Not if the tokens in flight already reach its end."""
        return self.status == "running" and self.generated + self.pending < self.max_generated

    @property
    def has_grammar(self) -> bool:
        """Whether the tokens it has decide which one may be next."""
        return self.request.params.grammar is not None

    @property
    def decodes(self) -> bool:
        """Whether its next step is the usual single token rather than a prefill chunk."""
        return self.cached > 0 and self.unfed == 1

    @property
    def longest_cache(self) -> int:
        """Cache entries at its longest: the last generated token is never fed."""
        return len(self.request.prompt) + self.max_generated - 1

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its prompt are still missing."""
        return self.scores is not None and len(self.scores) < len(self.request.prompt)

    @property
    def reusable(self) -> int:
        """How many of its tokens may come from the prefix cache.

        One has to be fed, to be followed by another. What is counted or scored has to pass through
        a step.
        """
        if self.unscored:
            return 0
        reusable = len(self.tokens) - 1
        if self.request.params.penalises:
            reusable = min(reusable, len(self.request.prompt))
        return reusable

    def start_over(self) -> None:
        """Forgets what its cache entries stood for."""
        self.home, self.page_ids, self.prefix = None, [], []
        self.cached, self.fresh = 0, True
        if self.unscored:
            self.scores = [None]

    def take_mask(self) -> None:
        """Asks its grammar what may come next.

        Raises:
          ValueError: nothing may.
        """
        self.allowed = np.ascontiguousarray(self.request.params.grammar.mask(), "<u4").tobytes()
        if not any(self.allowed):
            raise ValueError("the grammar allows no token")

    def row(self, count: int, page_size: int) -> SequenceRow:
        """Its part of a step that feeds its next `count` tokens."""
        assert self.home is not None
        kv_length = self.cached + count
        params, rules = self.request.params, None
        samples = count == self.unfed
        if self.rules is not None:
            rules = self.rules.of_step(
                generated=self.generated + self.pending,
                fresh=self.fresh,
                samples=samples,
                allowed=self.allowed,
            )
        return SequenceRow(
            slot=self.home.slot,
            token_ids=[FROM_DEVICE] if self.pending else self.tokens[self.cached : kv_length],
            kv_length=kv_length,
            page_ids=self.page_ids[: pages_for(kv_length, page_size)],
            sample=samples,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.request.seed,
            rules=rules,
            logprobs=params.logprobs,
            targets=self.request.prompt[self.cached + 1 : kv_length + 1] if self.unscored else [],
            target_logprobs=params.prompt_logprobs or 0,
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


class DPGroup:
    """The page pool and the slots of one DP group. Its lanes share the pool.

    Args:
      index: of the group.
      lanes, slots: of each lane.
      pages, page_size: of the pool.
      prefix_cache: whether full pages are kept for those who begin alike.
    """

    def __init__(
        self,
        index: int,
        *,
        lanes: int,
        slots: int,
        pages: int,
        page_size: int,
        prefix_cache: bool,
    ):
        self.index = index
        self.pool = PageAllocator(pages)
        self.cache = PrefixCache(self.pool, page_size) if prefix_cache else None
        self.slots: list[list[Sequence | None]] = [[None] * slots for _ in range(lanes)]
        self.residents_count = 0
        """Sequences that hold a slot; counted, for every admission asks every group."""
        self.promised = 0
        """Pages that residents will still take if all come to their full length; counted, too."""
        self._page_size = page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody uses, those of the prefix cache included."""
        return self.pool.free_pages + (self.cache.idle if self.cache else 0)

    @property
    def usage(self) -> float:
        """The part of the pool that sequences use, 0 … 1."""
        return 1 - self.free_pages / self.pool.pages

    def residents(self, lane: int | None = None) -> Iterator[Sequence]:
        """Sequences that hold a slot and pages, of one lane or of all."""
        for slots in self.slots if lane is None else [self.slots[lane]]:
            yield from (sequence for sequence in slots if sequence is not None)

    @property
    def full(self) -> bool:
        """Whether every slot is taken."""
        return self.residents_count == len(self.slots) * len(self.slots[0])

    @property
    def leaving(self) -> bool:
        """Whether some pages come back without further doing, when steps in flight land."""
        return any(sequence.status != "running" for sequence in self.residents())

    def match(self, sequence: Sequence) -> list[PageNode]:
        """What the prefix cache has of the sequence's tokens."""
        if self.cache is None:
            return []
        salt = sequence.request.params.cache_salt
        return self.cache.match(salt, sequence.tokens, sequence.reusable)

    def allocate(self, count: int) -> list[int]:
        """Takes pages of which there are enough, if need be out of the prefix cache."""
        if self.cache is not None and count > self.pool.free_pages:
            self.cache.evict(count - self.pool.free_pages)
        page_ids = self.pool.allocate(count)
        if page_ids is None:
            raise RuntimeError(f"group {self.index}: {count} pages wanted, {self.free_pages} free")
        return page_ids

    def grow(self, sequence: Sequence) -> None:
        """Gives a resident one more page."""
        sequence.page_ids += self.allocate(1)
        self.promised -= 1

    def lane_for(self, sequence: Sequence) -> int:
        """The lane with the fewest sequences; not to be asked when full.

        Sequences with a grammar go where the fewest of their kind are, and leave their kind room
        where few are: a lane that waits for its grammars is slower, and lanes should come to their
        ends together.
        """

        def load(lane: int) -> tuple[int, int]:
            residents = list(self.residents(lane))
            grammars = sum(other.has_grammar for other in residents)
            if sequence.has_grammar:
                return grammars, len(residents)
            return len(residents), -grammars

        return min((lane for lane, slots in enumerate(self.slots) if None in slots), key=load)

    def settle(self, sequence: Sequence, lane: int, pages: int, prefix: list[PageNode]) -> None:
        """Gives the sequence a free slot of the lane and its first pages, of which it shares the
        prefix."""
        slot = self.slots[lane].index(None)
        self.slots[lane][slot] = sequence
        sequence.home = Home(self.index, lane, slot)
        if self.cache is not None:
            self.cache.acquire(prefix)
        sequence.prefix = prefix
        sequence.page_ids = [node.page_id for node in prefix]
        sequence.page_ids += self.allocate(pages - len(prefix))
        self.residents_count += 1
        self.promised += self._promised_to(sequence)
        sequence.cached = len(prefix) * self._page_size
        if sequence.found is None:
            sequence.found = min(sequence.cached, len(sequence.request.prompt))

    def publish(self, sequence: Sequence, landed: int) -> None:
        """Puts the sequence's full pages into the prefix cache.

        Args:
          landed: its tokens whose cache entries are there, of which the host may not want the last.
        """
        if self.cache is None:
            return
        size, salt = self._page_size, sequence.request.params.cache_salt
        for page in range(len(sequence.prefix), min(landed, len(sequence.tokens)) // size):
            tokens = sequence.tokens[page * size : (page + 1) * size]
            if not self.cache.extend(sequence.prefix, salt, tokens, sequence.page_ids[page]):
                break  # another one with the same text was faster, and has it in use

    def release(self, sequence: Sequence) -> None:
        """Takes the slot and the pages back; what the prefix cache does not have is lost."""
        assert sequence.home is not None
        assert sequence.in_flight == 0
        self.slots[sequence.home.lane][sequence.home.slot] = None
        self.residents_count -= 1
        self.promised -= self._promised_to(sequence)
        self.pool.free(_own_pages(sequence))
        if self.cache is not None:
            self.cache.release(sequence.prefix)
        sequence.start_over()

    def _promised_to(self, sequence: Sequence) -> int:
        return pages_for(sequence.longest_cache, self._page_size) - len(sequence.page_ids)

    def check_integrity(self) -> None:
        """Raises RuntimeError if pages or slots do not add up."""
        owned = [_own_pages(sequence) for sequence in self.residents()]
        if self.cache is not None:
            owned.append(self.cache.page_ids())
            self.cache.check_integrity(sequence.prefix for sequence in self.residents())
        self.pool.check_integrity(owned)
        counted = self.residents_count, self.promised
        promises = [self._promised_to(sequence) for sequence in self.residents()]
        if counted != (len(promises), sum(promises)):
            raise RuntimeError(
                f"group {self.index} counts {counted} residents and pages promised to them: there "
                f"are {(len(promises), sum(promises))}"
            )
        for resident in self.residents():
            shared = [node.page_id for node in resident.prefix]
            if resident.page_ids[: len(shared)] != shared:
                raise RuntimeError(
                    f"request {resident.request.request_id!r} begins with pages "
                    f"{resident.page_ids[: len(shared)]}, in the prefix cache with {shared}"
                )
        for lane, slots in enumerate(self.slots):
            for slot, sequence in enumerate(slots):
                if sequence is not None and sequence.home != (self.index, lane, slot):
                    raise RuntimeError(
                        f"slot {(self.index, lane, slot)} holds request "
                        f"{sequence.request.request_id!r}, whose home is {sequence.home}"
                    )


def _own_pages(sequence: Sequence) -> list[int]:
    """Its pages that the prefix cache does not own."""
    return sequence.page_ids[len(sequence.prefix) :]
