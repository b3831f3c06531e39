"""What clients may send: the bodies of OpenAI's API, with the fields that vLLM's clients add.

These types are the check (msgspec refuses what does not fit, with its place) and the documentation
(`document.py` writes the OpenAPI document from them). A key that is not here is an error, so that
no wish of a client is ignored in silence; keys that change nothing in the answer are here and
say so. Called by the handlers in `completions.py`, `chat.py` and `tokens.py`; the body of
/v1/responses is in `response_input.py`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.engine.request import (
    MAX_INT32,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_UINT32,
)
from jaxserve.text.messages import MAX_PARTS

MAX_CHOICES = 128
"""The most choices of one request, `n` times its prompts."""
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 300
MAX_PRIORITY = 100
MAX_SALT_CHARACTERS = 200
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_TOKENS = 2**20
"""Token ids of one prompt; the model's own limit is below."""
MAX_METADATA = 16

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}

Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_STRING_CHARACTERS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
JsonObject = dict[str, Any]
Text = Annotated[str, Meta(min_length=1)]
Message = Annotated[
    JsonObject,
    Meta(
        extra_json_schema={
            "required": ["role", "content"],
            "properties": {
                "role": {"type": "string", "minLength": 1},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": _TEXT_PART, "maxItems": MAX_PARTS},
                    ],
                    "description": "A text, or parts of one; null beside tool_calls.",
                },
            },
        }
    ),
]
"""Checked by `text/chat.py`; the template decides which further keys a message may have."""
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body, or a part of one; unknown keys are errors."""


class StreamOptions(Strict, kw_only=True):
    """How to stream."""

    include_usage: bool = False
    """A last chunk without choices has the usage."""
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far."""
    include_obfuscation: bool = False
    """Accepted without effect: chunks are not padded."""


class JsonSchema(Strict, kw_only=True):
    """A JSON schema by name."""

    name: str = "schema"
    description: str | None = None
    schema: JsonObject = {}
    strict: bool | None = None


class ResponseFormat(Strict, kw_only=True):
    """The format that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict, kw_only=True):
    """The format that the answer must have, in vLLM's terms; exactly one is set."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None


class SamplingFields(Strict, kw_only=True):
    """Fields of all requests that generate."""

    model: str | None = None
    """The served model's name, or None."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_UINT32)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[int, Meta(ge=0, le=MAX_INT32)],
                Annotated[float, Meta(ge=-100, le=100)],
            ],
            Meta(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    """False spells them out."""
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Requests of lower priority values are scheduled earlier."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Cached prefixes are shared only between requests of the same salt."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Part of the response's id; X-Request-Id has the same effect."""

    user: str | None = None
    """Accepted without effect, like the following fields."""
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields that completions and chats have in common."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    """Not in the chunks of a streamed chat."""
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[
            list[Text | TokenId | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]],
            Meta(min_length=1, max_length=MAX_TOKENS),
        ]
    )
    """A text, token ids, or a list of either."""
    echo: bool | None = None
    """Whether the text of a choice begins with its prompt."""
    logprobs: TopLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Must equal `n`."""
    suffix: str | None = None
    """Refused: infilling is not supported."""


class FunctionChoice(Strict, kw_only=True):
    """A function by name."""

    name: str


class NamedToolChoice(Strict, kw_only=True):
    """The one tool to call."""

    function: FunctionChoice
    type: Literal["function"] = "function"


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    """Each with `role` and `content`, and further keys that the model's template reads."""
    max_completion_tokens: Count | None = None
    """The new name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """Accepted without effect: the model decides."""
    reasoning_effort: str | None = None
    """A template variable, for templates that read it."""
    chat_template_kwargs: JsonObject | None = None
    """Variables of the template, such as enable_thinking."""
    add_generation_prompt: bool | None = None
    """False continues the last message instead of answering it."""
    include_reasoning: bool | None = None
    """False leaves reasoning_content out."""


class TokenizeRequest(Strict, kw_only=True):
    """POST /tokenize: a prompt, or a conversation; exactly one is set."""

    model: str | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    """Whether to add bos to a prompt."""
    messages: Messages | None = None
    add_generation_prompt: bool = True
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
