"""Reads from a request what the engine needs: its sampling fields as `SamplingParams`, and grammars
for response_format, structured_outputs and tool_choice.

Called by `completions.py` and `chat.py`; the grammars themselves are `text/structured.py`'s.
"""

import functools
from typing import Any

import msgspec

from jaxserve.engine.request import MAX_UINT32, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.access import prefix_salt
from jaxserve.server.http.requests import ChatRequest, GenerationFields, SamplingFields
from jaxserve.server.http.service import Service
from jaxserve.server.structured_outputs import ANY_OBJECT, FIELD, closed, form
from jaxserve.text import structured
from jaxserve.text.answer_format import AnswerMarkers
from jaxserve.text.structured import Form, GrammarError, TokenGrammar, TokenRules, quoted

COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Arguments of forced calls have no white space but one space, if any, behind a comma or colon."""


async def grammar(
    service: Service, request: GenerationFields, begins_after: bytes = b""
) -> TokenGrammar | None:
    """The grammar that a request asks for; None without one.

    Args:
      service: compiles it.
      request: has the fields.
      begins_after: the text is free up to these bytes.

    Raises:
      InvalidRequestError: the grammar is invalid or takes too much work; names the field.
    """
    found = [
        wanted
        for wanted in (_response_format(request), _structured_outputs(request))
        if wanted is not None
    ]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidRequestError("structured_outputs", "and response_format: set one of them")
    return await _compiled(service, *found[0], begins_after)


def chosen_tools(request: ChatRequest) -> tuple[str, frozenset[str] | None]:
    """Whether a call is possible ("none", "auto") or "required", and of which functions.

    Raises:
      InvalidRequestError: the choice lacks what its type needs.
    """
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto", None
    if choice.type == "function":
        if choice.function is None:
            raise InvalidRequestError("tool_choice.function", "is missing")
        return "required", frozenset({choice.function.name})
    if choice.allowed_tools is None:
        raise InvalidRequestError("tool_choice.allowed_tools", "is missing")
    allowed = choice.allowed_tools
    return allowed.mode, frozenset(tool.function.name for tool in allowed.tools)


def with_rules(
    service: Service,
    request: SamplingFields,
    found: TokenGrammar | None,
    reasoning: tuple[str, str] | None = None,
) -> TokenGrammar | None:
    """The grammar with what the request says of single tokens.

    Args:
      service: has the tokenizer.
      request: has the fields.
      found: the grammar; None: any text.
      reasoning: what begins a reasoning, empty if the prompt does, and what ends it.

    Raises:
      InvalidRequestError: a token id is out of range, or there is no reasoning to limit.
    """
    generator = service.ready()
    vocab_size = int(generator.engine.model_info()["vocab_size"])
    for index, token_id in enumerate(request.allowed_token_ids or ()):
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"allowed_token_ids[{index}]", f"{token_id} is not in [0, {vocab_size - 1}]"
            )
    encode = functools.partial(generator.tokenizer.encode, add_bos=False)
    spelt = [form for word in request.bad_words or () for form in (word, " " + word.lstrip(" "))]
    budget = -1 if request.thinking_token_budget is None else request.thinking_token_budget
    if budget >= 0 and reasoning is None:
        raise InvalidRequestError("thinking_token_budget", "the model has no reasoning to limit")
    begin, end = reasoning if reasoning is not None and budget >= 0 else ("", "")
    rules = TokenRules(
        allowed=tuple(request.allowed_token_ids or ()),
        banned=tuple(dict.fromkeys(tuple(encode(word)) for word in spelt)),
        budget=budget,
        beginning=tuple(encode(begin)) if begin else (),
        ending=tuple(encode(end)) if end else (),
    )
    return found if rules == TokenRules() else generator.grammars.ruled(found, rules)


async def forced_call(
    service: Service, request: ChatRequest, answers: AnswerMarkers, begins_after: bytes
) -> TokenGrammar | None:
    """The grammar of the tool call that `tool_choice` asks for; None if it does not.

    Raises:
      InvalidRequestError: there is no such tool, its parameters are not a schema, or the model's
        format of tool calls is not known.
    """
    mode, names = chosen_tools(request)
    if mode != "required":
        return None
    calls = answers.calls
    if calls is None:
        raise InvalidRequestError("tool_choice", "this model's calls cannot be forced")
    earlier = [message.get("tool_calls") for message in request.messages]
    number = sum(len(several) for several in earlier if isinstance(several, list))
    alternatives: list[str] = []
    rules: list[str] = []
    for index, tool in enumerate(request.tools or []):
        name, schema = _function(tool, index)
        if names is not None and name not in names:
            continue
        try:
            compact = schema if schema is True else {**schema, "x-guidance": COMPACT}
            rules += calls.rules(name, number, compact, index)
        except ValueError as error:
            raise InvalidRequestError(f"tools[{index}].function.name", str(error)) from None
        alternatives.append(f"call{index}")
    if not alternatives:
        asked = ", ".join(map(repr, sorted(names or ())))
        raise InvalidRequestError("tool_choice.function.name", f"{asked} is no tool")
    start = f"start: {quoted(calls.begin)} ({' | '.join(alternatives)})"
    start += f" {quoted(calls.end)}" if calls.end else ""
    lark = "\n".join([start, *rules])
    return await _compiled(service, "tools", lambda: structured.lark(lark), begins_after)


async def _compiled(service: Service, field: str, asked: Form, begins_after: bytes) -> TokenGrammar:
    found = await service.ready().grammars.compiled(field, asked)
    return found.after(begins_after) if begins_after else found


def _function(tool: dict[str, Any], index: int) -> tuple[str, Any]:
    """The name and the parameters' schema of a tool; InvalidRequestError if one is malformed."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tools[{index}].function.name", "is missing")
    schema = function.get("parameters") or ANY_OBJECT
    where = f"tools[{index}].function.parameters"
    if schema is True:
        return function["name"], schema
    if not isinstance(schema, dict):
        raise InvalidRequestError(where, "is no JSON schema")
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidRequestError(f"{where}.required", "is no list of names")
    try:
        return function["name"], closed(schema) if function.get("strict") is True else schema
    except GrammarError as error:
        raise InvalidRequestError(where, str(error)) from None


def _response_format(request: GenerationFields) -> tuple[str, Form] | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "structural_tag":
        return form({"structural_tag": msgspec.structs.asdict(wanted)})
    if wanted.type == "json_object":
        return "response_format", lambda: structured.json_schema(ANY_OBJECT)
    if wanted.json_schema is None:
        raise InvalidRequestError("response_format.json_schema", "is missing")
    schema = wanted.json_schema.schema or {}
    _, asked = form({"json": schema}, close=wanted.json_schema.strict is True)
    return "response_format.json_schema.schema", asked


def _structured_outputs(request: GenerationFields) -> tuple[str, Form] | None:
    wanted = request.structured_outputs
    older = {
        "json": request.guided_json,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    if wanted is None:
        if all(value is None for value in older.values()):
            return None
        field, asked = form(older)
        return field.replace(f"{FIELD}.", "guided_"), asked
    names = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    close = wanted.disable_additional_properties is True
    return form({name: getattr(wanted, name) for name in names}, close=close)


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
