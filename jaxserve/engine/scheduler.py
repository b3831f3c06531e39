"""Decides what every lane does next: which tokens of which sequences, on which pages.

Called by the engine's loop, on the leader's host, from one thread, and by the planner's simulator.
Plain Python and NumPy: it may not know JAX, devices, text or time. Its step plans are all that the
workers see.

The policy:
1. Requests are admitted in the order in which they are due. A request that does not fit yet holds
   later ones back. It is due some seconds after its arrival, earlier or later by a fixed time for
   every step of its priority, and never after its deadline. Urgent requests come first, and only
   requests that arrive within a bounded time can overtake another.
2. A sequence is admitted when a DP group has a free slot, and pages for its tokens and one more,
   with a page to spare for every resident sequence (the watermark). Pages in the prefix cache are
   shared. The cheapest group takes the sequence (`admission.py`), and there the emptiest lane; a
   sequence with a grammar goes to the lane with the fewest grammars.
3. A step holds one token of every decoding sequence, then prefill chunks, the first due first, as
   far as the token budget goes, and beside decoding at most `prefill_tokens` prefill tokens, or
   as many as keep the time of a step (`step_policies.ChunkPolicy`).
   Prompt pages are allocated at admission, so only decoding can run out of pages.
4. A decoding sequence that needs a page where none is left preempts the last due of its group,
   maybe itself. The preempted sequence goes back to the queue by its rank, and later recomputes
   the entries that were evicted meanwhile.
5. A step in flight is never disturbed: a preempted, ended or cancelled sequence keeps its slot and
   pages until its steps are complete, and a sequence that needs them misses a step rather than
   preempt another. Freed pages go first to the sequences that missed a step, by rank.
6. A sequence with a grammar waits for its token in flight, which decides what may follow. Those of
   a lane wait together, so that they step together. The others go on meanwhile, unless a quarter
   or more of the lane's sequences have a grammar: then the lane as a whole waits for its step.
   Where lanes have to run side by side to keep both meshes busy (AFD), such lanes start together.
7. Pages are published to the prefix cache when their step is complete.
So the first due sequence of a group always advances, and every request ends.

Cost of a step on the host: NumPy over the lane's rows (`lane_slots.py`), and Python only for
changes: admissions, ends, new pages, prefill chunks, preemptions, and rows with options.
"""

import pkgutil
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxserve.engine.admission import AdmissionQueue, Fetches
from jaxserve.engine.dp_group import DPGroup, check_lanes, queue_integrity
from jaxserve.engine.lane_slots import LaneSlots, StepInFlight
from jaxserve.engine.outputs import StepOutputs, StepResult, append_tokens
from jaxserve.engine.pages import PageKeys
from jaxserve.engine.request import FinishReason, Request, RequestLimits, TokenOutput, due
from jaxserve.engine.sequence import RequestRules, SchedulerSizes, Sequence, token_array
from jaxserve.engine.step_composer import StepComposer, grammar_wait, others_are_late
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.observe.load import DraftCounts
from jaxserve.roles.step_plan import StepPlan

if TYPE_CHECKING:
    from jaxserve.engine.step_policies import ChunkPolicy, DraftPolicy

POLICIES = "jaxserve.engine.step_policies:policies_of"
"""Loaded for deployments with drafts or `scheduler.token_ms` alone."""
MAX_STEPS_IN_FLIGHT = 2
"""Steps of a lane that are issued and not complete: one runs while the next is planned."""


