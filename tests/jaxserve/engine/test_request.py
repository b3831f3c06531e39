import msgspec
import pytest

from jaxserve.engine.request import Request, SamplingParams, due
from jaxserve.errors import InvalidRequestError
from tests import golden


def validated(**fields):
    SamplingParams(**fields).validate()


def test_the_ends_of_each_range_are_valid():
    golden.check_values("engine/valid_params.txt", validated, globals())


def test_wrong_values_name_field_value_and_range():
    golden.check_arguments("engine/sampling_params.txt", InvalidRequestError, validated, globals())


def test_one_stop_string_and_lists_become_tuples():
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_decoding_is_strict():
    decoded = msgspec.json.decode(b'{"stop": ["a"], "seed": 7}', type=SamplingParams)
    assert decoded == SamplingParams(stop=("a",), seed=7)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


def test_which_tokens_end_a_request():
    def call(params, token_id, generated):
        own, ids = SamplingParams(**params), frozenset({8, 9})
        request = Request(request_id="r", prompt=[1], params=own, eos_token_ids=ids)
        return request.ends_at(token_id, generated)

    golden.check_values("engine/ends.txt", call, globals())


@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_what_is_0_in_float32_is_refused(field):
    with pytest.raises(InvalidRequestError, match=f"{field}: 1e-46 is below 1.175e-38"):
        SamplingParams(**{field: 1e-46}).validate()
    SamplingParams(**{field: 1.2e-38}).validate()


def test_due():
    def call(priority, deadline):
        params = SamplingParams(priority=priority)
        times = {"arrival": 100.0, "deadline": deadline}
        return due(Request(request_id="a", prompt=[1], params=params, **times))

    golden.check_values("engine/due.txt", call, globals())
