"""Who comes first and where to, what the prefix cache saves, what grammars do; written out."""

import msgspec
import numpy as np
import pytest

from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import TokenLogprobs, TokenOutput
from jaxserve.errors import InvalidRequestError
from jaxserve.roles.layout import NO_TOKEN
from jaxserve.roles.step_arrays import FROM_DEVICE, REJECTED
from tests import golden
from tests.jaxserve.engine.step_plans import in_pool, make_scheduler, news, row, sampled
from tests.jaxserve.engine.step_plans import make_request as request


def test_requests_wait_in_the_order_in_which_they_are_due():
    def call(requests):
        scheduler = make_scheduler(max_waiting=9)
        for one in requests:
            scheduler.add(one)
        return "".join(scheduler.waiting_ids())

    golden.check_values("engine/waiting.txt", call, globals())


def test_the_last_due_makes_room_not_the_last_come():
    scheduler = make_scheduler(pages=4, max_length=8)
    scheduler.add(request("late", [1], priority=1))
    scheduler.add(request("soon", [2]))
    for length in range(4):
        scheduler.complete(scheduler.plan(0), sampled({0: 10 + length, 1: 20 + length}))
    assert in_pool(scheduler, pages=4) == [4]
    assert scheduler.plan(0).groups == [[row(0, [13], 5, [0, 2, 1])]]
    assert scheduler.waiting_ids() == ["late"]


@pytest.mark.parametrize(("limit", "chunk"), [(2, [5, 6]), (0, [5, 6, 7])])
def test_prefill_beside_decoding_is_limited_and_alone_it_is_not(limit, chunk):
    """By `prefill_tokens`, and without it by the budget that decoding leaves."""
    own = request("a", [1, 2, 3, 4], max_tokens=2)
    scheduler = make_scheduler(own, pages=16, prefill_tokens=limit)
    first = scheduler.plan(0)
    assert first.groups == [[row(0, [1, 2, 3, 4], 4, [0, 1])]]
    scheduler.add(request("b", [5, 6, 7, 8], max_tokens=2))
    scheduler.add(request("c", [9]))
    pages = list(range(3, 3 + -(-len(chunk) // 2)))
    chunk_row = row(1, chunk, len(chunk), pages, sample=False)
    assert scheduler.plan(0).groups == [[row(0, [FROM_DEVICE], 5, [0, 1, 2]), chunk_row]]


def run(scheduler, request, token=7):
    """One request alone, to its end; its outputs."""
    scheduler.add(request)
    outputs = []
    while scheduler.has_work:
        plan = scheduler.plan(0)
        slots = [{one.slot: token for one in rows} for rows in plan.groups]
        outputs += scheduler.complete(plan, sampled(*slots))
    scheduler.check_integrity()
    return outputs


def test_the_group_that_has_the_prompt_takes_it():
    scheduler = make_scheduler(groups=2, pages=16, prefix_cache=True)
    run(scheduler, request("a", [1, 2, 3, 4, 5], max_tokens=1))
    scheduler.add(request("other", [9], max_tokens=1))
    scheduler.add(request("again", [1, 2, 3, 4, 6], max_tokens=1))
    rows = scheduler.plan(0).groups
    assert [one.token_ids for one in rows[0]] == [[9], [6]]
    assert rows[1] == []


def test_what_was_computed_is_not_computed_again():
    scheduler = make_scheduler(pages=16, prefix_cache=True)
    first = run(scheduler, request("a", [1, 2, 3, 4, 5], max_tokens=3))
    assert [output.cached_tokens for output in first] == [0, 0, 0]
    assert scheduler.kv_usage == [0.0]
    # Prompt and output of a, but for the last token, which was never fed: 5 + 2 tokens.
    scheduler.add(request("b", [1, 2, 3, 4, 5, 7, 7, 8], max_tokens=2))
    plan = scheduler.plan(0)
    assert plan.groups == [[row(0, [7, 8], 8, [0, 1, 2, 3])]]
    (output,) = scheduler.complete(plan, sampled({0: 7}))
    assert output == TokenOutput(request_id="b", token_ids=[7], cached_tokens=6)
    assert (scheduler.queue.prompt_tokens, scheduler.queue.prompt_tokens_found) == (13, 6)


@golden.table("engine/salts.yaml")
def test_salts_keep_tenants_apart_and_what_is_scored_passes_through_the_steps(options, found):
    scheduler = make_scheduler(pages=16, prefix_cache=True)
    run(scheduler, request("a", [1, 2, 3, 4, 5], max_tokens=1, cache_salt="x"))
    outputs = run(scheduler, request("b", [1, 2, 3, 4, 5], max_tokens=1, **options))
    assert outputs[0].cached_tokens == found


def test_running_sequences_take_cached_pages_before_they_preempt():
    scheduler = make_scheduler(pages=8, prefix_cache=True)
    run(scheduler, request("a", [1, 2, 3, 4, 5, 6], max_tokens=1))
    outputs = run(scheduler, request("b", [9], max_tokens=15))
    assert len(outputs) == 15
    assert scheduler.num_preemptions == 0
    assert run(scheduler, request("c", [1, 2, 3, 4, 5, 6], max_tokens=1))[0].cached_tokens < 4


def test_logprobs_come_with_their_tokens_and_the_prompts_with_the_first():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 2, 3, 4, 5, 6], max_tokens=2, logprobs=1, prompt_logprobs=2))
    logs = [TokenLogprobs(token, -token / 8, ((9, -0.5),)) for token in range(8)]
    first, second = scheduler.plan(0), scheduler.plan(0)
    rows = [plan.groups[0][0] for plan in (first, second)]
    assert [one.targets for one in rows] == [[2, 3, 4, 5], [6]]
    assert [one.target_logprobs for one in rows] == [2, 2]
    assert rows[1].logprobs == 1
    result = StepResult(np.asarray([[999] * 3]), {}, {0: logs[2:6]})
    assert scheduler.complete(first, result) == []
    third = scheduler.plan(0)
    assert third.groups[0][0].targets == []
    result = StepResult(np.asarray([[7, 0, 0]]), {0: [logs[7]]}, {0: logs[6:7]})
    assert scheduler.complete(second, result) == [
        TokenOutput(
            request_id="a", token_ids=[7], logprobs=[logs[7]], prompt_logprobs=[None, *logs[2:7]]
        )
    ]
    result = StepResult(np.asarray([[7, 0, 0]]), {0: [logs[7]]}, {})
    assert scheduler.complete(third, result) == [
        TokenOutput(request_id="a", token_ids=[7], finish_reason="length", logprobs=[logs[7]])
    ]


