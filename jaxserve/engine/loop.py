"""What an engine does next: a state machine, events in, actions out.

Called by the engine's thread (`engine.py`), which carries the actions out on devices, and by the
planner's simulator, which carries them out in simulated time. It owns the schedulers, the deadlines
of requests and the record of the steps in flight. It has no threads, locks or sleep, knows neither
JAX nor text, and has the time from a clock that it is given.

The events are methods: `submit`, `cancel`, `tick` (time has passed), `enqueued`, `complete` and
`lost`; what they return is to be delivered. `next` gives the action.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxserve.engine.logprobs import StepResult
from jaxserve.engine.outputs import StepOutputs
from jaxserve.engine.request import Request, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineFailedError
from jaxserve.roles.step_plan import StepPlan


class ScheduledStep(NamedTuple):
    """A step that was planned and is not complete."""

    lane: int
    """Of all domains: lane i is lane i // domains of domain i mod domains."""
    plan: StepPlan


class Enqueue(NamedTuple):
    """Begin these steps, if any; enqueue stages until a lane leaves; report `enqueued`."""

    steps: list[ScheduledStep]


class Await(NamedTuple):
    """Wait for the result of this step, and report `complete` or `lost`."""

    step: ScheduledStep


class Idle(NamedTuple):
    """Nothing is to be done before another event."""

    until: float | None
    """The next deadline of a request, in seconds of the clock; None: there is none."""


Action = Enqueue | Await | Idle


class Loop:
    """Decides the order of planning, enqueueing and reading for all lanes of all domains.

    Every lane is one step ahead of what was read of it (design, decision 8): its next step is
    enqueued before the result of its last one is awaited.

    Args:
      schedulers: one a domain.
      lanes: of all domains.
      clock: seconds, on the clock of the requests' arrivals and deadlines.

    Attributes:
      issued: steps that were planned so far, by lane.
    """

    def __init__(self, schedulers: Sequence[Scheduler], lanes: int, clock: Callable[[], float]):
        self.schedulers = schedulers
        self.issued = [0] * lanes
        self._clock = clock
        self._begun: dict[int, ScheduledStep] = {}  # by lane, not enqueued to the end yet
        self._in_flight: deque[ScheduledStep] = deque()  # enqueued, in this order
        self._ahead: int | None = None  # the lane that was enqueued last
        self._deadlines: dict[str, float] = {}  # of requests that have not ended
        self._by_deadline: list[tuple[float, str]] = []  # a heap; may hold requests that ended

    @property
    def in_flight(self) -> Sequence[ScheduledStep]:
        """Steps that were enqueued and are not complete, oldest first."""
        return self._in_flight

    @property
    def open_deadlines(self) -> int:
        """Requests that have a deadline and have not ended."""
        return len(self._deadlines)

    def submit(self, request: Request, domain: int = 0) -> None:
        """Queues a request with the scheduler of a domain.

        Raises:
          InvalidRequestError: it could never run.
          OverloadedError: too many requests wait.
        """
        self.schedulers[domain].add(request)
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            heapq.heappush(self._by_deadline, (request.deadline, request.request_id))

    def cancel(self, request_id: str) -> list[TokenOutput]:
        """Ends a request; its last output, or nothing if it is unknown or has ended."""
        self._deadlines.pop(request_id, None)
        outputs = []
        for scheduler in self.schedulers:
            outputs += scheduler.cancel(request_id)
        return outputs

    def tick(self) -> list[TokenOutput]:
        """Ends the requests whose deadline has passed; their last outputs."""
        outputs: list[TokenOutput] = []
        now = self._clock()
        while self._by_deadline and self._by_deadline[0][0] <= now:
            deadline, request_id = heapq.heappop(self._by_deadline)
            # An id may have been used again, by a request with another deadline.
            if self._deadlines.get(request_id) == deadline:
                outputs += self.cancel(request_id)
        return outputs

    def next(self, idle_lanes: Iterable[int]) -> Action:
        """The next action.

        Args:
          idle_lanes: lanes whose next step may begin; asked for one by one, each after the plan of
            the lane before it was made.
        """
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
        self._note_admitted()
        if self._begun:
            return Enqueue(steps)
        if self._in_flight:
            return Await(self._in_flight[0])
        while self._by_deadline and self._by_deadline[0][1] not in self._deadlines:
            heapq.heappop(self._by_deadline)
        return Idle(self._by_deadline[0][0] if self._by_deadline else None)

    def enqueued(self, lane: int) -> ScheduledStep:
        """The lane's step has been enqueued to its end; returns it."""
        step = self._begun.pop(lane)
        self._in_flight.append(step)
        self._ahead = lane
        return step

    def complete(self, lane: int, plan: StepPlan, result: StepResult) -> StepOutputs:
        """The result of a step is there; returns the outputs of its requests.

        Raises:
          EngineFailedError: it is not the oldest step in flight.
        """
        oldest = self._in_flight[0] if self._in_flight else None
        if oldest is None or (oldest.lane, oldest.plan.number) != (lane, plan.number):
            raise EngineFailedError(f"step {plan.number} of lane {lane} completed out of order")
        self._in_flight.popleft()
        outputs = self.schedulers[lane % len(self.schedulers)].complete(plan, result)
        if self._deadlines:
            for sequence in outputs.ended:
                self._deadlines.pop(sequence.request.request_id, None)
        return outputs

    def lost(self, lane: int) -> None:
        """What is in flight on a lane gave nothing: its sequences are planned again.

        All of the lane's steps are lost together, because a later one is fed what the one before it
        samples. Sequences keep their pages, and everything that the host knows; the draws depend on
        seed and position alone, so the tokens are those of an undisturbed run (xDeepServe §6.2).
        """
        steps = [step for step in self._in_flight if step.lane == lane]
        if lane in self._begun:
            steps.append(self._begun.pop(lane))
        self._in_flight = deque(step for step in self._in_flight if step.lane != lane)
        for step in reversed(steps):
            self.schedulers[lane % len(self.schedulers)].lost(step.plan)

    def _note_admitted(self) -> None:
        """Sequences that were admitted have waited until now."""
        for scheduler in self.schedulers:
            if admitted := scheduler.take_admitted():
                now = self._clock()
                for sequence in admitted:
                    sequence.queue_seconds = now - sequence.request.arrival
