import numpy as np
import pytest

from jaxserve.engine.outputs import StepOutputs, step_result
from jaxserve.engine.pages import PageKeys
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.sequence import Sequence, token_array
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_arrays import REJECTED
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows


def sequence(request_id):
    request = Request(request_id=request_id, prompt=[1, 2], params=SamplingParams())
    tokens = token_array([1, 2])
    keys = PageKeys("", tokens, 2)
    return Sequence(request, (0.0, 0), 8, tokens, keys, found=2, queue_seconds=0.5)


def test_plain_tokens_become_outputs_between_the_special_ones():
    a, b, c = map(sequence, "abc")
    end = TokenOutput(request_id="b", finish_reason="stop", stop_token_id=8)
    outputs = StepOutputs([a, b, c], [7, 8, 9], {1: end})
    expected = [
        TokenOutput(request_id="a", token_ids=[7], cached_tokens=2, queue_seconds=0.5),
        end,
        TokenOutput(request_id="c", token_ids=[9], cached_tokens=2, queue_seconds=0.5),
    ]
    assert list(outputs) == expected
    assert (len(outputs), outputs[0], outputs[1:]) == (3, expected[0], expected[1:])
    assert outputs.ended == [b]
    assert list(outputs.runs()) == [("a", [7]), ("b", None), ("c", [9])]
    assert [outputs.at(index) for index in range(3)] == expected


def test_runs_of_a_step_with_drafts():
    outputs = StepOutputs([*map(sequence, "ab")], [[7, 8], [9]], {}, [2, 0])
    assert list(outputs.runs()) == [("a", [7, 8]), ("b", [9])]
    assert [(one.drafted, one.accepted) for one in map(outputs.at, range(2))] == [(2, 1), (0, 0)]


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
