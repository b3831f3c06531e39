from jaxserve.engine.outputs import StepOutputs
from jaxserve.engine.prefix_cache import PageKeys
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.sequence import Sequence, token_array


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
