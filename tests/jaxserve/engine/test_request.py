import math

import msgspec
import pytest

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1, "temperature": 0, "top_k": 40, "top_p": 1e-6, "min_p": 1.0, "seed": 0},
        {"temperature": 2.0, "seed": 2**32 - 1, "ignore_eos": True, "repetition_penalty": 0.01},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": ("x" * 256,) * 16, "stop_token_ids": tuple(range(64))},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 10},
        {"logit_bias": dict.fromkeys(range(300), 100.0), "logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": {0: -100}, "priority": -100},
        {"priority": 100, "cache_salt": "x" * 256},
        {"top_p": 2.0**-126, "repetition_penalty": 2.0**-126},
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
        *(
            ({"temperature": value}, "temperature", f"{value} is not in [0, 2] (0 is greedy)")
            for value in (-0.1, 2.01, math.nan, math.inf)
        ),
        ({"temperature": "hot"}, "temperature", "'hot' is not a number"),
        ({"top_k": -1}, "top_k", "-1 is not in [0, 2147483647] (0 keeps all tokens)"),
        *(({"top_p": p}, "top_p", f"{p} is not in (0, 1]") for p in (0, 1.1, math.nan)),
        *(({"min_p": p}, "min_p", f"{p} is not in [0, 1]") for p in (-0.5, math.nan)),
        ({"presence_penalty": 2.1}, "presence_penalty", "2.1 is not in [-2, 2]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "nan is not in [-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0 is not in (0, 10]"),
        ({"logit_bias": [1]}, "logit_bias", "[1] is not a mapping"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias", "301 entries, at most 300"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1 is not in [0, 2147483647] (a token id)"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias", "'7' is not an integer"),
        ({"logit_bias": {7: 101}}, "logit_bias[7]", "101 is not in [-100, 100]"),
        ({"logprobs": 21}, "logprobs", "21 is not in [0, 20]"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "True is not an integer"),
        ({"priority": 101}, "priority", "101 is not in [-100, 100]"),
        ({"cache_salt": 3}, "cache_salt", "3 is not a string"),
        ({"cache_salt": "x" * 257}, "cache_salt", "257 characters, at most 256 are allowed"),
        ({"grammar": "x"}, "grammar", "'x' has no 'mask'"),
        *(({"seed": n}, "seed", f"{n} is not in [0, 4294967295]") for n in (-1, 2**32)),
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
    assert str(caught.value).startswith(f"{field}: {message}")


def test_one_stop_string_and_lists_become_tuples():
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_decoding_is_strict():
    decoded = msgspec.json.decode(b'{"stop": ["a"], "seed": 7}', type=SamplingParams)
    assert decoded == SamplingParams(stop=("a",), seed=7)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


@pytest.mark.parametrize(
    ("params", "token_id", "generated", "ends"),
    [
        *(({}, token, 0, token != 7) for token in (7, 8, 9)),
        ({"stop_token_ids": (7,)}, 7, 0, True),
        ({"ignore_eos": True}, 9, 5, False),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, 9, 5, True),
        ({"min_tokens": 2}, 9, 1, False),
        ({"min_tokens": 2}, 9, 2, True),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, 7, 1, False),
    ],
)
def test_which_tokens_end_a_request(params, token_id, generated, ends):
    own, ids = SamplingParams(**params), frozenset({8, 9})
    request = Request(request_id="r", prompt=[1], params=own, eos_token_ids=ids)
    assert request.ends_at(token_id, generated) is ends


@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_what_is_0_in_float32_is_refused(field):
    with pytest.raises(InvalidRequestError, match=f"{field}: 1e-46 is below 1.175e-38"):
        SamplingParams(**{field: 1e-46}).validate()
    SamplingParams(**{field: 1.2e-38}).validate()
