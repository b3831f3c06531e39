import math

import msgspec
import pytest

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import InvalidRequestError


def test_defaults_are_valid():
    params = SamplingParams()
    params.validate()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (
        128,
        1.0,
        0,
        1.0,
        0.0,
    )
    assert (params.seed, params.stop, params.stop_token_ids) == (None, (), ())
    assert (params.ignore_eos, params.min_tokens) == (False, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_k": 40},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": 2**32 - 1},
        {"stop": ("x" * 256,) * 16},
        {"stop_token_ids": tuple(range(64))},
        {"ignore_eos": True},
        {"max_tokens": 5, "min_tokens": 5},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 10},
        {"repetition_penalty": 0.01},
        {"logit_bias": dict.fromkeys(range(300), 100.0)},
        {"logit_bias": {0: -100}},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"priority": -100},
        {"priority": 100, "cache_salt": "x" * 256},
    ],
)
def test_the_ends_of_each_range_are_valid(fields):
    SamplingParams(**fields).validate()


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "0 is not in [1, 2147483647]"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5 is not an integer"),
        ({"max_tokens": True}, "max_tokens", "True is not an integer"),
        ({"temperature": -0.1}, "temperature", "-0.1 is not in [0, 2] (0 is greedy)"),
        ({"temperature": 2.01}, "temperature", "2.01 is not in [0, 2] (0 is greedy)"),
        ({"temperature": math.nan}, "temperature", "nan is not in [0, 2] (0 is greedy)"),
        ({"temperature": math.inf}, "temperature", "inf is not in [0, 2] (0 is greedy)"),
        ({"temperature": "hot"}, "temperature", "'hot' is not a number"),
        ({"top_k": -1}, "top_k", "-1 is not in [0, 2147483647] (0 keeps all tokens)"),
        ({"top_p": 0}, "top_p", "0 is not in (0, 1]"),
        ({"top_p": 1.1}, "top_p", "1.1 is not in (0, 1]"),
        ({"top_p": math.nan}, "top_p", "nan is not in (0, 1]"),
        ({"min_p": -0.5}, "min_p", "-0.5 is not in [0, 1]"),
        ({"presence_penalty": 2.1}, "presence_penalty", "2.1 is not in [-2, 2]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "nan is not in [-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0 is not in (0, 10]"),
        ({"logit_bias": [1]}, "logit_bias", "[1] is not a mapping"),
        (
            {"logit_bias": dict.fromkeys(range(301), 1.0)},
            "logit_bias",
            "301 entries, at most 300 are allowed",
        ),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1 is not in [0, 2147483647] (a token id)"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias", "'7' is not an integer"),
        ({"logit_bias": {7: 101}}, "logit_bias[7]", "101 is not in [-100, 100]"),
        ({"logprobs": 21}, "logprobs", "21 is not in [0, 20]"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "True is not an integer"),
        ({"priority": 101}, "priority", "101 is not in [-100, 100]"),
        ({"cache_salt": 3}, "cache_salt", "3 is not a string"),
        ({"cache_salt": "x" * 257}, "cache_salt", "257 characters, at most 256 are allowed"),
        ({"grammar": "x"}, "grammar", "'x' has no 'mask'"),
        ({"min_p": math.nan}, "min_p", "nan is not in [0, 1]"),
        ({"seed": -1}, "seed", "-1 is not in [0, 4294967295]"),
        ({"seed": 2**32}, "seed", "4294967296 is not in [0, 4294967295]"),
        ({"stop": ("",)}, "stop[0]", "0 characters, not in [1, 256]"),
        ({"stop": ("a", "x" * 257)}, "stop[1]", "257 characters, not in [1, 256]"),
        ({"stop": ("a",) * 17}, "stop", "17 entries, at most 16 are allowed"),
        ({"stop": (7,)}, "stop[0]", "7 is not a string"),
        ({"stop": 7}, "stop", "7 is not a list"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids[1]", "-1 is not in [0, 2147483647]"),
        ({"stop_token_ids": (0,) * 65}, "stop_token_ids", "65 entries, at most 64 are allowed"),
        ({"ignore_eos": 1}, "ignore_eos", "1 is not a bool"),
        ({"min_tokens": -1}, "min_tokens", "-1 is not in [0, 128] (max_tokens)"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "5 is not in [0, 4] (max_tokens)"),
    ],
)
def test_wrong_values_name_field_value_and_range(fields, field, message):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields).validate()
    assert caught.value.field == field
    assert str(caught.value) == f"{field}: {message}"


def test_one_stop_string_and_lists_become_tuples():
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_decoding_is_strict():
    decoded = msgspec.json.decode(b'{"stop": ["a"], "seed": 7}', type=SamplingParams)
    assert decoded == SamplingParams(stop=("a",), seed=7)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


def test_params_do_not_change():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3


@pytest.mark.parametrize(
    ("params", "token_id", "generated", "ends"),
    [
        ({}, 9, 0, True),
        ({}, 8, 0, True),
        ({}, 7, 0, False),
        ({"stop_token_ids": (7,)}, 7, 0, True),
        ({"ignore_eos": True}, 9, 5, False),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, 9, 5, True),
        ({"min_tokens": 2}, 9, 1, False),
        ({"min_tokens": 2}, 9, 2, True),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, 7, 1, False),
    ],
)
def test_which_tokens_end_a_request(params, token_id, generated, ends):
    request = Request(
        request_id="r",
        prompt=[1],
        params=SamplingParams(**params),
        eos_token_ids=frozenset({8, 9}),
    )
    assert request.ends_at(token_id, generated) is ends


@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_what_is_0_in_float32_is_refused(field):
    with pytest.raises(InvalidRequestError, match=f"{field}: 1e-46 is below 1.175e-38"):
        SamplingParams(**{field: 1e-46}).validate()
    SamplingParams(**{field: 1.2e-38}).validate()
