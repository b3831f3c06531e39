import msgspec
import pytest

from jaxserve.roles.layout import Bucket, StepLoad
from jaxserve.roles.step_arrays import FROM_DEVICE
from jaxserve.roles.step_plan import NewSequence, RowOptions, SlotRules, StepPlan
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows

CHUNK = SequenceRow(0, [11, 12, 13], kv_length=7, page_ids=[4, 2], sample=False)
"""The second chunk of a prompt, more to come."""
UNSEEN = SequenceRow(2, [FROM_DEVICE], 9, [5, 1, 3], True, 0.5, 40, 0.75, 0.125, 2**32 - 1)
"""A decode token that the host has not seen."""
ROWS = [[CHUNK, UNSEEN], [SequenceRow(1, [8], 1, [6], True)]]
PLAN = plan_of_rows(1, 7, Bucket(tokens=6, pages=3), ROWS, slots=4)


def test_what_a_step_has_to_do():
    """Pairs: 5 + 6 + 7 of the chunk, 9 and 1 of the decode tokens."""
    assert PLAN.load == StepLoad(6, 3, sequences=3, tokens=5, context=17, pairs=28)


def test_a_plan_of_rows_says_everything():
    assert PLAN.new_sequences == [
        NewSequence(0),
        NewSequence(2, 0.5, 40, 0.75, 0.125, 2**32 - 1),
        NewSequence(5),
    ]
    pages = [[0, 0, 4], [0, 1, 2], [2, 0, 5], [2, 1, 1], [2, 2, 3], [5, 0, 6]]
    assert PLAN.new_pages.T.tolist() == pages


@pytest.mark.parametrize("rules", [None, SlotRules(fresh=True)])
def test_survives_the_wire(rules):
    rows = [[*ROWS[0], SequenceRow(3, [1], 1, [7], True, temperature=0.5, rules=rules)], ROWS[1]]
    plan = plan_of_rows(0, 0, Bucket(8, 3), rows, slots=4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    assert plan.temperatures.tolist() == ([] if rules is None else [0.0, 0.5, 0.5, 0.0])


def test_what_a_plan_asks_for():
    def asks(**fields):
        row = SequenceRow(0, [1], 1, [0], **{"sample": True, **fields})
        plan = plan_of_rows(0, 0, Bucket(8, 1), [[], [row]], slots=2)
        return plan.options, (plan.has_rules, plan.has_logprobs, plan.has_targets)

    assert asks() == ([], (False, False, False))
    rules = SlotRules(allowed=b"abcd")
    assert asks(rules=rules) == ([RowOptions(2, rules)], (True, False, False))
    assert asks(logprobs=0) == ([RowOptions(2, logprobs=0)], (False, True, False))
    assert asks(logprobs=0, sample=False) == ([], (False, False, False))
    assert asks(targets=[5]) == ([RowOptions(2, targets=[5])], (False, False, True))
