"""Prompts that a prefill worker may run and hold, and until when; without devices."""

import numpy as np
import pytest

from jaxserve.engine.holds import HoldLimits, Holds
from jaxserve.engine.loop import Await, Enqueue, ExportPages, Idle, Loop
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.roles.layout import NO_TOKEN, PageRun
from tests.jaxserve.engine.step_plans import make_scheduler
from tests.jaxserve.waiting import Clock

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def make(requests: int = 8, pages: int = 12, max_waiting: int = 4) -> tuple[Loop, Clock]:
    clock = Clock(100.0)
    sizes = {"slots": 4, "pages": 16, "page_size": 4, "max_length": 64, "page_buckets": [16]}
    sizes |= {"token_budget": 8, "token_buckets": [8], "prefix_cache": True}
    scheduler = make_scheduler(max_waiting=max_waiting, **sizes).scheduler
    loop = Loop([scheduler], 1, clock)
    limits = HoldLimits(requests=requests, pages=pages, lease_seconds=30.0)
    names = (f"lease {number}" for number in range(1000))
    loop.holds = Holds(scheduler, limits, clock, lambda: next(names))
    return loop, clock


def prompt(name: str, tokens: int = 8, arrival: float = 100.0, **fields) -> Request:
    first = sum(map(ord, name))
    return Request(
        request_id=name,
        prompt=[first, *range(1, tokens)],
        params=PARAMS,
        hold=True,
        arrival=arrival,
        **fields,
    )


def run(loop: Loop, sampled: int = 7) -> list[tuple[str, str | None]]:
    """Until nothing is to be done: who ended, and why."""
    ended = []
    while not isinstance(action := loop.next([0]), Idle):
        match action:
            case Enqueue():
                loop.enqueued(0)
            case Await(step):
                result = StepResult(np.full((1, 4), sampled, np.int32), {}, {})
                outputs = loop.complete(step.lane, step.plan, result)
                ended += [(output.request_id, output.finish_reason) for output in outputs]
    loop.schedulers[0].check_integrity()
    return ended


def test_pages_that_do_not_cover_the_prompt_are_not_held(caplog):
    loop, _ = make()
    scheduler = loop.schedulers[0]
    held = scheduler.held
    scheduler.held = lambda request_id: (held(request_id)[0], held(request_id)[1][:-1])
    loop.prefill(prompt("a"))
    assert run(loop) == [("a", "length")]
    assert loop.holds.of_request("a") is None
    assert "request 'a': 1 pages for 8 tokens are not held" in caplog.text
    assert scheduler.kv_usage == [0.0]


def test_a_prompt_that_the_scheduler_refuses_waits():
    """The queue is full again after a request without numbers went back to it."""
    loop, _ = make(max_waiting=1)
    scheduler = loop.schedulers[0]
    scheduler.add(prompt("waits"))
    with pytest.raises(OverloadedError):
        loop.prefill(prompt("refused"))
    scheduler.max_waiting = 2
    loop.prefill(prompt("first"))
    loop.holds._queue(0.0, prompt("second"))
    loop.holds.admit()
    assert loop.holds.waiting == 1
    assert {name for name, _ in run(loop)} == {"waits", "first", "second"}
    assert loop.holds.held == 2


def test_a_lease_ends_unless_it_is_renewed():
    loop, clock = make()
    for name in "ab":
        loop.prefill(prompt(name))
    run(loop)
    assert loop.next([0]) == Idle(130.0)
    clock.now = 120.0
    assert loop.holds.renew("lease 0")
    clock.now = 130.0
    loop.tick()
    assert (loop.holds.held, loop.holds.expired) == (1, 1)
    assert loop.next([0]) == Idle(150.0)
    assert not loop.holds.renew("lease 1")
    loop.holds.release("lease 1")
    clock.now = 150.0
    loop.tick()
    assert loop.holds.held == 0
    assert loop.schedulers[0].kv_usage == [0.0]


@pytest.mark.parametrize("limits", [{"pages": 5}, {"requests": 2}])
def test_prompts_wait_for_room(limits):
    """A prompt that takes more than the bound runs alone."""
    loop, _ = make(**limits)
    for name in "abc":
        loop.prefill(prompt(name))
    assert run(loop) == [("a", "length"), ("b", "length")]
    assert (loop.holds.held, loop.holds.waiting) == (2, 1)
    loop.prefill(prompt("long", 48, arrival=999.0))
    loop.holds.release(loop.holds.of_request("a").hand_off)
    assert run(loop) == [("c", "length")]
    for name in "bc":
        loop.cancel(name)
    assert run(loop) == [("long", "length")]


def test_a_name_is_used_once_and_too_many_wait():
    loop, _ = make(requests=1, max_waiting=2)
    loop.prefill(prompt("first"))
    loop.prefill(prompt("waits"))
    with pytest.raises(OverloadedError, match="2 prompts wait already"):
        loop.prefill(prompt("third"))
    for _ in ("running", "held"):
        for name in ("first", "waits"):
            with pytest.raises(InvalidRequestError, match="is already running"):
                loop.prefill(prompt(name))
        run(loop)


def test_a_short_prompt_overtakes_a_long_one_that_came_just_before():
    loop, _ = make(requests=1, pages=99, max_waiting=9)
    loop.prefill(prompt("first"))
    limits = loop.holds.limits
    long_seconds = 60 / limits.tokens_per_second
    loop.prefill(prompt("long", 60, arrival=100.0))
    loop.prefill(prompt("short", 4, arrival=100.0 + long_seconds / 2))
    loop.prefill(prompt("late", 4, arrival=100.0 + long_seconds))
    order = []
    for _ in range(4):
        order += [name for name, _ in run(loop)]
        loop.cancel(order[-1])
    assert order == ["first", "short", "long", "late"]


def test_one_that_is_cancelled_or_late():
    loop, clock = make(requests=1)
    loop.prefill(prompt("a"))
    loop.prefill(prompt("b"))
    loop.prefill(prompt("c", deadline=101.0))
    assert [output.finish_reason for output in loop.cancel("b")] == ["cancelled"]
    clock.now = 102.0
    assert [output.request_id for output in loop.tick()] == ["c"]
    assert [output.finish_reason for output in loop.cancel("a")] == ["cancelled"]
    assert run(loop) == []
    assert (loop.holds.held, loop.holds.waiting) == (0, 0)
    loop.prefill(prompt("d"))
    assert run(loop) == [("d", "length")]


def test_what_is_not_a_number_is_not_held():
    loop, _ = make()
    loop.prefill(prompt("a"))
    # It is computed anew once before it ends.
    assert run(loop, sampled=NO_TOKEN) == [("a", None), ("a", "error")]
    assert loop.holds.held == 0


def test_pages_of_a_range():
    loop, _ = make()
    loop.prefill(prompt("a", 12))
    run(loop)
    pages = loop.holds.of_request("a").page_ids
    assert loop.holds.run("lease 0", 0, 12) == PageRun(0, pages)
    assert loop.holds.run("lease 0", 5, 8) == PageRun(0, pages[1:2], 1)
    loop.export("lease 0", 4, 12, "whom")
    assert loop.next([0]) == ExportPages(PageRun(0, pages[1:]), 8, "whom")
    with pytest.raises(ValueError, match="tokens 4 to 13 wanted, 12 are held"):
        loop.export("lease 0", 4, 13, None)
    with pytest.raises(KeyError):
        loop.export("lease 9", 0, 4, None)
