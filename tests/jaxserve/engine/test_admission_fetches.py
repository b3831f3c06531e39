"""Sequences that wait for pages of a prefill worker: the loop and the books, without any device."""

from random import Random

import numpy as np
import pytest

from jaxserve.engine.admission import FetchOrder
from jaxserve.engine.loop import (
    Await,
    DropFetch,
    Enqueue,
    FetchPages,
    FetchPolicy,
    Idle,
    ImportPages,
    Loop,
)
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.layout import PageRun
from tests import golden
from tests.jaxserve.engine.step_plans import make_scheduler

SIZE = 4


def make_loop(pages: int = 16, slots: int = 2, groups: int = 1, lanes: int = 1) -> Loop:
    sizes = {"groups": groups, "lanes": lanes, "slots": slots, "pages": pages, "page_size": SIZE}
    sizes |= {"max_length": 48, "page_buckets": [12], "max_waiting": 20, "prefix_cache": True}
    scheduler = make_scheduler(token_budget=8, token_buckets=[8], **sizes).scheduler
    return Loop([scheduler], lanes, lambda: 0.0)


def request(name: str, length: int, held: int | None = None, salt: str = "", most=4) -> Request:
    prompt = list(range(length))
    source = None if held is None else PagesSource("host:1", name, held, "d")
    params = SamplingParams(max_tokens=most, ignore_eos=True, cache_salt=salt)
    return Request(request_id=name, prompt=prompt, params=params, source=source)


def step(loop: Loop, lanes=(0,)) -> FetchPages | DropFetch | ImportPages | Idle | list:
    """The next action about pages, or what a step gave."""
    match loop.next([lane for lane in lanes if lane not in loop._begun]):
        case Enqueue():
            loop.enqueued(next(iter(loop._begun)))
            return step(loop, lanes)
        case Await(awaited):
            shape = (len(loop.schedulers[0].groups), loop.schedulers[0].lanes[0].slots)
            result = StepResult(np.full(shape, 7, np.int32), {}, {})
            return [*loop.complete(awaited.lane, awaited.plan, result)]
        case action:
            return action


def bring(loop: Loop, order, first: int, tokens: int) -> ImportPages:
    """A piece arrives; what is to be done with it."""
    loop.arrived(0, order.ticket, first, tokens, "piece")
    action = step(loop, ())
    assert isinstance(action, ImportPages)
    return action


def finish(loop: Loop) -> dict[str, list[int]]:
    """Everything that is still to come."""
    tokens: dict[str, list[int]] = {}
    while not isinstance(news := step(loop), Idle):
        assert isinstance(news, list), news
        for output in news:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    loop.schedulers[0].check_integrity()
    return tokens


def fetch_of(loop: Loop) -> FetchOrder:
    action = step(loop)
    assert isinstance(action, FetchPages), action
    return action.order


def fetching() -> tuple[Loop, FetchOrder]:
    """A loop with one request of 18 tokens, and the order for the 16 that are held elsewhere."""
    loop = make_loop()
    loop.submit(request("a", 18, held=16))
    return loop, fetch_of(loop)


