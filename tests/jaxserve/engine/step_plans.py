"""A small scheduler, requests for it, and short words for steps in full, to write tests with."""

import msgspec
import numpy as np

from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_arrays import LaneState
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.written_steps import SequenceRow
from tests import golden
from tests.jaxserve.full_steps import FullStep, Replica, arrays

GROUP_SLOTS = 3
UNSAMPLED = 999  # what the device returns where a plan samples nothing


class FullScheduler:
    """A scheduler whose steps are read in full, as its workers understand them.

    Every plan goes over the wire, and the arrays that workers make of it are compared with those of
    the full rows.
    """

    def __init__(self, **limits):
        self.scheduler = Scheduler(SchedulerSizes(**limits))
        self._slots = limits["slots"]
        shapes = limits["groups"], limits["slots"]
        lanes = range(limits["lanes"])
        tables, most = self.scheduler.tables, limits["page_buckets"][-1]
        self._replicas = [Replica(*shapes, tables) for _ in lanes]
        self._states = [LaneState(*shapes, most, tables=tables) for _ in lanes]

    def __getattr__(self, name):
        return getattr(self.scheduler, name)

    def plan(self, lane: int) -> FullStep | None:
        plan = self.scheduler.plan(lane)
        if plan is None:
            return None
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        assert received == plan
        step = self._replicas[lane].full(received)
        made, expected = self._states[lane].step(received), arrays(step, self._slots)
        np.testing.assert_array_equal(made.batch, expected[0])
        tables = made.page_table.reshape(*expected[1].shape, -1)
        table = np.where(expected[1] >= 0, tables[..., 0], -1)
        np.testing.assert_array_equal(table, expected[1])
        step.rings = tables[..., -1].copy()
        return step

    def complete(self, step: FullStep, result: StepResult) -> list[TokenOutput]:
        outputs = self.scheduler.complete(step.plan, result)
        assert len(outputs) == len(list(outputs))
        return list(outputs)

    def waiting_ids(self) -> list[str]:
        """The requests that wait, the next one first."""
        return [sequence.request.request_id for sequence in self.scheduler.queue.waiting]

    def lost(self, step: FullStep) -> None:
        self.scheduler.lost(step.plan)


def make_scheduler(*waiting: Request, **limits) -> FullScheduler:
    """A scheduler with requests that wait."""
    defaults = {"slots": GROUP_SLOTS} | golden.sizes("scheduler")
    scheduler = FullScheduler(**(defaults | limits))
    for request in waiting:
        scheduler.add(request)
    return scheduler


def make_request(request_id, prompt=(1,), max_tokens=8, *, arrival=0.0, deadline=None, **params):
    """A greedy request of a model whose end id is 0."""
    return Request(
        request_id=request_id,
        prompt=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
        eos_token_ids=frozenset({0}),
        arrival=arrival,
        deadline=deadline,
    )


def row(slot, token_ids, kv_length, page_ids, sample=True) -> SequenceRow:
    """A greedy row."""
    return SequenceRow(slot, token_ids, kv_length, page_ids, sample)


def step(number, tokens, pages, *groups, lane=0) -> FullStep:
    return FullStep(lane, number, Bucket(tokens, pages), list(groups))


def sampled(*groups: dict[int, int], slots: int = GROUP_SLOTS) -> StepResult:
    """Results of the device, from `{slot: token}` a group."""
    tokens = [[own.get(slot, UNSAMPLED) for slot in range(slots)] for own in groups]
    return StepResult(np.asarray(tokens, np.int32), {}, {})


def news(request_id, token_ids=(), finish_reason=None, stop_token_id=None) -> TokenOutput:
    return TokenOutput(
        request_id=request_id,
        token_ids=list(token_ids),
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )


def in_pool(scheduler: FullScheduler, pages: int = 8) -> list[int]:
    """Pages in use, by group."""
    return [round(usage * pages) for usage in scheduler.kv_usage]
