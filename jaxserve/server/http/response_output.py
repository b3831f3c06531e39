"""Responses of /v1/responses: the items, and the events of a stream.

The writer takes the pieces of an answer as they become certain; every piece continues the item that
is open or ends it and opens the next. Called by `event_routes.py`.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.server.http.responses import ChatLogprob
from jaxserve.text.answers import Piece
from jaxserve.text.call_readers import CallPart

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[ChatLogprob] = []
    """Log-probabilities of the text's tokens, if the request asks for them."""


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A reasoning text."""

    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    summary: list[None] = []
    status: Status = "in_progress"
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A tool call, which the client is to make."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Details of the output tokens."""

    reasoning_tokens: int
    """Tokens of the reasoning text."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    """The usage of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, kw_only=True):
    """The response of /v1/responses; repeats the request's options."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Status = "in_progress"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    tools: list[Any] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: Any = None
    reasoning: Any = None
    metadata: dict[str, str] = {}
    user: str | None = None
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    truncation: Literal["disabled", "auto"] = "disabled"
    top_logprobs: int = 0


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Says that a response is kept no longer."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; its `type` determines which of the other fields are set."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ResponseWriter:
    """Builds one response and yields its events.

    Events reference the response: encode each before asking for the next.

    Args:
      response: without items.
      keep: called with the response when it is complete, before the event that says so.
    """

    def __init__(self, response: Response, keep: Callable[[Response], None]):
        self.response = response
        self._keep = keep
        self._events = 0
        self._open: OutputItem | None = None

    def begin(self) -> Iterator[ResponseEvent]:
        """The events that begin the response."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def add(self, told: Iterable[tuple[Piece, list[ChatLogprob]]]) -> Iterator[ResponseEvent]:
        """The events of further pieces of the answer.

        Args:
          told: the pieces, each with the log-probabilities of its tokens, where they are wanted.
        """
        for piece, logprobs in told:
            if piece.call is not None:
                yield from self._called(piece.call)
            elif piece.reasoning:
                yield from self._grow(ReasoningItem, piece.reasoning, [])
            else:
                yield from self._grow(MessageItem, piece.content, logprobs)

    def end(self, usage: ResponseUsage, *, complete: bool) -> Iterator[ResponseEvent]:
        """The events that end the response."""
        status: Status = "completed" if complete else "incomplete"
        if not self.response.output:
            yield from self._begin_item(MessageItem)
        yield from self._close(status)
        response = self.response
        response.status, response.usage = status, usage
        if not complete:
            response.incomplete_details = IncompleteDetails()
        self._keep(response)
        yield self._event(f"response.{status}", response=response)

    def _grow(
        self,
        kind: type[MessageItem] | type[ReasoningItem],
        text: str,
        logprobs: list[ChatLogprob],
    ) -> Iterator[ResponseEvent]:
        """Appends text to the open item, or to a new one if that is of another kind."""
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            yield from self._begin_item(kind)
        item = self._open
        assert isinstance(item, MessageItem | ReasoningItem)
        item.content[0].text += text
        if isinstance(item, MessageItem):
            item.content[0].logprobs = item.content[0].logprobs + logprobs
            yield self._of_part("response.output_text.delta", item, delta=text, logprobs=logprobs)
        else:
            yield self._of_part("response.reasoning_text.delta", item, delta=text)

    def _begin_item(self, kind: type[MessageItem] | type[ReasoningItem]) -> Iterator[ResponseEvent]:
        """Opens an empty item and its only part."""
        item = kind(id=_new_id("msg" if kind is MessageItem else "rs"))
        self._open = item
        self.response.output.append(item)
        yield self._of_item("response.output_item.added", item=item)
        part: Any = OutputText() if isinstance(item, MessageItem) else ReasoningText()
        item.content.append(part)
        yield self._of_part("response.content_part.added", item, part=part)

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        """Closes the open item."""
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, FunctionCallItem):
            item.status = status
            kind = "response.function_call_arguments.done"
            told = {"arguments": item.arguments, "name": item.name}
            yield self._of_item(kind, item_id=item.id, **told)
            yield self._of_item("response.output_item.done", item=item)
            return
        part = item.content[0]
        item.status = status
        if isinstance(item, MessageItem):
            message: OutputText = item.content[0]
            whole: dict[str, Any] = {"text": part.text, "logprobs": message.logprobs}
            yield self._of_part("response.output_text.done", item, **whole)
        else:
            yield self._of_part("response.reasoning_text.done", item, text=part.text)
        yield self._of_part("response.content_part.done", item, part=part)
        yield self._of_item("response.output_item.done", item=item)

    def _called(self, part: CallPart) -> Iterator[ResponseEvent]:
        """Continues a tool call, or begins one."""
        if part.id:
            yield from self._close("completed")
            self._open = FunctionCallItem(id=_new_id("fc"), call_id=part.id, name=part.name)
            self.response.output.append(self._open)
            yield self._of_item("response.output_item.added", item=self._open)
        item = self._open
        assert isinstance(item, FunctionCallItem)
        item.arguments += part.arguments
        if part.arguments:
            kind = "response.function_call_arguments.delta"
            yield self._of_item(kind, item_id=item.id, delta=part.arguments)

    def _of_item(self, kind: str, **fields: Any) -> ResponseEvent:
        """Fields of events about the last item."""
        return self._event(kind, output_index=len(self.response.output) - 1, **fields)

    def _of_part(
        self, kind: str, item: MessageItem | ReasoningItem, **fields: Any
    ) -> ResponseEvent:
        return self._of_item(kind, item_id=item.id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._events, **fields)
        self._events += 1
        return event


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
