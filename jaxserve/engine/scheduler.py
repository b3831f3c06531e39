"""Decides what every lane does next: which tokens of which sequences, on which pages.

Called by the engine's loop, on the leader's host, from one thread. Plain Python over ints and
lists: it may not know JAX, devices, text or time. Its step plans are all that the pipeline sees.

The policy:
1. Requests are admitted in the order in which they are due. One that does not fit yet holds the
   others back. A request is due some seconds after it came, so much earlier or later for
   every step of its priority, and never after its deadline. So urgent ones come first, and no
   request is overtaken by more than what comes in a bounded time.
2. A sequence is admitted when a DP group has a free slot, and pages for its tokens and one more,
   with a page to spare for every sequence that lives there already (the watermark). Pages that the
   prefix cache has are taken from there. Of several groups the cheapest takes it (`admission.py`),
   there the emptiest lane, or for a sequence with a grammar the one with the fewest of them.
3. A step holds one token of every decoding sequence, then prefill chunks, the first due first, as
   far as the token budget goes, and no more than `prefill_tokens` of them beside decoding.
   Prompt pages are taken at admission, so only decoding runs out of pages.
4. A decoding sequence without a page preempts the last due of its group, maybe itself. That goes
   back to its place in the queue, and later recomputes of its cache what was evicted meanwhile.
5. What is in flight stays untouched until it lands: a preempted, ended or cancelled sequence keeps
   its slot and pages until then, and who needs them misses a step rather than preempt another.
   Pages that come back go to the first due who missed a step.
6. A sequence with a grammar waits for its token in flight, which decides what may follow. All of a
   lane wait together, so that they step together. The others go on meanwhile, unless a quarter or
   more of the lane's sequences have a grammar: then the lane as a whole waits for its step. Where
   lanes have to run side by side to keep both meshes busy (AFD), such lanes start together.
7. Pages are published to the prefix cache when their step has landed.
So the first due sequence of a group always advances, and everything ends.
"""

import bisect
import logging
from collections import abc, deque
from typing import Any, Literal, NamedTuple

from jaxserve.engine.admission import Place, due
from jaxserve.engine.logprobs import StepResult, TokenLogprobs
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.request import (
    MAX_BANNED_IDS,
    FinishReason,
    Request,
    TokenOutput,
)
from jaxserve.engine.rules import RequestRules
from jaxserve.engine.sequence import DPGroup, Sequence, pages_for
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.pipeline.plan import Bucket, SequenceRow, StepPlan

MAX_STEPS_IN_FLIGHT = 2
"""Steps of a lane that are issued and not completed: one runs while the next is planned."""


GRAMMARS_THAT_STOP_A_LANE = 4
"""A lane waits as a whole where one sequence in so many has a grammar. With fewer, their missing
every second step costs less than an eighth of the tokens."""

logger = logging.getLogger(__name__)


class _Passenger(NamedTuple):
    """A sequence in an issued step."""

    sequence: Sequence
    samples: bool
    """Whether a token is sampled for it."""
    kv_length: int
    """Its cache entries after the step."""


class _Flight(NamedTuple):
    """An issued step."""

    number: int
    passengers: list[_Passenger]