class Scheduler:
    """Continuous batching with chunked prefill over all lanes and DP groups of one domain."""

    def __init__(self, sizes: SchedulerSizes):
        lanes, drafts, page_size = sizes.lanes, sizes.drafts, sizes.page_size
        self.page_size, self.max_waiting = page_size, sizes.max_waiting
        self.limits = RequestLimits(
            max_length=sizes.max_length, pages=sizes.pages - sizes.scratch, page_size=page_size
        )
        self.capacity = sizes.groups * lanes * sizes.slots
        """Most sequences that get steps at a time."""
        self.lanes = [LaneSlots(lane, sizes) for lane in range(lanes)]
        """Slots of sequences that get steps, one table a lane."""
        self.groups = [DPGroup(index, self.lanes, sizes) for index in range(sizes.groups)]
        self.draft_policy: DraftPolicy | None = None
        """Policy for drafts; None without drafts."""
        pace: ChunkPolicy | None = None
        if drafts or sizes.step_seconds:
            self.draft_policy, pace = pkgutil.resolve_name(POLICIES)(sizes)
        self.drafts = DraftCounts()
        self.composer = StepComposer(self.groups, sizes, self.draft_policy, pace, self._preempt)
        """Composes the steps."""
        self._policies = [each for each in (self.draft_policy, pace) if each]
        self.tables = 1 + (sizes.ring_pages > 0)
        """Number of page tables of a step: one for all tokens, and one for rings."""
        self._recurrent = sizes.recurrent
        self._publishes = sizes.prefix_cache or sizes.window > 0
        self._in_flight: list[deque[StepInFlight]] = [deque() for _ in range(lanes)]
        self._side_by_side = sizes.side_by_side
        self._completed_at = [0] * lanes  # steps issued in all when the lane's last one completed
        self.fetches = Fetches(self.groups, self.lanes)
        """Fetches of sequences whose first pages a prefill worker holds."""
        self.queue = AdmissionQueue(self.groups, page_size, self.fetches)
        """Requests that wait for pages and a slot."""
        self._live: dict[str, Sequence] = {}  # waiting and running, by request id
        self._grammars = 0  # live sequences with a grammar
        self._end_ids: Counter[int] = Counter()  # id → live sequences that it would end
        self._requests_seen = self._steps_issued = 0
        self.invalid_logits = 0
        """Number of requests that ended because their logits were not finite."""
        self.recomputed = 0
        """Number of requests that were computed anew on other pages for that reason."""
        self.num_preemptions = 0
        """Number of times that a sequence lost its pages to an older one."""

    def add(self, request: Request, due_at: float | None = None) -> None:
        """Queues a request.

        Args:
          request: checked here.
          due_at: seconds of the clock of its arrival; None: by arrival, deadline and priority.

        Raises:
          InvalidRequestError: it could never run; the message has the numbers.
          OverloadedError: too many requests wait.
        """
        self.limits.check(request)
        if request.request_id in self._live:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already running")
        if self.num_waiting >= self.max_waiting:
            raise OverloadedError(f"{self.num_waiting} requests wait already")
        params, sequence = request.params, self._sequence(request, due_at)
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
        self._end_ids.update(request.end_ids)
        self.queue.push(sequence)

    def cost(self, request: Request) -> int | None:
        """Cost of admitting a request now, in pages of the cheapest group; None: it must wait."""
        return self.queue.cost(self._sequence(request))

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
        self._release_if_complete(sequence)
        return [TokenOutput(request_id=request_id, finish_reason=finish_reason)]

    def plan(self, lane: int) -> StepPlan | None:
        """Issues the lane's next step, usually while its last one is still in flight.

        Returns None if the lane has nothing to do before another step is complete, or has two in
        flight. Requests may be admitted to any lane meanwhile, so every lane is to be asked in
        turn. While work is left and no step is in flight, at least one lane has something to do.
        """
        if len(self._in_flight[lane]) >= MAX_STEPS_IN_FLIGHT:
            return None
        slots = self.lanes[lane]
        waiting = grammar_wait(slots) if self._grammars else "none"
        if waiting == "lane":
            return None
        lanes = self.lanes, self._in_flight, self._completed_at
        if self._side_by_side and self._grammars and others_are_late(lane, *lanes):
            return None

        # Step 1: one token of every decoding sequence that has, or gets, a page for it. Admission
        # comes second: else it would take the page, and the next step preempt what it admitted.
        decoding = slots.decoding()
        if waiting == "grammars":
            decoding &= ~slots.grammar
        self.composer.give_pages(slots, decoding)

        # Step 2: admit from the queue, into what decoding left.
        self.queue.admit()
        spread = self.composer.spread
        if spread is not None:
            spread.begin(waiting=bool(self.queue.waiting))

        # Step 3: prefill chunks, whose pages are allocated already.
        prefilling = slots.prefilling(decoding)
        if waiting == "grammars":
            prefilling &= ~slots.grammar
        drafts = self.composer.drafts(slots, decoding, prefilling)
        chunks = self.composer.chunks(slots, decoding, prefilling, drafts)

        decode = decoding.nonzero()[0]
        if not len(decode) and not chunks:
            return None
        parts = {} if spread is None else spread.parts
        plan, step = slots.issue(self._steps_issued, decode, chunks, drafts, parts)
        self._steps_issued += 1
        self._in_flight[lane].append(step)
        if spread is not None:
            spread.issued()
        return plan

    def complete(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Processes the result of a lane's oldest step in flight.

        Args:
          plan: the step; a lane's steps complete in the order in which they were issued.
          result: results of the step.

        Returns:
          the output of every request that got a token it may keep.

        Raises:
          ValueError: the step is not the oldest of its lane.
        """
        steps, slots = self._in_flight[plan.lane], self.lanes[plan.lane]
        if not steps or steps[0].number != plan.number:
            expected = steps[0].number if steps else "none"
            raise ValueError(f"lane {plan.lane}: step {plan.number} completed, expected {expected}")
        step = steps.popleft()
        for row, scores in result.scores.items():
            if slots.sequences[row].scores is not None:
                slots.sequences[row].scores += scores
        accepted = None
        if step.drafts is not None:
            accepted = np.where(step.samples, result.counts.reshape(-1)[step.rows] - 1, 0)
            self.drafts.add(step.drafts, accepted)
        if self.draft_policy is not None:
            self.draft_policy.completed(step.drafts, accepted, plan.lane)
        kept = slots.complete(step, accepted)
        drafts = None if step.drafts is None else step.drafts[kept]
        outputs = append_tokens(slots, step.rows[kept], result, self._end_ids, drafts)
        self.invalid_logits += outputs.invalid
        for sequence in outputs.ended:
            if sequence.suspect:
                self.groups[sequence.place.group].suspect(sequence)
            self._end(sequence)
        for sequence in outputs.poisoned:
            self._compute_anew(sequence)
        # In this order: a hold shares the pages that were just published, and a row's release frees
        # the pages that neither the cache nor a hold has taken over.
        if self._publishes:
            for sequence, cached in slots.filled(step):
                self.groups[sequence.place.group].publish(sequence, cached)
        for sequence in outputs.ended:
            if sequence.request.hold and sequence.generated:
                self.groups[sequence.place.group].hold(sequence)
        self._release_rows(slots, step.rows)
        self._completed_at[plan.lane] = self._steps_issued
        return outputs

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Tells the policies that go by the times of steps how long one took."""
        for policy in self._policies:
            policy.step_took(plan, seconds)

    def lost(self, plan: StepPlan) -> None:
        """Takes back the newest step in flight of a lane, which had no results and changed nothing.

        Its sequences are planned again. Those with penalties start over, because their token counts
        on the device are lost, and all where the step may have replaced their states. If a lane
        lost several steps, the newest is taken back first.

        Raises:
          ValueError: the step is not the newest of its lane.
        """
        steps, slots = self._in_flight[plan.lane], self.lanes[plan.lane]
        if not steps or steps[-1].number != plan.number:
            newest = steps[-1].number if steps else "none"
            raise ValueError(f"lane {plan.lane}: step {plan.number} was lost, the newest: {newest}")
        step = steps.pop()
        slots.take_back(step)
        for sequence in slots.sequences[step.rows[slots.running[step.rows]]]:
            group, _, row = sequence.place
            end = -(-int(slots.cached[row] + slots.slack[row]) // self.page_size)
            if not self._recurrent:  # a state's page may be that of an earlier step
                self.groups[group].cut_ring(sequence, end)
            if sequence.request.params.penalises or self._recurrent:
                self._preempt(sequence)
        self._release_rows(slots, step.rows)
        self._completed_at[plan.lane] = self._steps_issued

    def begin_anew(self) -> None:
        """Starts over after the loss of the KV cache, with no step in flight and empty prefix
        caches: all running sequences are computed again, prompt and generated tokens."""
        for slots in self.lanes:
            for sequence in slots.sequences[slots.running]:
                self._preempt(sequence)

    def held(self, request_id: str) -> tuple[int, list[int]] | None:
        """Returns the DP group and the pages (as in `PageRun`) held for an ended request."""
        for group in self.groups:
            if (held := group.held.get(request_id)) is not None:
                missing = next(iter(held.ring.values()), 0)
                return group.index, group.with_rings(held.page_ids, held.ring, missing=missing)
        return None

    def let_go(self, request_id: str) -> None:
        """Releases the pages that `held` reports."""
        for group in self.groups:
            if request_id in group.held:
                group.let_go(request_id)

    def cached_tokens(self, request: Request) -> int:
        """Returns the tokens of the request that would be found in a prefix cache now."""
        sequence = self._sequence(request)
        return max(len(group.match(sequence)) for group in self.groups) * self.page_size

    def reset_prefix_caches(self) -> int:
        """Empties the prefix caches; returns the number of pages that this freed."""
        return sum(group.reset_prefix_cache() for group in self.groups)

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._live) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages and a slot, preempted ones included."""
        return len(self.queue.waiting)

    @property
    def kv_usage(self) -> list[float]:
        """The fraction of its pages that each DP group uses, 0 … 1."""
        return [group.usage for group in self.groups]

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or a step is in flight."""
        return bool(self._live) or any(self._in_flight)

    def waits(self, request_id: str) -> bool:
        """Returns whether a request has not had a slot yet."""
        sequence = self._live.get(request_id)
        return sequence is not None and sequence.status == "waiting" and sequence.found is None

    def check_integrity(self) -> None:
        """Raises RuntimeError if pages, slots, the queue or the steps in flight do not add up.

        Takes time in proportion to the number of pages, so it is for tests. See `integrity`.
        """
        for group in self.groups:
            group.changed = True
        deque(self.integrity(), 0)

    def integrity(self) -> Iterator[None]:
        """Checks the DP groups that changed since they were last checked, then the queue and the
        steps in flight; yields for each page and request, so that checks fit into the pauses of
        the step loop.

        The caller drops the iterator before it changes the scheduler: what was looked at would no
        longer fit the rest. The next call begins anew with the group that was not finished.

        Raises:
          RuntimeError: pages, slots, the queue or the steps in flight do not add up.
        """
        changed = [group for group in self.groups if group.changed]
        for group in changed:
            yield from group.integrity()
            group.changed = group is changed[-1]
        if changed:
            check_lanes(self.lanes, self._in_flight)
            self.fetches.check_integrity()
            yield from queue_integrity(self.lanes, self.queue.waiting, self._live.values())
            changed[-1].changed = False

    def _sequence(self, request: Request, due_at: float | None = None) -> Sequence:
        tokens = token_array(request.prompt, request.emitted)
        return Sequence(
            request,
            (due(request) if due_at is None else due_at, self._requests_seen),
            self.limits.max_generated(request),
            tokens,
            PageKeys(request.params.cache_salt, tokens, self.page_size),
            source=request.source,
            scores=None if request.params.prompt_logprobs is None else [None],
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the queue, to recompute its cache later. A copy of one
        goes for good."""
        if sequence.is_copy:
            if sequence.status == "running":
                self._stop(sequence, "ended")
                self._release_if_complete(sequence)
            return
        self.num_preemptions += 1
        self._send_back(sequence)

    def _compute_anew(self, sequence: Sequence) -> None:
        """Sends a sequence whose logits were not finite back to the queue, once.

        Its cache entries may be damaged, so no sequence reuses them. Tokens that its steps in
        flight sample are dropped. It may have been preempted before, and be queued already.
        """
        self.recomputed += 1
        self.groups[sequence.place.group].suspect(sequence)
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        queued = sequence.status == "waiting"
        self._stop(sequence, "waiting")
        if not queued:
            self.queue.push(sequence)
        self._release_if_complete(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status == "waiting":
            self.queue.remove(sequence)
        self._stop(sequence, "ended")
        del self._live[sequence.request.request_id]
        self._grammars -= sequence.has_grammar
        self._end_ids -= Counter(sequence.request.end_ids)  # drops ids of no live sequence

    def _stop(self, sequence: Sequence, status: Literal["waiting", "ended"]) -> None:
        """Gives a sequence no further steps, for the time being or for ever."""
        self.fetches.drop(sequence)
        for copy in sequence.copies:
            self._preempt(copy)
        sequence.status = status
        if sequence.home is not None:
            self.groups[sequence.home.group].stop(sequence, status)

    def _release_rows(self, slots: LaneSlots, rows: np.ndarray) -> None:
        leaving = slots.resident & ~slots.running
        for sequence in slots.sequences[rows[leaving[rows]]]:
            self._release_if_complete(sequence)

    def _release_if_complete(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that gets no further step and has none in flight."""
        if sequence.home is None or sequence.status == "running":
            return
        # Results find their sequence by its row. Another sequence in this row would be credited
        # with the tokens of a step in flight.
        slots = self.lanes[sequence.home.lane]
        if not slots.in_flight[sequence.place.row]:
            self.groups[sequence.home.group].release(sequence)
