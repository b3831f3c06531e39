"""Requests of /v1/messages, Anthropic's API, and their conversion to chats.

A message's content is a text or blocks: text, thinking, calls of tools and their results. Blocks of
an earlier answer may be sent back as they came. Called by `event_routes.py`.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http import requests
from jaxserve.server.http.errors import HttpError
from jaxserve.text.messages import MAX_PARTS

MAX_STOP_SEQUENCES = 16


class CacheControl(requests.Strict, kw_only=True):
    """Taken without effect: prefixes are cached without being asked."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Block(requests.Strict, kw_only=True, tag_field="type"):
    """A part of a message."""

    cache_control: CacheControl | None = None


class TextBlock(Block, kw_only=True, tag="text"):
    """A text."""

    text: str
    citations: Annotated[list[Any], Meta(max_length=MAX_PARTS)] | None = None


class ThinkingBlock(Block, kw_only=True, tag="thinking"):
    """The reasoning of an earlier answer."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(Block, kw_only=True, tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: requests.JsonObject
    caller: requests.JsonObject | None = None


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """Refused by name."""


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    """Refused by name."""


class ToolResultBlock(Block, kw_only=True, tag="tool_result"):
    """Result of a call."""

    tool_use_id: str
    content: (
        str
        | Annotated[list[TextBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_PARTS)]
        | None
    ) = None
    is_error: bool | None = None
    """Taken without effect: the model reads what the content says."""


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


class InputMessage(requests.Strict, kw_only=True):
    """A turn; adjacent turns of a role are one. A last turn of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Meta(max_length=MAX_PARTS)]


class CustomTool(requests.Strict, kw_only=True):
    """A function that the model may call."""

    name: str
    input_schema: requests.JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    """True: forced calls have no arguments but those that the schema names."""
    eager_input_streaming: bool | None = None
    """Without effect, like the following fields."""
    input_examples: Annotated[list[requests.JsonObject], Meta(max_length=MAX_PARTS)] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    defer_loading: Literal[False] | None = None


class MessageToolChoice(requests.Strict, kw_only=True):
    """Whether to call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the `tool` to call."""
    disable_parallel_tool_use: bool | None = None
    """True keeps the first call alone."""


class Thinking(requests.Strict, kw_only=True):
    """Whether the model reasons first; without it, it does as its template has it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: requests.Count | None = None
    """Tokens after which the reasoning is ended."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the blocks of it empty; it is never summarised."""


class JsonOutput(requests.Strict, kw_only=True):
    """The schema that the answer follows."""

    type: Literal["json_schema"] = "json_schema"
    schema: requests.JsonObject


class OutputConfig(requests.Strict, kw_only=True):
    """Options of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A template variable, for templates that read it."""
    format: JsonOutput | None = None


