"""Responses of /v1/messages: the message with its blocks, the events of a stream, and errors.

The writer takes the pieces of an answer as they become certain; every piece continues the block
that is open or ends it and opens the next. Called by `event_routes.py`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.server.http.responses import Usage
from jaxserve.text.answers import Piece

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A text."""

    text: str = ""


class ThinkingOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning."""

    thinking: str = ""
    signature: str = ""
    """Always empty: who sends the block back need not prove where it is from."""


class ToolUseOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call, which the client is to make."""

    id: str
    name: str
    input: dict[str, Any] = {}


OutputBlock = TextOutput | ThinkingOutput | ToolUseOutput


class MessageUsage(msgspec.Struct, kw_only=True):
    """The tokens of a request; cached ones of the prompt are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        """From OpenAI's."""
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )


class Message(msgspec.Struct, kw_only=True):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, kw_only=True):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessageDelta(msgspec.Struct, kw_only=True):
    """Something new: of a block, with a `type`, or of the message."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; its `type` determines which of the other fields are set."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class MessageWriter:
    """Builds one message and yields its events.

    Events reference the message: encode each before asking for the next.

    Args:
      message: without blocks.
      shows_thinking: whether blocks of reasoning have their text.
    """

    def __init__(self, message: Message, shows_thinking: bool = True):
        self.message = message
        self._shows_thinking = shows_thinking
        self._open: OutputBlock | None = None
        self._begun = 0
        self._arguments = ""  # of the call that is open

    def begin(self) -> Iterator[MessageEvent]:
        """The event that begins the message."""
        yield MessageEvent(type="message_start", message=self.message)

    def add(self, pieces: Iterable[Piece]) -> Iterator[MessageEvent]:
        """The events of further pieces of the answer."""
        for piece in pieces:
            if piece.call is not None:
                if piece.call.id:
                    yield from self._begin(ToolUseOutput(id=piece.call.id, name=piece.call.name))
                self._arguments += piece.call.arguments
                if piece.call.arguments:
                    yield self._delta("input_json_delta", partial_json=piece.call.arguments)
            elif piece.reasoning:
                if not isinstance(self._open, ThinkingOutput):
                    yield from self._begin(ThinkingOutput())
                if self._shows_thinking:
                    assert isinstance(self._open, ThinkingOutput)
                    self._open.thinking += piece.reasoning
                    yield self._delta("thinking_delta", thinking=piece.reasoning)
            else:
                if not isinstance(self._open, TextOutput):
                    yield from self._begin(TextOutput())
                assert isinstance(self._open, TextOutput)
                self._open.text += piece.content
                yield self._delta("text_delta", text=piece.content)

    def end(
        self, reason: StopReason, stop_sequence: str | None, usage: MessageUsage
    ) -> Iterator[MessageEvent]:
        """The events that end the message."""
        yield from self._close(cut=reason == "max_tokens")
        message = self.message
        message.stop_reason, message.stop_sequence, message.usage = reason, stop_sequence, usage
        delta = MessageDelta(stop_reason=reason, stop_sequence=stop_sequence)
        yield MessageEvent(type="message_delta", delta=delta, usage=usage)
        yield MessageEvent(type="message_stop")

    def _begin(self, block: OutputBlock) -> Iterator[MessageEvent]:
        yield from self._close()
        self._open, self._begun = block, self._begun + 1
        yield MessageEvent(type="content_block_start", index=self._begun - 1, content_block=block)

    def _close(self, *, cut: bool = False) -> Iterator[MessageEvent]:
        """Ends the open block.

        A call without a whole JSON object as its input is in the events. The message has such a
        call as text, or leaves it out if the answer was `cut` off: no client may make that call.
        """
        block, self._open = self._open, None
        arguments, self._arguments = self._arguments, ""
        if block is None:
            return
        if not isinstance(block, ToolUseOutput):
            self.message.content.append(block)
        elif (found := _json_object(arguments)) is not None:
            block.input = found
            self.message.content.append(block)
        elif not cut:
            self.message.content.append(TextOutput(text=f"{block.name} {arguments}"))
        yield MessageEvent(type="content_block_stop", index=self._begun - 1)

    def _delta(self, kind: str, **fields: Any) -> MessageEvent:
        delta = MessageDelta(type=kind, **fields)
        return MessageEvent(type="content_block_delta", index=self._begun - 1, delta=delta)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
