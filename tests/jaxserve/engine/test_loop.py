"""The loop without threads or devices: what it does next, and steps that are lost on the way."""

from collections import deque
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxserve.engine.lane_slots import SchedulerSizes
from jaxserve.engine.loop import Await, Enqueue, Idle, Loop
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import EngineFailedError, OverloadedError
from tests.jaxserve.engine.test_scheduler_simulation import EOS_IDS, Device, expected_output
from tests.jaxserve.full_steps import Replica
from tests.jaxserve.waiting import Clock

LIMITS = SchedulerSizes(
    groups=2,
    lanes=2,
    slots=2,
    pages=14,
    page_size=2,
    max_length=20,
    token_budget=5,
    token_buckets=[2, 5],
    page_buckets=[4, 10],
    prefill_tokens=0,
    prefix_cache=False,
    side_by_side=False,
    max_waiting=20,
)


def request(name: str, prompt: int = 3, max_tokens: int = 4, **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt=[1] * prompt, params=params, **fields)


def make_loop(*waiting: Request, domains: int = 1, **limits) -> tuple[Loop, Clock]:
    clock = Clock()
    schedulers = [Scheduler(replace(LIMITS, **limits)) for _ in range(domains)]
    lanes = limits.get("lanes", LIMITS.lanes) * domains
    loop = Loop(schedulers, lanes, clock)
    for one in waiting:
        loop.submit(one)
    return loop, clock


def result(token: int = 7) -> StepResult:
    return StepResult(np.full((LIMITS.groups, LIMITS.slots), token, np.int32), {}, {})


class TestOrder:
    def test_a_lane_that_is_inside_a_step_goes_on_without_a_new_plan(self):
        loop, _ = make_loop(request("a"), request("b"), groups=1)
        assert [step.lane for step in loop.next([0, 1]).steps] == [0, 1]
        loop.enqueued(0)
        assert loop.next([]) == Enqueue([])

    def test_the_last_results_are_awaited_when_nothing_is_left_to_plan(self):
        loop, _ = make_loop(request("a", max_tokens=1))
        (step,) = loop.next([0, 1]).steps
        loop.enqueued(step.lane)
        assert loop.next([0, 1]) == Await(step)
        (output,) = loop.complete(step.lane, step.plan, result())
        assert output.finish_reason == "length"
        assert loop.next([0, 1]) == Idle(None)

    def test_a_result_out_of_order(self):
        loop, _ = make_loop(request("a"), lanes=1)
        for _ in range(2):
            loop.next([0])
            loop.enqueued(0)
        with pytest.raises(EngineFailedError, match="step 1 of lane 0 completed out of order"):
            loop.complete(0, loop.in_flight[1].plan, result())

    def test_lanes_of_several_domains(self):
        loop, _ = make_loop(domains=3, lanes=1)
        loop.submit(request("a"), domain=2)
        assert [step.lane for step in loop.next([0, 1, 2]).steps] == [2]
        assert loop.issued == [0, 0, 1]

    def test_lanes_are_asked_for_one_by_one(self):
        loop, _ = make_loop(request("a"), request("b"), groups=1)
        action = loop.next(lane for lane in [0, 1] if not max(loop.issued))
        assert [step.lane for step in action.steps] == [0]


class TestRequests:
    def test_one_too_many(self):
        loop, _ = make_loop(request("a"), max_waiting=1)
        with pytest.raises(OverloadedError):
            loop.submit(request("b", deadline=1.0))
        assert len(loop._deadlines) == 0

    def test_a_deadline_ends_its_request_and_no_later_one_of_that_name(self):
        loop, clock = make_loop(request("a", deadline=5.0), request("b", deadline=9.0))
        clock.now = 4.9
        assert loop.tick() == []
        loop.cancel("a")
        loop.submit(request("a", deadline=20.0))
        clock.now = 10.0
        assert [output.request_id for output in loop.tick()] == ["b"]
        assert len(loop._deadlines) == 1
        loop.cancel("a")
        assert loop.next([0, 1]) == Idle(None)

    def test_requests_that_ended_leave_nothing_behind(self):
        loop, clock = make_loop()
        assert loop.next([0, 1]) == Idle(None)
        for number in range(1000):
            loop.submit(request("a", deadline=1e6 + number))
            loop.cancel("a")
        loop.submit(request("b", deadline=3e6))
        held = [value for value in vars(loop).values() if isinstance(value, list | dict)]
        assert max(map(len, held)) <= 2
        clock.now = 2e6
        assert loop.tick() == []
        clock.now = 3e6
        assert [output.request_id for output in loop.tick()] == ["b"]

    def test_how_long_a_sequence_waited(self):
        loop, clock = make_loop(request("a", arrival=2.0, max_tokens=1, deadline=5.0), lanes=1)
        assert loop.next([]) == Idle(5.0), "until the next deadline"
        clock.now = 3.5
        loop.next([0])
        step = loop.enqueued(0)
        (output,) = loop.complete(0, step.plan, result())
        assert output.queue_seconds == 1.5


