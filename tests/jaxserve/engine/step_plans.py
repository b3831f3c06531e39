"""A small scheduler, requests for it, and short words for step plans, to write tests with."""

from jaxserve.engine.logprobs import StepResult
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.pipeline.plan import Bucket, SequenceRow, StepPlan

GROUP_SLOTS = 3
UNSAMPLED = 999  # what the device returns where a plan samples nothing


def make_scheduler(**limits) -> Scheduler:
    defaults = {
        "groups": 1,
        "lanes": 1,
        "slots": GROUP_SLOTS,
        "pages": 8,
        "page_size": 2,
        "max_length": 16,
        "token_budget": 4,
        "token_buckets": [1, 3, 4],
        "page_buckets": [2, 8],
        "max_waiting": 4,
    }
    return Scheduler(**(defaults | limits))


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8, **params) -> Request:
    """A greedy request of a model whose end id is 0."""
    return Request(
        request_id=request_id,
        prompt=prompt,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
        eos_token_ids=frozenset({0}),
    )


def row(slot, token_ids, kv_length, page_ids, sample=True) -> SequenceRow:
    """A greedy row."""
    return SequenceRow(slot, token_ids, kv_length, page_ids, sample)


def step(number, tokens, pages, *groups, lane=0) -> StepPlan:
    return StepPlan(lane, number, Bucket(tokens, pages), list(groups))


def sampled(*groups: dict[int, int]) -> StepResult:
    """What the device returns, from `{slot: token}` a group."""
    tokens = [[own.get(slot, UNSAMPLED) for slot in range(GROUP_SLOTS)] for own in groups]
    return StepResult(tokens, {}, {})


def news(request_id, token_ids=(), finish_reason=None, stop_token_id=None) -> TokenOutput:
    return TokenOutput(
        request_id=request_id,
        token_ids=list(token_ids),
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )


def in_pool(scheduler: Scheduler, pages: int = 8) -> list[int]:
    """Pages in use, by group."""
    return [round(usage * pages) for usage in scheduler.kv_usage]
