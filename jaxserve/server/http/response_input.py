"""Requests of /v1/responses, and their conversion to chats.

It is the same conversation as /v1/chat/completions takes, in items instead of messages, perhaps
behind the items of a response that the server keeps. Items of an earlier answer may be sent back as
they came. Called by `event_routes.py`.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http import requests
from jaxserve.server.http.foreign_fields import understood


class NamedFunction(requests.Strict, kw_only=True):
    """The one function to call."""

    name: str
    type: Literal["function"] = "function"


class FunctionTool(requests.Strict, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: requests.JsonObject | None = None
    strict: bool | None = None


class TextFormat(requests.Strict, kw_only=True):
    """The format that the answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    description: str | None = None
    schema: requests.JsonObject | None = None
    strict: bool | None = None


class TextOptions(requests.Strict, kw_only=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Taken and without effect."""


class ReasoningOptions(requests.Strict, kw_only=True):
    """Options of the model's reasoning."""

    effort: str | None = None
    """A template variable, for templates that read it."""
    summary: str | None = None
    """Accepted without effect: reasoning is never summarised."""
    generate_summary: str | None = None


class ResponseRequest(requests.SamplingFields, kw_only=True):
    """POST /v1/responses."""

    IGNORED: ClassVar[tuple[str, ...]] = tuple(
        name for name in requests.SamplingFields.IGNORED if name != "store"
    )

    input: (
        requests.Text
        | Annotated[list[requests.JsonObject], Meta(min_length=1, max_length=requests.MAX_MESSAGES)]
    )
    """A text of the user, or items: messages, calls, their outputs, and reasoning."""
    instructions: str | None = None
    """A system message at the beginning of the conversation."""
    max_output_tokens: requests.Count | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=requests.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    """False keeps the first call alone."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: requests.JsonObject | None = None
    """Variables of the template, such as enable_thinking."""
    include: (
        Annotated[
            list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    """Log-probabilities of a message's tokens. Reasoning items always have their text."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto`: of a conversation that is too long the first items are left out, but no instructions
    and not the last item."""
    top_logprobs: requests.TopLogprobs | None = None
    """The likeliest tokens at each place of a message; implies their `include`."""

    store: bool | None = None
    """False: the response is not kept. Others are for an hour, or while there is room."""
    previous_response_id: str | None = None
    """The kept response whose conversation goes on, without its instructions."""
    background: bool | None = None
    """True is refused, like the fields below."""
    conversation: str | requests.JsonObject | None = None
    prompt: requests.JsonObject | None = None


def check_supported(request: ResponseRequest) -> None:
    """Raises InvalidRequestError if a request needs state that the server does not keep."""
    for field in ("background", "conversation", "prompt"):
        if getattr(request, field):
            raise InvalidRequestError(
                field, "is not supported: the server keeps only complete responses"
            )


def wants_logprobs(request: ResponseRequest) -> bool:
    """Whether messages of the answer have the log-probabilities of their tokens."""
    return bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())


def items_of(request: ResponseRequest) -> list[requests.JsonObject]:
    """The items of a request's input."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    return request.input


def as_chat(
    request: ResponseRequest,
    earlier: Sequence[requests.JsonObject] = (),
    left_out: Callable[[str], None] | None = None,
) -> tuple[requests.ChatRequest, list[int]]:
    """The request as a chat, and for every message the index of its first item.

    Args:
      earlier: items of the conversation before the request's.
      left_out: called with the name of an item's unknown field; None: it is an error.

    Raises:
      InvalidRequestError: an item is invalid or of an unknown type.
    """
    messages, origins = _messages(request.instructions, earlier, items_of(request), left_out)
    same = {name: getattr(request, name) for name in requests.SamplingFields.__struct_fields__}
    same["store"] = None
    form = request.text.format if request.text is not None else None
    choice = request.tool_choice
    chat = requests.ChatRequest(
        **same,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=(
            requests.ToolChoice(function=requests.FunctionChoice(name=choice.name))
            if isinstance(choice, NamedFunction)
            else choice
        ),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if form is None else _response_format(form),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        chat_template_kwargs=request.chat_template_kwargs,
        logprobs=wants_logprobs(request),
        top_logprobs=request.top_logprobs if wants_logprobs(request) else None,
    )
    return chat, origins


Names = Sequence[tuple[re.Pattern[str], str]]

NAMES: Names = (
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
)
"""Name of a field in chats → its name in this route."""


@contextlib.contextmanager
def in_words_of(names: Names, origins: list[int], *, items: str, system: str) -> Iterator[None]:
    """Renames fields in errors of the chat to those of another route.

    Args:
      names: fields of chats and what they are called there.
      origins: for every message of the chat the index of its first item; -1: the system's.
      items: what the list is called there.
      system: what the system message is called there.
    """
    try:
        yield
    except InvalidRequestError as error:
        field = error.field
        for pattern, name in names:
            field = pattern.sub(name, field)
        if found := re.match(r"messages(?:\[(\d+)\])?", field):
            item = -1 if found[1] is None else origins[int(found[1])]
            place = items if found[1] is None else f"{items}[{item}]"
            field = (system if item < 0 and found[1] else place) + field[found.end() :]
        raise InvalidRequestError(field, error.message) from None


def _tool(tool: FunctionTool) -> requests.JsonObject:
    function = msgspec.structs.asdict(tool)
    kind = function.pop("type")
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": kind, "function": given}


def _response_format(form: TextFormat) -> requests.ResponseFormat:
    if form.type != "json_schema":
        return requests.ResponseFormat(type=form.type)
    if form.schema is None:
        raise InvalidRequestError("text.format.schema", "is missing")
    return requests.ResponseFormat(
        type="json_schema",
        json_schema=requests.JsonSchema(name=form.name, schema=form.schema, strict=form.strict),
    )


# ----------------------------------------------------------------------------------- items


class _Part(requests.Strict, kw_only=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(requests.Strict, kw_only=True):
    """Further fields of items of earlier answers; without effect."""

    id: str | None = None
    status: str | None = None


class _Message(_Item, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    phase: str | None = None


class _FunctionCall(_Item, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutput(_Item, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]


class _Reasoning(_Item, kw_only=True):
    type: Literal["reasoning"]
    summary: list[_Part] | None = None
    content: list[_Part] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
    "reasoning": _Reasoning,
}


def _messages(
    instructions: str | None,
    earlier: Sequence[requests.JsonObject],
    items: Sequence[requests.JsonObject],
    left_out: Callable[[str], None] | None,
) -> tuple[list[requests.JsonObject], list[int]]:
    """Converts items to messages: reasoning, text and tool calls of one answer are one message.
    Earlier items count as the first one."""
    messages: list[requests.JsonObject] = []
    origins: list[int] = []

    def add(origin: int, role: str, **fields: Any) -> None:
        messages.append({"role": role, **fields})
        origins.append(origin)

    def answer(origin: int, fits: Callable[[requests.JsonObject], bool]) -> requests.JsonObject:
        """The message under construction, if it can take this kind of part, else a new one."""
        if not messages or messages[-1]["role"] != "assistant" or not fits(messages[-1]):
            add(origin, "assistant", content="")
        return messages[-1]

    if instructions:
        add(-1, "system", content=instructions)
    for place, raw in enumerate([*earlier, *items], -len(earlier)):
        index = max(0, place)
        item = _read(raw, index, left_out)
        if isinstance(item, _Message) and item.role == "assistant":
            whole = answer(
                index, lambda message: not message["content"] and "tool_calls" not in message
            )
            whole["content"] = _text(item.content)
        elif isinstance(item, _Message):
            role = "system" if item.role == "developer" else item.role
            add(index, role, content=_text(item.content))
        elif isinstance(item, _Reasoning):
            thought = _text(item.content or item.summary or "")
            answer(index, lambda message: False)["reasoning_content"] = thought
        elif isinstance(item, _FunctionCall):
            function = {"name": item.name, "arguments": item.arguments}
            called = {"id": item.call_id, "type": "function", "function": function}
            answer(index, lambda message: True).setdefault("tool_calls", []).append(called)
        elif isinstance(item, _FunctionCallOutput):
            add(index, "tool", tool_call_id=item.call_id, content=_text(item.output))
    return messages, origins


def _read(raw: requests.JsonObject, index: int, left_out: Callable[[str], None] | None) -> _Item:
    """Checks one item."""
    place = f"input[{index}]"
    kind = raw.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequestError(
            f"{place}.type", f"{kind!r} is not supported; {', '.join(_ITEMS)} are"
        )
    try:
        return understood(msgspec.json.encode(raw), _ITEMS[kind], left_out)
    except InvalidRequestError as wrong:
        field = place if wrong.field == "body" else f"{place}.{wrong.field}"
        raise InvalidRequestError(field, wrong.message) from None


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
