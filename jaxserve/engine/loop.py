"""The engine's next action: a state machine, events in, actions out.

Called by the engine's thread (`engine.py`), which carries the actions out on devices, and by the
planner's simulator, which carries them out in simulated time. It owns the schedulers, the deadlines
of requests and the record of the steps in flight. It has no threads, locks or sleep, knows neither
JAX nor text, and has the time from a clock that it is given.

The events are methods: `submit`, `cancel`, `tick` (time has passed), `enqueued`, `complete` and
`begin_anew`; of a hand-off of pages `prefill`, `export`, `arrived`, `imported` and `fetch_failed`.
What they return is to be delivered. `next` gives the action.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxserve.engine.admission import FetchOrder
from jaxserve.engine.outputs import StepOutputs, StepResult
from jaxserve.engine.request import Request, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineFailedError
from jaxserve.observe.load import DomainLoad
from jaxserve.roles.layout import PageRun
from jaxserve.roles.step_plan import StepPlan

if TYPE_CHECKING:  # only prefill workers hold prompts
    from jaxserve.engine.holds import Holds


class ScheduledStep(NamedTuple):
    """A step that was planned and is not complete."""

    lane: int
    """Number among all lanes: lane i is lane i // domains of domain i mod domains."""
    plan: StepPlan


class Enqueue(NamedTuple):
    """Begin these steps, if any; enqueue stages until a lane leaves; report `enqueued`."""

    steps: list[ScheduledStep]


class Await(NamedTuple):
    """Wait for the result of this step, and report `complete`, or `begin_anew`."""

    step: ScheduledStep


class FetchPages(NamedTuple):
    """Ask for KV entries that a prefill worker holds, without waiting; report `arrived` of every
    piece in order, or `fetch_failed`."""

    domain: int
    order: FetchOrder


class DropFetch(NamedTuple):
    """Cancel a fetch whose pages are no longer wanted."""

    domain: int
    ticket: int


class ImportPages(NamedTuple):
    """Write a piece that has arrived into these pages, and report `imported`."""

    domain: int
    ticket: int
    run: PageRun
    tokens: int
    piece: Any
    """The fetched arrays, passed through unread."""


class ExportPages(NamedTuple):
    """Read held pages, and answer the job that asked for them."""

    run: PageRun
    tokens: int
    reply: Any
    """The job that was given to `export`."""


class Idle(NamedTuple):
    """Do nothing before another event."""

    until: float | None
    """Seconds of the clock at which the next deadline passes; None without deadlines."""


PageAction = FetchPages | DropFetch | ImportPages | ExportPages
Action = Enqueue | Await | PageAction | Idle


class FetchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How fetched pages are written, and how a request goes on whose pages did not come.

    Attributes:
      recompute: Whether the request computes missing entries, or fails.
      most: Most tokens that it may recompute; 0: any number.
      between_steps: Most tokens of pieces that are written between two steps, while lanes have
        steps; 0: any number.
    """

    recompute: bool = True
    most: int = 0
    between_steps: int = 0

    def recomputes(self, missing: int) -> bool:
        """True if a request that lacks `missing` tokens computes them itself."""
        return self.recompute and (not self.most or missing <= self.most)


class Loop:
    """Decides the order of planning, enqueueing and reading for all lanes of all domains.

    The host is one step behind every lane: it enqueues a lane's next step before it awaits the
    result of the last one (`docs/decisions/lengths-live-on-the-device.md`).

    Args:
      schedulers: One a domain.
      lanes: Number of lanes of all domains.
      clock: Returns seconds, on the clock of the requests' arrivals and deadlines.

    Attributes:
      issued: Number of steps planned so far, by lane.
      holds: Prompts that are held for decode workers; None: this worker holds none.
      fetch_policy: How fetched pages are written, and how a request goes on without them.
    """

    def __init__(self, schedulers: Sequence[Scheduler], lanes: int, clock: Callable[[], float]):
        self.schedulers = schedulers
        self.issued = [0] * lanes
        self.holds: Holds | None = None
        self.fetch_policy = FetchPolicy()
        self._page_actions: deque[Action] = deque()
        self._imports: deque[ImportPages] = deque()
        self._written = 0  # tokens of pieces since the last steps were begun
        self._clock = clock
        self._begun: dict[int, ScheduledStep] = {}  # by lane, not enqueued to the end yet
        self._in_flight: deque[ScheduledStep] = deque()  # enqueued, in this order
        self._ahead: int | None = None  # the lane that was enqueued last
        self._since = 0.0  # when the oldest step in flight could begin
        self._deadlines: dict[str, float] = {}  # of requests that have not ended
        self._next_deadline = math.inf  # no later than the earliest of them

    @property
    def in_flight(self) -> Sequence[ScheduledStep]:
        """Steps that were enqueued and are not complete, oldest first."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot, or for room to be held."""
        held_back = self.holds.waiting if self.holds is not None else 0
        return held_back + sum(scheduler.num_waiting for scheduler in self.schedulers)

    def load(self) -> list[DomainLoad]:
        """Returns the figures of each domain; may be read from any thread."""
        return [
            DomainLoad(
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                kv_usage=scheduler.kv_usage,
                preemptions=scheduler.num_preemptions,
                prefix_queries=scheduler.queue.prompt_tokens,
                prefix_hits=scheduler.queue.prompt_tokens_found,
                invalid_logits=scheduler.invalid_logits,
                recomputed=scheduler.recomputed,
                quarantined=sum(group.pool.quarantined for group in scheduler.groups),
                drafts=scheduler.drafts if scheduler.draft_policy else None,
            )
            for scheduler in self.schedulers
        ]

    def submit(self, request: Request, domain: int = 0) -> None:
        """Queues a request with the scheduler of a domain.

        Raises:
          InvalidRequestError: The request could never run.
          OverloadedError: Too many requests wait.
        """
        self.schedulers[domain].add(request)
        self._note_deadline(request)

    def cancel(self, request_id: str) -> list[TokenOutput]:
        """Ends a request; returns its last output, or nothing if it is unknown or has ended."""
        self._deadlines.pop(request_id, None)
        outputs = []
        if self.holds is not None and self.holds.cancel(request_id):
            outputs.append(TokenOutput(request_id=request_id, finish_reason="cancelled"))
        for scheduler in self.schedulers:
            outputs += scheduler.cancel(request_id)
        if self.holds is not None:
            self.holds.ended(request_id)
        return outputs

    def waits(self, request_id: str) -> bool:
        """True if a request has not had a slot yet."""
        return any(scheduler.waits(request_id) for scheduler in self.schedulers)

    def prefill(self, request: Request) -> None:
        """Takes in a prompt of whole pages, to be held; its last output says when it is held.

        Raises:
          InvalidRequestError: The prompt could never run.
          OverloadedError: Too many prompts wait.
        """
        assert self.holds is not None
        self.holds.add(request)
        self._note_deadline(request)

    def export(self, hand_off: str, start: int, stop: int, reply: Any) -> None:
        """Queues the reading of held entries for a job, `reply`. Raises as `Holds.run`."""
        if self.holds is None:
            raise KeyError(hand_off)
        run = self.holds.run(hand_off, start, stop)
        self._page_actions.append(ExportPages(run, stop - start, reply))

    def arrived(self, domain: int, ticket: int, first: int, tokens: int, piece: Any) -> None:
        """Queues the writing of a fetched piece; raises as `Fetches.run`."""
        run = self.schedulers[domain].fetches.run(ticket, first, tokens)
        if run is not None:
            self._imports.append(ImportPages(domain, ticket, run, tokens, piece))

    def imported(self, domain: int, ticket: int, tokens: int) -> None:
        """Notes that the writing of a piece was enqueued."""
        sequence = self.schedulers[domain].fetches.written(ticket, tokens)
        if sequence is not None:
            waited = self._clock() - sequence.request.arrival
            sequence.hand_off_seconds = waited - sequence.queue_seconds

    def fetch_failed(
        self, domain: int, ticket: int, error: str, *, mismatch: bool = False
    ) -> list[TokenOutput]:
        """Gives up the rest of a fetch; the request recomputes, or fails.

        Args:
          domain: Domain of the fetch.
          ticket: The fetch.
          error: Reason, for the request's caller.
          mismatch: Whether other tokens are held than the request's. That fails it in any case.

        Returns:
          the request's last output, if it fails.
        """
        scheduler = self.schedulers[domain]
        failed = scheduler.fetches.failed(ticket)
        if failed is None:
            return []
        sequence, missing = failed
        if not mismatch and self.fetch_policy.recomputes(missing):
            return []
        request_id = sequence.request.request_id
        self._deadlines.pop(request_id, None)
        text = f"the prompt's KV pages did not come: {error}"
        return [
            msgspec.structs.replace(output, error=text, pages_lost=not mismatch)
            for output in scheduler.cancel(request_id, "error")
        ]

    def tick(self) -> list[TokenOutput]:
        """Ends the requests whose deadline has passed; returns their last outputs."""
        outputs: list[TokenOutput] = []
        if self.holds is not None:
            self.holds.tick()
        now = self._clock()
        if now >= self._next_deadline:
            for request_id in [one for one, until in self._deadlines.items() if until <= now]:
                outputs += self.cancel(request_id)
            self._find_next_deadline()
        return outputs

    def next(self, idle_lanes: Iterable[int]) -> Action:
        """Returns the next action.

        Args:
          idle_lanes: Lanes whose next step may begin. Each is asked for after the plan of the lane
            before it was made.
        """
        # Devices work in the order of enqueueing, and the next steps may read these pages.
        if (action := self._page_action() or self._import()) is not None:
            return action
        # The host is one step ahead of the lane that it enqueued last, and goes no further.
        if sum(step.lane == self._ahead for step in self._in_flight) > 1:
            return Await(self._in_flight[0])
        steps = []
        domains = len(self.schedulers)
        for lane in idle_lanes:
            plan = self.schedulers[lane % domains].plan(lane // domains)
            if plan is not None:
                self._begun[lane] = ScheduledStep(lane, plan.in_domain(lane % domains))
                self.issued[lane] += 1
                steps.append(self._begun[lane])
        for scheduler in self.schedulers:
            if admitted := scheduler.queue.take_admitted():
                now = self._clock()
                for sequence in admitted:
                    sequence.queue_seconds = now - sequence.request.arrival
        self._written = 0
        if self._begun:
            return Enqueue(steps)
        if (action := self._page_action() or self._import()) is not None:
            return action
        if self._in_flight:
            return Await(self._in_flight[0])
        self._find_next_deadline()
        until = self._next_deadline
        if self.holds is not None and self.holds.next_deadline is not None:
            until = min(until, self.holds.next_deadline)
        return Idle(until if until < math.inf else None)

    def enqueued(self, lane: int) -> ScheduledStep:
        """Notes that the lane's step was enqueued to its end; returns the step."""
        step = self._begun.pop(lane)
        if not self._in_flight:
            self._since = self._clock()
        self._in_flight.append(step)
        self._ahead = lane
        return step

    def complete(self, lane: int, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Takes the result of a step; returns the outputs of its requests.

        Raises:
          EngineFailedError: The step is not the oldest in flight.
        """
        oldest = self._in_flight[0] if self._in_flight else None
        if oldest is None or (oldest.lane, oldest.plan.number) != (lane, plan.number):
            raise EngineFailedError(f"step {plan.number} of lane {lane} completed out of order")
        self._in_flight.popleft()
        scheduler = self.schedulers[lane % len(self.schedulers)]
        # Measured since the last step of any lane: the time since the last step of its own lane
        # would contain the steps of other lanes.
        since, self._since = self._since, self._clock()
        scheduler.took(plan, self._since - since)
        outputs = scheduler.complete(plan, result)
        if self._deadlines:
            for sequence in outputs.ended:
                self._deadlines.pop(sequence.request.request_id, None)
        if self.holds is not None:
            for sequence in outputs.ended:
                self.holds.ended(sequence.request.request_id)
        return outputs

    def lost(self, lane: int) -> None:
        """Takes back all steps in flight on a lane, which gave nothing; they are planned again.

        A lane's steps are lost together, because each is fed the samples of the one before it.
        Sequences keep their pages and tokens. Draws depend on seed and position alone, so the
        tokens are those of an undisturbed run (xDeepServe §6.2).
        """
        steps = [step for step in self._in_flight if step.lane == lane]
        if lane in self._begun:
            steps.append(self._begun.pop(lane))
        self._in_flight = deque(step for step in self._in_flight if step.lane != lane)
        # The newest first: each was issued from the lengths that the one before it leaves.
        for step in reversed(steps):
            self.schedulers[lane % len(self.schedulers)].lost(step.plan)

    def begin_anew(self) -> None:
        """Takes back all steps, after the KV caches were lost with them.

        Not for a worker that holds prompts: the held pages are lost, too. The prefix caches are
        emptied first, because sequences that leave their pages to them would have them kept.
        """
        for scheduler in self.schedulers:
            scheduler.reset_prefix_caches()
        for lane in range(len(self.issued)):
            self.lost(lane)
        for scheduler in self.schedulers:
            scheduler.begin_anew()

    def _note_deadline(self, request: Request) -> None:
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            self._next_deadline = min(self._next_deadline, request.deadline)

    def _find_next_deadline(self) -> None:
        self._next_deadline = min(self._deadlines.values(), default=math.inf)

    def _page_action(self) -> Action | None:
        """Returns the next action of a hand-off, apart from writing pages that have arrived."""
        for domain, scheduler in enumerate(self.schedulers):
            for order in scheduler.fetches.take_new():
                self._page_actions.append(FetchPages(domain, order))
            for ticket in scheduler.fetches.take_dropped():
                self._page_actions.append(DropFetch(domain, ticket))
        return self._page_actions.popleft() if self._page_actions else None

    def _import(self) -> ImportPages | None:
        """Returns the next piece to write before the next steps, unless its fetch was dropped."""
        most = self.fetch_policy.between_steps
        while self._imports and not (most and self._written >= most):
            action = self._imports.popleft()
            if self.schedulers[action.domain].fetches.wanted(action.ticket):
                self._written += action.tokens
                return action
        return None
