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

from jaxserve.engine.pages import PageAllocator
from jaxserve.engine.request import Request
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
    ordinal: int
    """The n-th request that the scheduler was given: its age."""
    max_generated: int
    """Generated tokens at which it ends: max_tokens, or what max_length leaves."""
    tokens: list[int]
    """The prompt and every generated token that the host knows."""
    status: Literal["waiting", "running", "ended"] = "waiting"
    home: Home | None = None
    page_ids: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens in the KV cache once every issued step has run."""
    pending: int = 0
    """Tokens sampled in steps that are in flight: they follow `tokens`, unknown to the host."""
    in_flight: int = 0
    """Steps issued and not yet completed."""
    stalled: bool = False
    """It runs, and missed its last step for want of a page: pages go to it before younger ones."""

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
    def decodes(self) -> bool:
        """Whether its next step is the usual single token rather than a prefill chunk."""
        return self.cached > 0 and self.unfed == 1

    @property
    def longest_cache(self) -> int:
        """Cache entries at its longest: the last generated token is never fed."""
        return len(self.request.prompt) + self.max_generated - 1

    def row(self, count: int, page_size: int) -> SequenceRow:
        """Its part of a step that feeds its next `count` tokens."""
        assert self.home is not None
        kv_length = self.cached + count
        params = self.request.params
        return SequenceRow(
            slot=self.home.slot,
            token_ids=[FROM_DEVICE] if self.pending else self.tokens[self.cached : kv_length],
            kv_length=kv_length,
            page_ids=self.page_ids[: pages_for(kv_length, page_size)],
            sample=count == self.unfed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.request.seed,
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


class DPGroup:
    """The page pool and the slots of one DP group. Its lanes share the pool."""

    def __init__(self, index: int, *, lanes: int, slots: int, pages: int):
        self.index = index
        self.pool = PageAllocator(pages)
        self.slots: list[list[Sequence | None]] = [[None] * slots for _ in range(lanes)]

    def residents(self, lane: int | None = None) -> Iterator[Sequence]:
        """Sequences that hold a slot and pages, of one lane or of all."""
        for slots in self.slots if lane is None else [self.slots[lane]]:
            yield from (sequence for sequence in slots if sequence is not None)

    @property
    def leaving(self) -> bool:
        """Whether some pages come back without further doing, when steps in flight land."""
        return any(sequence.status != "running" for sequence in self.residents())

    def emptiest_lane(self) -> int | None:
        """The lane with the fewest sequences, the first of equals; None if no slot is free."""
        free = [slots.count(None) for slots in self.slots]
        return free.index(max(free)) if any(free) else None

    def settle(self, sequence: Sequence, lane: int, page_ids: list[int]) -> None:
        """Gives the sequence a free slot of the lane and its first pages."""
        slot = self.slots[lane].index(None)
        self.slots[lane][slot] = sequence
        sequence.home = Home(self.index, lane, slot)
        sequence.page_ids = page_ids

    def release(self, sequence: Sequence) -> None:
        """Takes the slot and the pages back; the cache entries are lost."""
        assert sequence.home is not None
        assert sequence.in_flight == 0
        self.slots[sequence.home.lane][sequence.home.slot] = None
        self.pool.free(sequence.page_ids)
        sequence.home, sequence.page_ids, sequence.cached = None, [], 0

    def check_integrity(self) -> None:
        """Raises RuntimeError if pages or slots do not add up."""
        self.pool.check_integrity(sequence.page_ids for sequence in self.residents())
        for lane, slots in enumerate(self.slots):
            for slot, sequence in enumerate(slots):
                if sequence is not None and sequence.home != (self.index, lane, slot):
                    raise RuntimeError(
                        f"slot {(self.index, lane, slot)} holds request "
                        f"{sequence.request.request_id!r}, whose home is {sequence.home}"
                    )
