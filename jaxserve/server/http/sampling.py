"""The sampling fields of a request as the engine's `SamplingParams`.

What clients can ask for and the engine cannot do yet is refused by name. Called by `completions.py`
and `chat.py`.
"""

from typing import Any

import msgspec

from jaxserve.engine.request import MAX_UINT32, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.requests import GenerationFields

SAME_NAMES = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "priority"),
)
"""Fields that mean in `SamplingParams` what they mean in a request."""

NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "priority": 0,
}
"""Values that ask for nothing, so that an engine without the field can serve them."""

ENGINE_FIELDS = frozenset(SamplingParams.__struct_fields__)


def sampling_params(fields: GenerationFields, max_tokens: int, **more: Any) -> SamplingParams:
    """Validated parameters.

    Args:
      fields: the request.
      max_tokens: where the request has none.
      more: what the request says under other names, None left out: `logprobs`, `grammar`...

    Raises:
      InvalidRequestError: names the field that is out of range, or that the engine lacks.
    """
    if fields.skip_special_tokens is False:
        raise InvalidRequestError("skip_special_tokens", "special tokens have no text: only true")
    if fields.cache_salt is not None and "cache_salt" not in ENGINE_FIELDS:
        raise _lacks("cache_salt")
    given: dict[str, Any] = {"max_tokens": max_tokens}
    given |= {name: getattr(fields, name) for name in SAME_NAMES}
    given |= {"top_k": None if fields.top_k is None else max(0, fields.top_k)}
    given |= {"stop": fields.stop, "stop_token_ids": fields.stop_token_ids, **more}
    if given["max_tokens"] is None:
        given["max_tokens"] = max_tokens
    wanted = {name: value for name, value in given.items() if value is not None}
    for name in sorted(wanted.keys() - ENGINE_FIELDS):
        if name not in NEUTRAL or wanted.pop(name) != NEUTRAL[name]:
            raise _lacks(name)
    params = SamplingParams(**wanted)
    params.validate()
    return params


def of_choice(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of the choice `number` of `n`: with a seed of its own, if there is one."""
    if params.seed is None or number == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + number) & MAX_UINT32)


def _lacks(name: str) -> InvalidRequestError:
    return InvalidRequestError(name, "is not supported by this engine yet")