class Lossy:
    """Carries a loop's actions out on the pretended device, and loses steps at random."""

    def __init__(self, limits: SchedulerSizes, random: Random, losses: int):
        self.random, self.losses = random, losses
        self.limits = limits
        self.requests: dict[str, Request] = {}
        self.device = Device(limits, self.requests)
        self.scheduler = Scheduler(limits)
        self.loop = Loop([self.scheduler], limits.lanes, lambda: 0.0)
        self.replicas = [Replica(limits.groups, limits.slots) for _ in range(limits.lanes)]
        self.begun: deque = deque()
        self.sampled: deque = deque()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple] = {}

    def run(self) -> None:
        for _ in range(5000):
            busy = {step.lane for step in self.begun}
            idle = [lane for lane in range(self.limits.lanes) if lane not in busy]
            action = self.loop.next(idle)
            self.scheduler.check_integrity()
            match action:
                case Enqueue(steps):
                    for step in steps:
                        self.begun.append(self.replicas[step.lane].full(step.plan))
                    if not self._lose():
                        step = self.begun.popleft()
                        self.loop.enqueued(step.lane)
                        self.sampled.append((step, self.device.run(step)))
                case Await():
                    if not self._lose():
                        step, sampled = self.sampled.popleft()
                        made = StepResult(np.asarray(sampled, np.int32), {}, {})
                        for output in self.loop.complete(step.lane, step.plan, made):
                            self._receive(output)
                case _:
                    return
        raise AssertionError("no end in sight")

    def _lose(self) -> bool:
        if not self.losses or self.random.random() < 0.8:
            return False
        self.losses -= 1
        steps = [*(step for step, _ in self.sampled), *self.begun]
        lane = self.random.choice(steps).lane
        for step in steps:
            if step.lane == lane and (step in self.begun or self.random.random() < 0.5):
                self.device.break_off(step)
        self.sampled = deque((step, made) for step, made in self.sampled if step.lane != lane)
        self.begun = deque(step for step in self.begun if step.lane != lane)
        self.loop.lost(lane)
        return True

    def _receive(self, output) -> None:
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason:
            assert output.request_id not in self.ends
            self.ends[output.request_id] = output.finish_reason, output.stop_token_id


@settings(max_examples=60, deadline=None)
@given(
    random=st.randoms(use_true_random=False),
    lanes=st.integers(1, 3),
    prefix_cache=st.booleans(),
    losses=st.integers(1, 12),
)
def test_lost_steps_change_no_token(random, lanes, prefix_cache, losses):
    limits = replace(LIMITS, lanes=lanes, prefix_cache=prefix_cache)
    lossy = Lossy(limits, random, losses)
    for seed in range(random.randint(1, 10)):
        one = Request(
            request_id=str(seed),
            prompt=[random.choice([5, 5, 5, 3]) for _ in range(random.randint(1, 12))],
            params=SamplingParams(
                max_tokens=random.randint(1, 8), presence_penalty=random.choice([0.0, 0.0, 1.0])
            ),
            eos_token_ids=EOS_IDS,
            seed=seed,
        )
        lossy.requests[one.request_id] = one
        lossy.loop.submit(one)
    lossy.run()
    for name, one in lossy.requests.items():
        tokens, *end = expected_output(one, limits.max_length)
        assert (lossy.tokens[name], lossy.ends[name]) == (tokens, tuple(end))
    assert not lossy.scheduler.has_work
    assert lossy.scheduler.kv_usage == [0.0] * limits.groups
