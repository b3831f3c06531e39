"""Fields of other servers' clients: translated to ours, left out, or refused by name.

Called where a body does not fit its type; knows names of fields, not handlers.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.errors import PLACE, STEP, UNKNOWN, decoding_error
from jaxserve.server.http.requests import GenerationFields

MOST = 64
"""Most fields of one body that are left out; a field of all items of a list counts once."""
NULL = re.compile(r"^Expected `.*`, got `null`$")

SPELLINGS = {
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "grammar": "structured_outputs.grammar",
    "json_schema": "structured_outputs.json",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""Fields of SGLang, Ollama, llama.cpp, Mistral and of other routes, and what they are called here.
Dots lead into objects. The length of an answer has the route's own name."""
OPTIONS = {"options", "sampling_params"}
"""Objects whose fields belong to the request itself (Ollama's and SGLang's own routes)."""

CHANGING = {
    *GenerationFields.__struct_fields__,
    *("custom_logit_processor", "custom_params", "diversity_penalty", "dry_multiplier"),
    *("dynatemp_range", "epsilon_cutoff", "eta_cutoff", "image_data", "images", "input_embeds"),
    *("lora_path", "lora_request", "mirostat", "models", "no_repeat_ngram_size", "plugins"),
    *("prompt_embeds", "return_hidden_states", "smoothing_factor", "tfs_z", "top_a"),
    *("top_n_sigma", "transforms", "typical_p", "xtc_probability"),
}
"""Fields that change the answer: those of this server's other routes, and those that it lacks."""
CHANGING -= {
    *("model", "stream", "stream_options", "priority", "request_id", "speculative", "cache_salt"),
    *("guided_decoding_backend", "return_tokens_as_token_ids", *GenerationFields.IGNORED),
}
NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("length_penalty", "n", "repetition_penalty", "tfs_z", "typical_p"), 1),
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
}
"""Values with which a field of `CHANGING` changes nothing, beside false, 0 and empty ones."""


def understood[Body](body: bytes, kind: type[Body], left_out: Callable[[str], None] | None) -> Body:
    """Decodes a body that has fields of other servers.

    Null stands for a missing field. What `SPELLINGS` translates is taken; unknown fields are left
    out.

    Args:
      left_out: called with the name of every field that is left out; None: such a field is an
        error.

    Raises:
      InvalidRequestError: a field is wrong, or is one of `CHANGING`.
    """
    value: Any = None
    try:
        value = msgspec.json.decode(body)
        if isinstance(value, dict):
            _translate(value, getattr(kind, "__struct_fields__", ()))
        for _ in range(MOST):
            try:
                return msgspec.convert(value, kind, str_keys=True)
            except msgspec.ValidationError as error:
                name = _remove(value, str(error))
                if name is None or (name and left_out is None):
                    raise
                if name and left_out is not None:
                    left_out(name)
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if value is not None:
            body = msgspec.json.encode(value)  # whose paths the error names
        raise decoding_error(error, body) from None


def _remove(value: Any, message: str) -> str | None:
    """Takes the field that msgspec complains of out of a body. Returns its name; empty where it was
    null; None where it has to stay."""
    path = ""
    if place := PLACE.search(message):
        message, path = message[: place.start()], place["path"]
    steps: list[str | int] = [
        step["name"] if step["name"] is not None else int(step["index"])
        for step in STEP.finditer(path)
    ]
    unknown = UNKNOWN.match(message)
    if unknown:
        steps.append(unknown["name"])
    elif not NULL.match(message):
        return None
    try:
        *before, last = steps
        found = functools.reduce(operator.getitem, before, value)
        if not isinstance(found, dict):
            return None
        kind, null = found.get("type"), found[last] is None
    except (LookupError, TypeError, ValueError):
        return None
    for one in _alike(value, before):
        if one.get("type") == kind and last in one and (one[last] is None) == null:
            one.pop(last)
    return "" if null else ".".join(map(str, steps))


def _alike(value: Any, steps: Sequence[str | int]) -> Iterator[dict[str, Any]]:
    """The objects at a path and at the same place in other items of the lists on it."""
    if not steps:
        yield from [value] if isinstance(value, dict) else []
    elif isinstance(value, list):
        for one in value:
            yield from _alike(one, steps[1:])
    elif isinstance(value, dict):
        yield from _alike(value.get(steps[0]), steps[1:])


def _translate(body: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Renames the fields of other servers in a body whose own fields are given."""
    if "temperature" not in fields:
        return  # no request that generates
    for name in OPTIONS & set(body):
        if isinstance(given := body[name], dict):
            body.pop(name)
            for key, value in given.items():
                body.setdefault(key, value)
    _thoughts(body, fields)
    if "response_format" in fields and (form := body.pop("format", None)):
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        body.setdefault("response_format", {"type": "json_object"} if form == "json" else schema)
    if body.get("separate_reasoning") is False:
        raise InvalidRequestError("separate_reasoning", "false is not supported here")
    for name, ours in SPELLINGS.items():
        outer, _, inner = ours.partition(".")
        if name not in body or name in fields:
            continue
        value = body.pop(name)
        if value is None or (outer == "max_tokens" and value == -1):
            continue
        if outer == "max_tokens" and "max_output_tokens" in fields:
            outer = "max_output_tokens"
        if outer == "chat_template_kwargs" and outer not in fields:
            continue  # no template is rendered
        if outer not in fields:
            raise InvalidRequestError(name, "is not supported on this route, and has an effect")
        if not inner:
            body.setdefault(outer, value)
        elif isinstance(inside := body.get(outer) or {}, dict):
            body[outer] = {inner: value, **inside}
    for name in sorted(CHANGING & set(body) - set(fields)):
        value = body.pop(name)
        if value and value != NEUTRAL.get(name):
            raise InvalidRequestError(name, "is not supported here, and changes the answer")


def _thoughts(body: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Takes `reasoning` (OpenRouter), `thinking` (DeepSeek, GLM) and `think` (Ollama), unless the
    route has such a field itself: /v1/responses and /v1/messages do."""
    if "reasoning" in fields or "thinking" in fields:
        return
    said: dict[str, Any] = {}
    reasoning, thinking, think = (body.pop(key, None) for key in ("reasoning", "thinking", "think"))
    if isinstance(reasoning, dict):
        said["reasoning_effort"] = reasoning.get("effort")
        said["thinking_token_budget"] = reasoning.get("max_tokens")
        said["include_reasoning"] = False if reasoning.get("exclude") else None
        said["enable_thinking"] = reasoning.get("enabled")
    if isinstance(thinking, dict) and "type" in thinking:
        said["enable_thinking"] = thinking["type"] != "disabled"
    if isinstance(think, bool):
        said["enable_thinking"] = think
    elif isinstance(think, str):
        said["reasoning_effort"] = think
    for key, value in said.items():
        if value is not None:
            body.setdefault(key, value)