def test_logprobs_of_a_prompt_whose_pass_was_poisoned_are_those_of_the_next():
    scheduler = make_scheduler(request("a", [1, 2, 3], max_tokens=1, prompt_logprobs=0))
    bad, good = ([TokenLogprobs(token, log, ()) for token in (2, 3)] for log in (np.nan, -0.5))
    result = StepResult(np.asarray([[NO_TOKEN, 0, 0]]), {}, {0: bad})
    assert scheduler.complete(scheduler.plan(0), result) == [TokenOutput(request_id="a")]
    again = scheduler.plan(0)
    assert again.groups[0][0].targets == [2, 3]
    result = StepResult(np.asarray([[7, 0, 0]]), {}, {0: good})
    (output,) = scheduler.complete(again, result)
    assert output.prompt_logprobs == [None, *good]


class Script:
    """Allows the given tokens one after the other; finished after the last."""

    def __init__(self, *tokens):
        self.rest = list(tokens)

    @property
    def finished(self):
        return not self.rest

    def mask(self):
        return np.asarray([1 << self.rest[0]], np.uint32)

    def accept(self, token_id):
        assert token_id == self.rest.pop(0)


def allowed(plan, slot):
    (rules,) = (one.rules for one in plan.groups[0] if one.slot == slot)
    return [t for t in range(32) if int.from_bytes(rules.allowed, "little") >> t & 1]


def test_a_lane_with_many_grammars_waits_for_its_step():
    scheduler = make_scheduler(lanes=2)
    for request_id, grammar in (("a", Script(5, 6)), ("other lane", None), ("b", None)):
        scheduler.add(request(request_id, [1], grammar=grammar))
    first = scheduler.plan(0)
    assert allowed(first, 0) == [5]
    assert scheduler.plan(0) is None
    assert scheduler.plan(1) is not None
    assert scheduler.complete(first, sampled({0: 5, 1: 7})) == [news("a", [5]), news("b", [7])]
    second = scheduler.plan(0)
    assert allowed(second, 0) == [6]
    assert [one.token_ids for one in second.groups[0]] == [[5], [7]]
    assert scheduler.complete(second, sampled({0: 6, 1: 7}))[0] == news("a", [6], "stop")


@pytest.mark.parametrize("side_by_side", [False, True])
def test_lanes_that_wait_for_grammars_start_together_where_they_should(side_by_side):
    scheduler = make_scheduler(lanes=2, side_by_side=side_by_side)
    for request_id in ("a", "b"):
        scheduler.add(request(request_id, [1], grammar=Script(5, 6, 7)))
    first, other = scheduler.plan(0), scheduler.plan(1)
    scheduler.complete(first, sampled({0: 5}))
    assert (scheduler.plan(0) is None) == side_by_side
    scheduler.complete(other, sampled({0: 5}))
    numbers = [plan.number for plan in map(scheduler.plan, range(2)) if plan is not None]
    assert numbers == ([2, 3] if side_by_side else [3])


