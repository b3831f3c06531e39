"""Response bodies: the objects of OpenAI's API.

Written by the handlers, documented by `document.py`. Fields that clients expect to be null are
null; fields that are extensions are left out if they are empty.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Details of the prompt's tokens."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Details of the completion's tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Drafts that held, where there were any."""
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, kw_only=True):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Set for answers with reasoning or drafts."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities in the format of completions: one list entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A possible token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per token of a prompt, by id: the token itself and its alternatives; None for the first."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or a delta of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the token id that ended it."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    """Not in chunks, if the request does not ask for it."""


class Completion(msgspec.Struct, kw_only=True):
    """The response of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """A possible token at this position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, kw_only=True):
    """A token and its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities in the format of chats."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function to call; in a stream, a delta of it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call; in a stream it has an index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same by its newer name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, kw_only=True):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """A delta of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The delta of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    """The name of its folder."""
    max_model_len: int


class ServerLoad(msgspec.Struct, kw_only=True):
    """How busy the server is."""

    server_load: int
    """Requests that are read, run or answered."""


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The model's tokenizer and chat template."""

    vocab_size: int
    model_max_length: int
    bos_token_id: int | None
    bos_token: str | None
    eos_token_ids: list[int]
    eos_tokens: list[str]
    chat_template: str | None


class ModelList(msgspec.Struct, kw_only=True):
    """The list of the model's names."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(msgspec.Struct, kw_only=True):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(msgspec.Struct, kw_only=True):
    """The response of /detokenize."""

    prompt: str


class Status(msgspec.Struct, kw_only=True):
    """The response of /health and /ready.

    Attributes:
      problems: of /health, what is wrong with workers that this process needs.
    """

    status: str
    problems: list[str] | UnsetType = UNSET


class Version(msgspec.Struct, kw_only=True):
    """The response of /version."""

    version: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """An error: a message, codes for programs, and the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(msgspec.Struct, kw_only=True):
    """The body of all error responses, and the last event of a stream that failed."""

    error: ErrorDetail


class MessageErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An error in Anthropic's API."""

    type: str
    message: str
    details: Mapping[str, Any] | None = None


class MessageError(msgspec.Struct, kw_only=True):
    """The body of errors in Anthropic's API, and the last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str = ""