class TestOrder:
    def test_it_gets_no_step_before_its_pages_are_written(self):
        loop, order = fetching()
        loop.fetch_policy = FetchPolicy(between_steps=4)  # without steps all are written at once
        assert (order.request_id, order.start, order.stop, order.group) == ("a", 0, 16, 0)
        assert order.token_ids == list(range(16))
        assert step(loop) == Idle(None)
        first = bring(loop, order, 0, 8)
        assert first == ImportPages(0, order.ticket, PageRun(0, [0, 1]), 8, "piece")
        loop.imported(0, order.ticket, 8)
        assert step(loop) == Idle(None)
        assert bring(loop, order, 8, 8).run == PageRun(0, [2, 3])
        loop.imported(0, order.ticket, 8)
        action = loop.next([0])
        assert isinstance(action, Enqueue)
        (planned,) = action.steps
        assert planned.plan.kv_lengths.tolist() == [18]
        assert len(planned.plan.token_ids) == 2
        loop.enqueued(0)
        assert finish(loop) == {"a": [7, 7, 7, 7]}

    def test_few_are_written_between_two_steps(self):
        """Pieces arrive while steps run, in an order that stays."""
        loop = make_loop()
        loop.fetch_policy = FetchPolicy(between_steps=8)
        loop.submit(request("running", 5, salt="other", most=24))
        loop.submit(request("a", 34, held=32))
        order = fetch_of(loop)
        for first in range(0, 32, 4):
            loop.arrived(0, order.ticket, first, 4, first)
        seen: list[int | str] = []
        while len(seen) < 12:
            match loop.next([0]):
                case ImportPages() as action:
                    seen.append(action.piece)
                    loop.imported(0, order.ticket, 4)
                case Enqueue():
                    seen.append("step")
                    loop.enqueued(0)
                case Await(awaited):
                    result = StepResult(np.full((1, 2), 7, np.int32), {}, {})
                    loop.complete(awaited.lane, awaited.plan, result)
        assert seen == [0, 4, "step", 8, 12, "step", 16, 20, "step", 24, 28, "step"]
        assert finish(loop)["a"] == [7, 7, 7, 7]

    def test_what_the_own_cache_has_is_not_fetched(self):
        loop = make_loop()
        loop.submit(request("a", 10))
        finish(loop)
        loop.submit(request("b", 18, held=16))
        order = fetch_of(loop)
        assert (order.start, order.stop) == (8, 16)
        assert bring(loop, order, 8, 8).run.page_ids == [3, 4]
        loop.imported(0, order.ticket, 8)
        finish(loop)
        loop.submit(request("c", 18, held=16))
        assert finish(loop) == {"c": [7, 7, 7, 7]}

    @pytest.mark.parametrize(("held", "stop"), [(15, 12), (17, 16), (20, 16), (3, None)])
    def test_whole_pages_are_fetched_and_one_token_is_fed(self, held, stop):
        """The last page of a prompt of 20 tokens holds the token that has to be fed."""
        loop = make_loop()
        loop.submit(request("a", 20, held=held))
        if stop is None:
            assert finish(loop) == {"a": [7, 7, 7, 7]}
            return
        assert fetch_of(loop).stop == stop

    def test_pieces_out_of_order_and_pages_that_do_not_cover_one(self):
        loop, order = fetching()
        for first, tokens in ((4, 4), (0, 0), (0, 20)):
            with pytest.raises(ValueError, match="arrived, expected 0 to 16"):
                loop.arrived(0, order.ticket, first, tokens, None)
        loop.schedulers[0].fetches._fetches[order.ticket].sequence.page_ids[1:] = []
        with pytest.raises(ValueError, match="1 pages for tokens 0 to 8"):
            loop.arrived(0, order.ticket, 0, 8, None)


