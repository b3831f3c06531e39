import numpy as np
import pytest

from jaxserve.engine.logprobs import step_result
from jaxserve.roles.layout import REJECTED, Bucket
from jaxserve.roles.step_plan import SequenceRow, plan_of_rows


def packed(logprob, ids, logs) -> np.ndarray:
    floats = np.asarray([logprob, *logs], np.float32).view(np.int32)
    return np.concatenate([floats[:1], np.asarray(ids, np.int32), floats[1:]])


def test_what_each_row_asked_for():
    rows = [
        SequenceRow(0, [1], 1, [0], sample=True),
        SequenceRow(1, [1], 1, [0], sample=True, logprobs=2),
        SequenceRow(2, [1], 1, [0], sample=False, logprobs=2),
        SequenceRow(3, [1], 1, [0], sample=True, logprobs=0),
        SequenceRow(4, [1], 1, [0], sample=True, logprobs=20),
    ]
    plan = plan_of_rows(0, 0, Bucket(8, 1), [[], rows], slots=5)
    slots = [packed(-slot - 0.5, [4, 5, 6], [-0.25, -1.0, -2.0]) for slot in range(5)]
    sampled = np.asarray([[0] * 5, [10, 11, 12, 13, 14]])
    logprobs = np.stack([np.stack(slots)] * 2)
    result = step_result(plan, sampled, logprobs, None)
    assert result.sampled is sampled
    everything = ((4, -0.25), (5, -1.0), (6, -2.0))
    assert result.logprobs == {
        6: [(11, -1.5, everything[:2])],
        8: [(13, -3.5, ())],
        9: [(14, -4.5, everything)],  # a vocabulary of three has no more
    }
    assert step_result(plan, sampled, None, None)[1:] == ({}, {}), "a plain step"


def test_log_probabilities_of_a_run_end_where_its_drafts_do():
    row = SequenceRow(0, [1, 2, 3], 3, [0], sample=True, logprobs=0, drafts=2)
    plan = plan_of_rows(0, 0, Bucket(8, 1, 2), [[row]], slots=1)
    logprobs = np.stack([packed(-place - 0.5, [4], [-0.25]) for place in range(3)])
    result = step_result(plan, np.asarray([[[10, 11, REJECTED]]]), logprobs[None, None], None)
    assert result.logprobs == {0: [(10, -0.5, ()), (11, -1.5, ())]}


@pytest.mark.parametrize("top", [0, 1])
def test_scores_are_found_behind_the_rows_before(top):
    rows = [
        SequenceRow(0, [1, 2], 2, [0], sample=False),
        SequenceRow(2, [3, 4, 5], 3, [0], sample=True, targets=[4, 5], target_logprobs=top),
    ]
    plan = plan_of_rows(0, 0, Bucket(6, 1), [rows], slots=3)
    scores = np.stack([[packed(-token, [9], [-0.5]) for token in range(6)]])
    result = step_result(plan, np.asarray([[0, 0, 7]]), None, scores)
    best = ((9, -0.5),) * top
    assert result.scores == {2: [(4, -2.0, best), (5, -3.0, best)]}