def test_grammars_are_spread_over_the_lanes():
    """Where every other request has one, each lane gets half of them, and as many of the others."""
    scheduler = make_scheduler(
        lanes=2, slots=4, pages=40, token_budget=8, token_buckets=[8], max_waiting=8
    )
    for number in range(8):
        scheduler.add(request(str(number), [1], grammar=Script(5, 6) if number % 2 else None))
    lanes = [scheduler.plan(lane).groups[0] for lane in range(2)]
    assert [[row.rules is not None for row in rows].count(True) for rows in lanes] == [2, 2]
    assert [len(rows) for rows in lanes] == [4, 4]


def test_a_few_grammars_wait_together_and_the_others_do_not():
    """Two of nine; the second comes while the first waits, and steps with it from then on."""
    scheduler = make_scheduler(groups=3, pages=20, max_waiting=9)
    scheduler.add(request("a", [1], grammar=Script(5, 6, 7)))
    for number in range(7):
        scheduler.add(request(str(number), [2]))
    first = scheduler.plan(0)
    scheduler.add(request("b", [3], grammar=Script(8, 9)))

    def steps(plan):
        return [len(rows) for rows in plan.groups], sum(
            one.rules is not None for rows in plan.groups for one in rows
        )

    assert steps(first) == ([3, 3, 2], 1)
    second = scheduler.plan(0)
    assert steps(second) == ([2, 3, 2], 0)
    everybody = dict.fromkeys(range(3), 5)
    scheduler.complete(first, sampled(everybody, everybody, everybody))
    third = scheduler.plan(0)
    assert steps(third) == ([3, 3, 3], 2)
    assert scheduler.complete(second, sampled({1: 4, 2: 4}, everybody, {0: 4, 1: 4}))
    assert steps(scheduler.plan(0)) == ([2, 3, 2], 0)


def test_end_ids_end_a_grammar_whatever_min_tokens_says():
    scheduler = make_scheduler(request("a", [1], grammar=Script(0), min_tokens=3))
    assert scheduler.complete(scheduler.plan(0), sampled({0: 0})) == [news("a", [], "stop", 0)]


class Broken(Script):
    """Fails at its second token."""

    def accept(self, token_id):
        if len(self.rest) == 1:
            raise RuntimeError("no such rule")
        super().accept(token_id)


class Silent(Script):
    """Comes to a point where nothing is allowed."""

    def mask(self):
        return np.asarray([0], np.uint32) if len(self.rest) == 1 else super().mask()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Broken, "the grammar failed: no such rule"),
        (Silent, "the grammar failed: the grammar allows no token"),
    ],
)
def test_a_grammar_that_fails_ends_its_request_alone(grammar, message):
    scheduler = make_scheduler()
    scheduler.add(request("a", [1], grammar=grammar(5, 6, 7)))
    scheduler.add(request("b", [2], max_tokens=4))
    outputs = []
    tokens = iter([5, 6, 7, 8])
    while scheduler.has_work:
        outputs += scheduler.complete(scheduler.plan(0), sampled({0: next(tokens), 1: 4}))
    (failed,) = [output for output in outputs if output.finish_reason == "error"]
    assert (failed.request_id, failed.error) == ("a", message)
    assert [output.finish_reason for output in outputs if output.request_id == "b"][-1] == "length"
    scheduler.check_integrity()


def test_a_grammar_that_allows_nothing_and_too_many_ids_to_keep_away_are_refused():
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="grammar: the grammar allows no token"):
        scheduler.add(request("a", grammar=Silent(5)))
    ends = msgspec.structs.replace(request("a", min_tokens=2), eos_token_ids=frozenset(range(90)))
    with pytest.raises(InvalidRequestError, match="min_tokens: 90 ids would end the request"):
        scheduler.add(ends)
    assert not scheduler.has_work


@pytest.mark.parametrize(("modules", "proposes"), [(1, [True, True, False]), (0, [False] * 3)])
def test_prediction_modules_see_every_chunk_of_a_prompt(modules, proposes):
    """Even where the policy wants no drafts: later sequences draft from published entries."""
    scheduler = make_scheduler(
        drafts=1, modules=modules, automatic_drafts=True, token_budget=6, token_buckets=[3, 6]
    )
    scheduler.draft_policy.choose = lambda *_, **__: 0
    scheduler.add(request("a", [1] * 8))
    plans = []
    for _ in range(3):
        plans.append(scheduler.plan(0))
        drafted = np.full((1, 3, 2), 5, np.int32)
        drafted[..., 1] = REJECTED
        taken = drafted if plans[-1].bucket.drafts else drafted[..., 0]
        scheduler.complete(plans[-1], StepResult(taken, {}, {}))
    assert [plan.plan.proposes for plan in plans] == proposes
    assert [sum(map(int, plan.plan.token_counts)) for plan in plans] == [6, 2, 1]