class TestEnds:
    @pytest.mark.parametrize("moment", ["planned", "asked", "arrived"])
    def test_cancelled_while_it_waits(self, moment):
        loop, ticket = make_loop(), 0
        loop.submit(request("a", 18, held=16))
        loop.schedulers[0].plan(0)
        if moment != "planned":
            ticket = fetch_of(loop).ticket
        if moment == "arrived":
            loop.arrived(0, ticket, 0, 16, None)
        (output,) = loop.cancel("a")
        assert output.finish_reason == "cancelled"
        assert step(loop) == DropFetch(0, ticket)
        loop.arrived(0, ticket, 0, 16, None)
        assert loop.fetch_failed(0, ticket, "late") == []
        assert step(loop) == Idle(None)
        loop.schedulers[0].check_integrity()
        assert loop.schedulers[0].kv_usage == [0.0]
        assert not loop.schedulers[0].has_work

    def test_a_fetch_that_has_more_than_was_ordered_does_not_add_up(self):
        loop, order = fetching()
        scheduler = loop.schedulers[0]
        scheduler.fetches._fetches[order.ticket].arrived = order.stop + 1
        with pytest.raises(RuntimeError, match="'a' does not add up"):
            scheduler.check_integrity()

    def test_what_had_come_is_kept_when_the_rest_does_not(self):
        loop, order = fetching()
        bring(loop, order, 0, 8)
        loop.imported(0, order.ticket, 8)
        assert loop.fetch_failed(0, order.ticket, "gone") == []
        action = loop.next([0])
        assert isinstance(action, Enqueue)
        assert action.steps[0].plan.kv_lengths.tolist() == [16]  # from 8 on
        loop.enqueued(0)
        assert finish(loop) == {"a": [7, 7, 7, 7]}

    @golden.table("engine/failed_fetches.yaml")
    def test_recompute_or_fail(self, policy, mismatch, fails):
        loop, order = fetching()
        loop.fetch_policy = FetchPolicy(**policy)
        outputs = loop.fetch_failed(0, order.ticket, "why", mismatch=mismatch)
        errors = ["the prompt's KV pages did not come: why"] * fails
        assert [output.error for output in outputs] == errors
        assert [output.finish_reason for output in outputs] == ["error"] * fails
        assert finish(loop) == ({} if fails else {"a": [7, 7, 7, 7]})

    def test_it_may_be_preempted_and_fetches_again(self):
        """A sequence that is due earlier grows into the pages of one that waits."""
        loop = make_loop(pages=8)
        loop.submit(request("old", 8, most=24))
        loop.next([0])
        loop.enqueued(0)
        loop.submit(request("new", 14, held=12, salt="other"))
        orders, dropped, tokens = [], [], 0
        while tokens < 24:
            match step(loop):
                case FetchPages(_, order):
                    orders.append(order)
                case DropFetch(_, ticket):
                    dropped.append(ticket)
                case list() as news:
                    tokens += sum(len(output.token_ids) for output in news)
                case action:
                    raise AssertionError(action)
        assert dropped == [orders[0].ticket]
        while len(orders) < 2:
            action = step(loop)
            if isinstance(action, FetchPages):
                orders.append(action.order)
        bring(loop, orders[1], orders[1].start, 12 - orders[1].start)
        loop.imported(0, orders[1].ticket, 12)
        assert finish(loop) == {"new": [7, 7, 7, 7]}


def test_anything_may_happen_at_any_moment():
    """Pieces, losses and cancels in a random order: every request ends, and nothing is left."""
    draw = Random(3)
    for _ in range(30):
        loop = make_loop(pages=14, slots=2, groups=2, lanes=2)
        scheduler = loop.schedulers[0]
        names = [f"r{n}" for n in range(12)]
        for n, name in enumerate(names):
            held = draw.choice([None, 4, 8, 16])
            length = draw.randrange(max(2, held or 0), 22)
            loop.submit(request(name, length, held=held, salt=f"{n % 3}"))
        open_fetches: dict[int, tuple[int, int]] = {}
        ended = set()
        while len(ended) < len(names):
            match step(loop, (0, 1)):
                case FetchPages(_, order):
                    open_fetches[order.ticket] = order.start, order.stop
                case DropFetch(_, ticket):
                    open_fetches.pop(ticket, None)
                case ImportPages(_, ticket, _, tokens, _):
                    loop.imported(0, ticket, tokens)
                case list() as news:
                    ended |= {output.request_id for output in news if output.finish_reason}
                case Idle():
                    assert open_fetches
            if open_fetches and draw.random() < 0.7:
                ticket = draw.choice([*open_fetches])
                first, stop = open_fetches[ticket]
                if draw.random() < 0.1:
                    del open_fetches[ticket]
                    loop.fetch_failed(0, ticket, "lost")
                else:
                    loop.arrived(0, ticket, first, SIZE, None)
                    open_fetches[ticket] = first + SIZE, stop
                    if first + SIZE == stop:
                        del open_fetches[ticket]
            if draw.random() < 0.05:
                for output in loop.cancel(draw.choice(names)):
                    ended.add(output.request_id)
            scheduler.check_integrity()
        while not isinstance(step(loop, (0, 1)), Idle):
            pass
        scheduler.check_integrity()
        assert scheduler.kv_usage == [0.0, 0.0]
