"""The form that an answer must have: response_format, structured_outputs, tool_choice as grammars.

Called by `completions.py` and `chat.py`; the grammars themselves are `server/structured.py`'s.
"""

import json
from collections.abc import Callable
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.server.answers import CALL_FORMATS, AnswerFormat
from jaxserve.server.http.requests import (
    ChatRequest,
    GenerationFields,
    NamedToolChoice,
    StructuredOutputs,
)
from jaxserve.server.http.service import Service
from jaxserve.server.structured import GrammarCompiler, GrammarError, TokenGrammar, quoted

Compile = Callable[[GrammarCompiler], TokenGrammar]
ANY_OBJECT = {"type": "object"}


async def grammar(
    service: Service, request: GenerationFields, begins_after: bytes = b""
) -> TokenGrammar | None:
    """The grammar that a request asks for; None where the text is free.

    Args:
      service: has the compiler.
      request: the fields.
      begins_after: the text is free until these bytes came.

    Raises:
      InvalidRequestError: names the field whose grammar is none, or takes too much work.
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
    service: Service, request: ChatRequest, form: AnswerFormat, begins_after: bytes
) -> TokenGrammar | None:
    """The grammar of a call that `tool_choice` asks for; None where it does not.

    Raises:
      InvalidRequestError: the tool is not there, or its parameters are no schema, or it is not
        known here how the model writes calls.
    """
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return None
    if form.calls is not CALL_FORMATS[0]:
        raise InvalidRequestError("tool_choice", "this model's calls cannot be forced")
    functions = [_function(tool, index) for index, tool in enumerate(request.tools or [])]
    if isinstance(choice, NamedToolChoice):
        wanted = choice.function.name
        functions = [function for function in functions if function["name"] == wanted]
        if not functions:
            raise InvalidRequestError("tool_choice.function.name", f"{wanted!r} is no tool")
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or ANY_OBJECT,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    begin, end = quoted(form.calls.begin + "\n"), quoted("\n" + form.calls.end)
    lark = f"start: {begin} call {end}\ncall: %json {json.dumps({'anyOf': schemas})}"
    return await _compiled(service, "tools", lambda compiler: compiler.lark(lark), begins_after)


async def _compiled(
    service: Service, field: str, compile_it: Compile, begins_after: bytes
) -> TokenGrammar:
    try:
        found = await service.compiled(compile_it)
    except GrammarError as error:
        raise InvalidRequestError(field, str(error)) from None
    return found.after(begins_after) if begins_after else found


def _function(tool: dict[str, Any], index: int) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tools[{index}].function.name", "is missing")
    return function


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
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name)]
    if len(given) != 1:
        raise InvalidRequestError(
            "structured_outputs", f"set one of {', '.join(StructuredOutputs.__struct_fields__)}"
        )
    (name,) = given
    value = getattr(wanted, name)
    compilers: dict[str, Compile] = {
        "json": lambda compiler: compiler.json_schema(value),
        "json_object": lambda compiler: compiler.json_schema(ANY_OBJECT),
        "regex": lambda compiler: compiler.regex(value),
        "choice": lambda compiler: compiler.choice(value),
        "grammar": lambda compiler: compiler.lark(value),
    }
    return f"structured_outputs.{name}", compilers[name]