class CountTokensRequest(requests.Strict, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=requests.MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=requests.MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: requests.JsonObject | None = None
    """Variables of the template, such as enable_thinking."""
    thread: requests.JsonObject | None = None
    """Refused: the server keeps no conversations, and Anthropic's client then sends them whole."""


class MessageMetadata(requests.Strict, kw_only=True):
    """Taken without effect."""

    user_id: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: requests.Count
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[requests.StopString], Meta(max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Without effect."""


NAMES = (
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_tokens"),
    (re.compile(r"^thinking_token_budget"), "thinking.budget_tokens"),
    (re.compile(r"^reasoning_effort"), "output_config.effort"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
"""Name of a field in chats → its name in this route."""


def as_chat(request: CountTokensRequest) -> tuple[requests.ChatRequest, list[int]]:
    """The request as a chat, and for every message of it the index of its first turn; -1: system.

    Raises:
      InvalidRequestError: a block is not supported, or not in this place.
      HttpError: the request starts or continues a conversation that the server should keep.
    """
    if request.thread is not None:
        unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        message = "thread: conversations are not kept; send all messages"
        raise HttpError(400, message, param="thread", details=unsupported)
    messages, origins = _messages(request)
    thinking, output = request.thinking, request.output_config
    switches = dict(request.chat_template_kwargs or {})
    if thinking is not None:
        switches.setdefault("enable_thinking", thinking.type != "disabled")
    schema = None if output is None or output.format is None else output.format.schema
    last = messages[-1]
    chat = requests.ChatRequest(
        model=request.model,
        messages=messages,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=(
            False
            if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
            else None
        ),
        thinking_token_budget=None if thinking is None else thinking.budget_tokens,
        reasoning_effort=None if output is None else output.effort,
        response_format=(
            None
            if schema is None
            else requests.ResponseFormat(
                type="json_schema", json_schema=requests.JsonSchema(schema=schema)
            )
        ),
        chat_template_kwargs=switches or None,
        continue_final_message=(
            True if last["role"] == "assistant" and "tool_calls" not in last else None
        ),
    )
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.temperature, chat.top_p = request.temperature, request.top_p
        chat.top_k = request.top_k
    return chat, origins


def _tool(tool: CustomTool) -> requests.JsonObject:
    told = {"name": tool.name, "description": tool.description, "strict": tool.strict or None}
    function: requests.JsonObject = {key: value for key, value in told.items() if value is not None}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise InvalidRequestError("tool_choice.name", "is missing")
    return requests.ToolChoice(function=requests.FunctionChoice(name=choice.name))


def _messages(request: CountTokensRequest) -> tuple[list[requests.JsonObject], list[int]]:
    """Turns as messages of a chat: results of tools are messages of their own."""
    messages: list[requests.JsonObject] = []
    origins: list[int] = []
    called: dict[str, str] = {}  # id of a call → the tool's name

    def message_of(role: str, origin: int) -> requests.JsonObject:
        """The last message, or a new one of this role."""
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
            origins.append(origin)
        return messages[-1]

    if request.system:
        message_of("system", -1)["content"] = _texts(request.system, "system")
    for index, turn in enumerate(request.messages):
        blocks: Sequence[AnyBlock] = (
            [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
        )
        for number, block in enumerate(blocks):
            place = f"messages[{index}].content[{number}]"
            if isinstance(block, ToolResultBlock) and turn.role == "user":
                content = _texts(block.content or "", f"{place}.content")
                known = {"name": called[block.tool_use_id]} if block.tool_use_id in called else {}
                messages.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content, **known}
                )
                origins.append(index)
                continue
            message = message_of(turn.role, index)
            if isinstance(block, TextBlock):
                message["content"] = [*message["content"], {"type": "text", "text": block.text}]
            elif isinstance(block, ThinkingBlock) and turn.role == "assistant":
                earlier = message.get("reasoning_content", "")
                message["reasoning_content"] = earlier + block.thinking
            elif isinstance(block, ToolUseBlock) and turn.role == "assistant":
                called[block.id] = block.name
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                message.setdefault("tool_calls", []).append(
                    {"id": block.id, "type": "function", "function": function}
                )
            else:
                raise _unsupported(block, place, turn.role)
        if not blocks:
            message_of(turn.role, index)
    for message in messages:
        message["content"] = _plain(message["content"])
    return messages, origins


def _texts(content: str | Sequence[msgspec.Struct], place: str) -> list[requests.JsonObject]:
    """Parts of a text or of blocks, of which only texts are supported."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[requests.JsonObject] = []
    for number, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _unsupported(block, f"{place}[{number}]")
        parts.append({"type": "text", "text": block.text})
    return parts


def _plain(parts: list[requests.JsonObject]) -> str | list[requests.JsonObject]:
    """A single text as it is: not every template reads parts."""
    return parts[0]["text"] if len(parts) == 1 else parts or ""


def _unsupported(block: msgspec.Struct, place: str, role: str = "") -> InvalidRequestError:
    kind = block.__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        return InvalidRequestError(f"{place}.type", f"{kind!r} is not supported: only text is")
    return InvalidRequestError(f"{place}.type", f"{kind!r} is not possible in a turn of {role!r}")