class Scheduler:
    """Continuous batching with chunked prefill over all lanes and DP groups of one domain.

    Args:
      groups: DP groups; each has its own pages.
      lanes: lanes that share each group's pages.
      slots: sequences a DP group and lane.
      pages: pages a DP group.
      page_size: tokens a page.
      max_length: longest sequence, prompt and output together, in tokens.
      token_budget: most tokens a DP group and step.
      token_buckets: padded step sizes, ascending, ending at token_budget.
      page_buckets: padded pages a sequence, ascending, the last one covering max_length.
      max_waiting: requests that may wait before new ones are refused.
      prefill_tokens: most prefill tokens a DP group and step in which somebody decodes; 0: what the
        token budget leaves.
      prefix_cache: whether the pages of what was computed are kept for those who begin alike.
      side_by_side: whether lanes that wait for grammars are to start together.
    """

    def __init__(
        self,
        *,
        groups: int,
        lanes: int,
        slots: int,
        pages: int,
        page_size: int,
        max_length: int,
        token_budget: int,
        token_buckets: abc.Sequence[int],
        page_buckets: abc.Sequence[int],
        max_waiting: int,
        prefill_tokens: int = 0,
        prefix_cache: bool = False,
        side_by_side: bool = False,
    ):
        if token_budget < slots:
            raise ValueError(f"token_budget = {token_budget} is below slots = {slots}")
        if token_buckets[-1] != token_budget:
            raise ValueError(f"token_buckets {token_buckets} do not end at {token_budget}")
        if page_buckets[-1] * page_size < max_length:
            raise ValueError(f"page_buckets {page_buckets} do not cover {max_length} tokens")
        self._page_size = page_size
        self._max_length = max_length
        self._token_budget = token_budget
        self._token_buckets = sorted(token_buckets)
        self._page_buckets = sorted(page_buckets)
        self._max_waiting = max_waiting
        self._prefill_tokens = prefill_tokens or token_budget
        self._groups = [
            DPGroup(
                index,
                lanes=lanes,
                slots=slots,
                pages=pages,
                page_size=page_size,
                prefix_cache=prefix_cache,
            )
            for index in range(groups)
        ]
        self._flights: list[deque[_Flight]] = [deque() for _ in range(lanes)]
        self._side_by_side = side_by_side
        self._landed_at = [0] * lanes  # steps issued in all when the lane's last one landed
        self._waiting: list[Sequence] = []  # first due first
        self._live: dict[str, Sequence] = {}  # waiting and running, by request id
        self._grammars = 0  # of them, those that have one
        self._admitted: list[Sequence] = []  # for the first time, since somebody asked
        self._requests_seen = 0
        self._steps_issued = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_found = 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: it could never run; the message has the numbers.
          OverloadedError: too many requests wait.
        """
        self.check(request)
        if request.request_id in self._live:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already running")
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests wait already")
        params = request.params
        sequence = Sequence(
            request,
            (due(request), self._requests_seen),
            self._max_generated(request),
            list(request.prompt),
            scores=None if params.prompt_logprobs is None else [None],
        )
        if params.penalises or params.logit_bias or params.min_tokens or params.grammar is not None:
            sequence.rules = RequestRules(request)
        if params.grammar is not None:
            try:
                sequence.take_mask()
            except Exception as error:
                raise InvalidRequestError("grammar", str(error)) from error
        self._requests_seen += 1
        self._live[request.request_id] = sequence
        self._grammars += sequence.has_grammar
        bisect.insort(self._waiting, sequence, key=_rank)

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError if the request could never run; from any thread."""
        prompt_length = len(request.prompt)
        if prompt_length == 0:
            raise InvalidRequestError("prompt", "is empty")
        if min(request.prompt) < 0:
            raise InvalidRequestError("prompt", f"{min(request.prompt)} is no token id")
        if prompt_length + 1 > self._max_length:
            raise InvalidRequestError(
                "prompt",
                f"{prompt_length} tokens leave no room for an output: prompt and output together "
                f"have at most {self._max_length} tokens",
            )
        if request.params.min_tokens and len(request.end_ids) > MAX_BANNED_IDS:
            raise InvalidRequestError(
                "min_tokens",
                f"{len(request.end_ids)} ids would end the request, and at most {MAX_BANNED_IDS} "
                "can be kept away",
            )
        max_generated = self._max_generated(request)
        # The last token is never fed back, so the cache never holds it.
        pages = self._pages_for(prompt_length + max_generated - 1)
        pool = self._groups[0].pool.pages
        if pages > pool:
            raise InvalidRequestError(
                "max_tokens",
                f"{prompt_length} prompt tokens and up to {max_generated} generated ones take "
                f"{pages} pages of {self._page_size} tokens, and a DP group has {pool}",
            )

    def _max_generated(self, request: Request) -> int:
        return min(request.params.max_tokens, self._max_length - len(request.prompt))

    def cancel(
        self, request_id: str, finish_reason: FinishReason = "cancelled"
    ) -> list[TokenOutput]:
        """Ends a request now, wherever it is; its tokens in flight are dropped.

        Returns the request's last output, or nothing if it is unknown or has ended already.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        self._end(sequence)
        self._release_if_landed(sequence)
        return [TokenOutput(request_id=request_id, finish_reason=finish_reason)]

    def plan(self, lane: int) -> StepPlan | None:
        """Issues the lane's next step, usually while its last one is still in flight.

        Returns None if the lane has nothing to do before another step lands, or has two in flight.
        Requests may be let into any lane meanwhile, so every lane is to be asked in turn. If work
        is left and no step in flight, one of them has something to do.
        """
        if len(self._flights[lane]) >= MAX_STEPS_IN_FLIGHT:
            return None
        held = self._held_by_grammars(lane)
        if held == "everybody" or (self._side_by_side and self._others_are_late(lane)):
            return None
        chunks: list[tuple[Sequence, int]] = []  # sequences and how many tokens of theirs
        budget = [self._token_budget] * len(self._groups)

        # Step 1: one token of every decoding sequence that has, or gets, a page for it.
        for sequence in self._oldest_first(lane):
            # asked in the loop's course: an older one may just have preempted this one
            if held == "grammars" and sequence.has_grammar:
                continue
            if sequence.wants_step and sequence.decodes and self._has_page(sequence):
                chunks.append((sequence, 1))
                budget[_group_of(sequence)] -= 1

        # Step 2: let in who waits, into what decoding left.
        self._admit()
        decoding = {sequence for sequence, _ in chunks}
        if decoding:
            budget = [min(left, self._prefill_tokens) for left in budget]

        # Step 3: prefill chunks, whose pages are there already.
        for sequence in self._oldest_first(lane):
            if sequence in decoding or (held == "grammars" and sequence.has_grammar):
                continue
            prefills = sequence.fresh or not sequence.decodes
            count = min(sequence.unfed, budget[_group_of(sequence)])
            if prefills and sequence.wants_step and count:
                chunks.append((sequence, count))
                budget[_group_of(sequence)] -= count

        return self._issue(lane, chunks) if chunks else None

    def complete(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Takes the result of the oldest step of a lane that is in flight.

        Args:
          plan: the step; a lane's steps are completed in the order they were issued.
          result: what it gave.

        Returns the news of every request that got a token it may keep.
        """
        flights = self._flights[plan.lane]
        if not flights or flights[0].number != plan.number:
            expected = flights[0].number if flights else "none"
            raise ValueError(f"lane {plan.lane}: step {plan.number} landed, expected {expected}")
        outputs = []
        for sequence, samples, kv_length in flights.popleft().passengers:
            assert sequence.home is not None
            group, _, slot = sequence.home
            sequence.in_flight -= 1
            sequence.pending -= samples
            if sequence.unscored:
                assert sequence.scores is not None
                sequence.scores += result.scores.get((group, slot), [])
            if samples and sequence.status != "ended":
                token_id = result.sampled[group][slot]
                outputs.append(self._append(sequence, token_id, result.logprobs.get((group, slot))))
            self._groups[group].publish(sequence, kv_length)
            self._release_if_landed(sequence)
        self._landed_at[plan.lane] = self._steps_issued
        return outputs

    def take_admitted(self) -> list[Sequence]:
        """The sequences that were let in for the first time since this was called last."""
        admitted, self._admitted = self._admitted, []
        return admitted

    @property
    def num_running(self) -> int:
        """Sequences that get steps."""
        return len(self._live) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages and a slot, preempted ones included."""
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its pages to an older one, since the start."""
        return self._preemptions

    @property
    def kv_usage(self) -> list[float]:
        """The part of its pages that each DP group uses, 0 … 1."""
        return [group.usage for group in self._groups]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that were looked up in the prefix cache, since the start."""
        return self._prompt_tokens

    @property
    def prompt_tokens_found(self) -> int:
        """Those of them that were there."""
        return self._prompt_tokens_found

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step is in flight."""
        return bool(self._live) or any(self._flights)

    def waiting_ids(self) -> list[str]:
        """The requests that wait, the next one first."""
        return [sequence.request.request_id for sequence in self._waiting]

    def check_integrity(self) -> None:
        """Raises RuntimeError if pages, slots, the queue or the steps in flight do not add up."""
        in_flight = [p for flights in self._flights for f in flights for p, *_ in f.passengers]
        residents = [sequence for group in self._groups for sequence in group.residents()]
        for group in self._groups:
            group.check_integrity()
        for sequence in {*self._live.values(), *residents}:
            waits = sequence.status == "waiting"
            problems = {
                "is counted in the wrong number of steps": sequence.in_flight
                != in_flight.count(sequence),
                "has no home but runs": sequence.status == "running" and not sequence.home,
                "keeps its home, with nothing in flight": sequence.status != "running"
                and sequence.home is not None
                and not sequence.in_flight,
                "is queued or not, against its status": waits != (sequence in self._waiting),
                "has too few pages": len(sequence.page_ids) < self._pages_for(sequence.cached),
            }
            for problem, found in problems.items():
                if found:
                    raise RuntimeError(f"request {sequence.request.request_id!r} {problem}")
        if any(not passenger.home for passenger in in_flight):
            raise RuntimeError("a sequence lost its home with a step in flight")
        if [s.rank for s in self._waiting] != sorted(s.rank for s in self._waiting):
            raise RuntimeError("the queue is out of order")

    def _pages_for(self, tokens: int) -> int:
        return pages_for(tokens, self._page_size)

    def _oldest_first(self, lane: int) -> list[Sequence]:
        residents = [sequence for group in self._groups for sequence in group.residents(lane)]
        return sorted(residents, key=_rank)

    def _held_by_grammars(self, lane: int) -> Literal["nobody", "grammars", "everybody"]:
        """Who of a lane waits because a sequence with a grammar has a token in flight."""
        if not self._grammars or not any(
            s.has_grammar and s.pending for group in self._groups for s in group.residents(lane)
        ):
            return "nobody"
        return "everybody" if self._stops_for_grammars(lane) else "grammars"

    def _stops_for_grammars(self, lane: int) -> bool:
        """Whether so many of a lane's sequences have a grammar that all of it waits for them."""
        if not self._grammars:
            return False
        running = [s for s in self._oldest_first(lane) if s.status == "running"]
        with_grammar = sum(sequence.has_grammar for sequence in running)
        return 0 < len(running) <= GRAMMARS_THAT_STOP_A_LANE * with_grammar

    def _others_are_late(self, lane: int) -> bool:
        """Whether a lane that stops for grammars should wait for another such lane, whose step in
        flight was issued before this lane's last one landed."""
        if self._flights[lane] or not self._stops_for_grammars(lane):
            return False
        return any(
            flights
            and flights[-1].number < self._landed_at[lane]
            and self._held_by_grammars(other) == "everybody"
            for other, flights in enumerate(self._flights)
        )

    def _has_page(self, sequence: Sequence) -> bool:
        """Whether a decoding sequence has the page its token goes to, by preemption if need be."""
        if self._pages_for(sequence.cached + 1) <= len(sequence.page_ids):
            return True
        group = self._groups[_group_of(sequence)]
        owed = sum(other.stalled and other.rank < sequence.rank for other in group.residents())
        sequence.stalled = True
        while group.free_pages <= owed:
            if group.leaving:
                return False
            youngest = max(group.residents(), key=_rank)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        group.grow(sequence)
        sequence.stalled = False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the queue, to recompute its cache some day."""
        self._preemptions += 1
        sequence.status = "waiting"
        sequence.stalled = False
        bisect.insort(self._waiting, sequence, key=_rank)
        self._release_if_landed(sequence)

    def _admit(self) -> None:
        """Lets in from the head of the queue, as long as the first one fits a group."""
        if not self._waiting:
            return
        places = [Place(group) for group in self._groups if not group.full]
        while self._waiting and not self._waiting[0].in_flight:  # a preempted one may still land
            sequence = self._waiting[0]
            tokens = min(len(sequence.tokens) + 1, sequence.longest_cache)
            pages = self._pages_for(tokens)
            best: tuple[int, Place, list[PageNode]] | None = None
            for place in places:
                prefix = place.group.match(sequence)
                cost = place.cost(pages, prefix)
                if cost is not None and (best is None or cost < best[0]):
                    best = cost, place, prefix
            if best is None:
                return
            _, place, prefix = best
            del self._waiting[0]
            sequence.status = "running"
            if sequence.found is None:
                self._admitted.append(sequence)
                self._prompt_tokens += len(sequence.request.prompt)
                self._prompt_tokens_found += len(prefix) * self._page_size
            group = place.group
            group.settle(sequence, group.lane_for(sequence), pages, prefix)
            place.note()
            if group.full:
                places.remove(place)

    def _issue(self, lane: int, chunks: list[tuple[Sequence, int]]) -> StepPlan:
        """Turns the chosen chunks into a step plan in flight."""
        rows: list[list[SequenceRow]] = [[] for _ in self._groups]
        passengers = []
        for sequence, count in chunks:
            row = sequence.row(count, self._page_size)
            rows[_group_of(sequence)].append(row)
            passengers.append(_Passenger(sequence, row.sample, row.kv_length))
            sequence.fresh = False
            sequence.cached += count
            sequence.pending += row.sample
            sequence.in_flight += 1
        for group_rows in rows:
            group_rows.sort(key=lambda row: row.slot)
        tokens = max(sum(len(row.token_ids) for row in group_rows) for group_rows in rows)
        pages = max(len(row.page_ids) for group_rows in rows for row in group_rows)
        bucket = Bucket(
            tokens=self._token_buckets[bisect.bisect_left(self._token_buckets, tokens)],
            pages=self._page_buckets[bisect.bisect_left(self._page_buckets, pages)],
        )
        plan = StepPlan(lane=lane, number=self._steps_issued, bucket=bucket, groups=rows)
        self._steps_issued += 1
        self._flights[lane].append(_Flight(plan.number, passengers))
        return plan

    def _append(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> TokenOutput:
        """Adds a sampled token, which may be the sequence's last, and tells of it."""
        request = sequence.request
        grammar = request.params.grammar
        ends = request.ends_at(token_id, sequence.generated)
        if ends or (grammar is not None and token_id in request.end_ids):
            return self._news(sequence, finish_reason="stop", stop_token_id=token_id)
        sequence.tokens.append(token_id)
        finish_reason: FinishReason | None = None
        error = None
        if grammar is not None:
            try:
                grammar.accept(token_id)
                if grammar.finished:
                    finish_reason = "stop"
                else:
                    sequence.take_mask()
            except Exception as exception:
                logger.warning("request %s: its grammar failed: %s", request.request_id, exception)
                finish_reason, error = "error", f"the grammar failed: {exception}"
        if finish_reason is None and sequence.generated == sequence.max_generated:
            finish_reason = "length"
        return self._news(
            sequence,
            token_ids=[token_id],
            finish_reason=finish_reason,
            error=error,
            logprobs=[] if logprobs is None else [logprobs],
        )

    def _news(self, sequence: Sequence, **fields: Any) -> TokenOutput:
        """News of a sequence, which it ends if they say so."""
        if fields["finish_reason"] is not None:
            self._end(sequence)
        scores, sequence.scores = sequence.scores, None
        return TokenOutput(
            request_id=sequence.request.request_id,
            prompt_logprobs=scores,
            cached_tokens=sequence.found or 0,
            queue_seconds=sequence.queue_seconds,
            **fields,
        )

    def _end(self, sequence: Sequence) -> None:
        if sequence.status == "waiting":
            self._waiting.remove(sequence)
        sequence.status = "ended"
        sequence.stalled = False
        del self._live[sequence.request.request_id]
        self._grammars -= sequence.has_grammar

    def _release_if_landed(self, sequence: Sequence) -> None:
        if sequence.home and sequence.status != "running" and not sequence.in_flight:
            self._groups[sequence.home.group].release(sequence)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _group_of(sequence: Sequence) -> int:
    assert sequence.home is not None
    return sequence.home.group
