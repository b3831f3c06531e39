"""The sampling fields of a request as the engine's `SamplingParams`.

Called by `completions.py` and `chat.py`.
"""

from typing import Any

import msgspec

from jaxserve.engine.request import MAX_UINT32, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.access import prefix_salt
from jaxserve.server.http.requests import GenerationFields

SAME_NAMES = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "priority"),
    *("skip_special_tokens", "speculative"),
)
"""Fields with the same name and meaning in `SamplingParams`."""


def sampling_params(
    fields: GenerationFields, max_tokens: int, tenant: str, **more: Any
) -> SamplingParams:
    """Validated parameters.

    Args:
      fields: the request.
      max_tokens: where the request has none.
      tenant: of the request; cached prefixes are shared only within a tenant.
      more: what the request says under other names, None left out: `logprobs`, `grammar`...

    Raises:
      InvalidRequestError: names the field that is out of range.
    """
    _check_stream_options(fields)
    if fields.use_beam_search:
        raise InvalidRequestError(
            "use_beam_search",
            "is not supported: no step ranks beams by their sums of log-probabilities or lets them "
            "share pages; n draws independent answers",
        )
    given: dict[str, Any] = {"max_tokens": max_tokens}
    given |= {name: getattr(fields, name) for name in SAME_NAMES}
    given |= {"top_k": None if fields.top_k is None else max(0, fields.top_k)}
    given |= {"seed": None if fields.seed is None else _folded(fields.seed)}
    given |= {"include_stop": fields.include_stop_str_in_output}
    given |= {"stop": fields.stop, "stop_token_ids": fields.stop_token_ids, **more}
    given["cache_salt"] = prefix_salt(tenant, fields.cache_salt or "")
    if ids := fields.logprob_token_ids:
        if given.get("logprobs") is None:
            raise InvalidRequestError("logprob_token_ids", "needs logprobs")
        given |= {"logprobs": len(ids), "logprob_token_ids": ids}
    if given["max_tokens"] is None:
        given["max_tokens"] = max_tokens
    params = SamplingParams(**{k: value for k, value in given.items() if value is not None})
    params.validate()
    return params


def kept_tokens(fields: GenerationFields) -> int | None:
    """Tokens of a prompt that are kept, -1 for as many as fit; raises InvalidRequestError."""
    if fields.truncate_prompt_tokens == 0:
        raise InvalidRequestError("truncate_prompt_tokens", "0 leaves nothing of the prompt")
    return fields.truncate_prompt_tokens


def _check_stream_options(fields: GenerationFields) -> None:
    """Raises InvalidRequestError for stream options of a request that does not stream."""
    if fields.stream_options is None or fields.stream:
        return
    for name, value in msgspec.structs.asdict(fields.stream_options).items():
        if value:
            raise InvalidRequestError(f"stream_options.{name}", "needs stream = true")


def _folded(seed: int) -> int:
    """A seed of 64 bits as one of 32; those that fit stay what they are."""
    return seed if 0 <= seed <= MAX_UINT32 else (seed ^ (seed >> 32)) & MAX_UINT32


def of_choice(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of choice `number`: with a seed and a grammar of its own."""
    if params.grammar is not None:
        params = msgspec.structs.replace(params, grammar=params.grammar.copy())
    if params.seed is None or number == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + number) & MAX_UINT32)
