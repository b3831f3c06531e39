"""The loop without threads or devices: what it does next."""

import numpy as np
import pytest
from msgspec.structs import replace

from jaxserve.engine.loop import Await, Enqueue, Idle, Loop
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.errors import EngineFailedError, OverloadedError
from tests.jaxserve.waiting import Clock

SHAPE = {"groups": 2, "lanes": 2, "slots": 2, "pages": 14, "page_size": 2, "max_length": 20}
BUCKETS = {"token_budget": 5, "token_buckets": [2, 5], "page_buckets": [4, 10]}
LIMITS = SchedulerSizes(**SHAPE, **BUCKETS, max_waiting=20)


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
