"""Grammars for response_format, structured_outputs and tool_choice.

Called by `completions.py` and `chat.py`; the grammars themselves are `text/structured.py`'s.
"""

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.requests import ChatRequest, GenerationFields, NamedToolChoice
from jaxserve.server.http.service import Service
from jaxserve.text.answers import AnswerFormat
from jaxserve.text.grammars import ANY_OBJECT, Compile, form
from jaxserve.text.structured import TokenGrammar, quoted


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


async def forced_call(
    service: Service, request: ChatRequest, answers: AnswerFormat, begins_after: bytes
) -> TokenGrammar | None:
    """The grammar of the tool call that `tool_choice` asks for; None if it does not.

    Raises:
      InvalidRequestError: there is no such tool, its parameters are not a schema, or the model's
        format of tool calls is not known.
    """
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return None
    calls = answers.calls
    if calls is None:
        raise InvalidRequestError("tool_choice", "this model's calls cannot be forced")
    wanted = choice.function.name if isinstance(choice, NamedToolChoice) else None
    earlier = [message.get("tool_calls") for message in request.messages]
    number = sum(len(several) for several in earlier if isinstance(several, list))
    alternatives: list[str] = []
    rules: list[str] = []
    for index, tool in enumerate(request.tools or []):
        name, schema = _function(tool, index)
        if wanted not in (None, name):
            continue
        try:
            rules += calls.rules(name, number, schema, index)
        except ValueError as error:
            raise InvalidRequestError(f"tools[{index}].function.name", str(error)) from None
        alternatives.append(f"call{index}")
    if not alternatives:
        raise InvalidRequestError("tool_choice.function.name", f"{wanted!r} is no tool")
    start = f"start: {quoted(calls.begin)} ({' | '.join(alternatives)}) {quoted(calls.end)}"
    lark = "\n".join([start, *rules])
    return await _compiled(service, "tools", lambda compiler: compiler.lark(lark), begins_after)


async def _compiled(
    service: Service, field: str, compile_it: Compile, begins_after: bytes
) -> TokenGrammar:
    found = await service.ready().grammars.compiled(field, compile_it)
    return found.after(begins_after) if begins_after else found


def _function(tool: dict[str, Any], index: int) -> tuple[str, Any]:
    """The name and the parameters' schema of a tool."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tools[{index}].function.name", "is missing")
    return function["name"], function.get("parameters") or ANY_OBJECT


def _response_format(request: GenerationFields) -> tuple[str, Compile] | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "response_format", lambda compiler: compiler.json_schema(ANY_OBJECT)
    if wanted.json_schema is None:
        raise InvalidRequestError("response_format.json_schema", "is missing")
    schema = wanted.json_schema.schema
    return "response_format.json_schema.schema", lambda compiler: compiler.json_schema(schema)


def _structured_outputs(request: GenerationFields) -> tuple[str, Compile] | None:
    wanted = request.structured_outputs
    return None if wanted is None else form(msgspec.structs.asdict(wanted))
