"""Bodies that clients may send: those of OpenAI's API, with the fields that vLLM's clients add.

These types are the check (msgspec refuses what does not fit, with its place) and the documentation
(`document.py` writes the OpenAPI document from them). A key that is not here is translated, left
out with a warning, or refused (`foreign_fields.py`); keys that change nothing in the answer are
here and say so. Called by the handlers in `completions.py`, `chat.py` and `information.py`; the
body of /v1/responses is in `response_input.py`.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jaxserve.engine.request import (
    MAX_INT32,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
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
MAX_WORDS = 128
MAX_ALLOWED = 2**18
MAX_TEMPLATE_CHARACTERS = 2**16

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
TemplateText = Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_CHARACTERS)]
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

    include_usage: bool | None = None
    """A last chunk without choices has the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far."""
    include_obfuscation: bool | None = None
    """Accepted without effect: chunks are not padded."""


class JsonSchema(Strict, kw_only=True):
    """A JSON schema by name."""

    name: str = "schema"
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    """True: objects have no properties but those that the schema names."""


class ResponseFormat(Strict, kw_only=True):
    """The format that the answer must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    """Parts of the text that a structural tag describes, each with `begin`, `schema` and `end`."""
    triggers: Annotated[list[str], Meta(max_length=MAX_TOOLS)] | None = None
    """Texts that begin such a part."""


class StructuredOutputs(Strict, kw_only=True):
    """The format that the answer must have, in vLLM's terms; exactly one is set."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    structural_tag: JsonObject | str | None = None
    whitespace_pattern: None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    """Taken without effect: white space is bounded."""
    disable_additional_properties: bool | None = None
    """True: objects have no properties but those that the schema names."""


class SamplingFields(Strict, kw_only=True):
    """Fields of all requests that generate."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "moderation", "spaces_between_special_tokens"),
        *("mm_processor_kwargs", "media_io_kwargs"),
    )
    """Taken without effect: they cannot change the answer."""

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
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of 32 bits; larger ones are folded."""
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
    include_stop_str_in_output: bool | None = None
    """Whether the text ends with the stop string."""
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_WORDS)] | None = None
    """Texts that must not come; as whole tokens, with a space before them and without."""
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None
    ) = None
    """The only tokens that may come."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    """Tokens of the reasoning, after which it is ended; -1: any number."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    """Number of the prompt's last tokens to keep; -1: as many as leave room for an output."""
    truncation_side: Literal["left", "right"] | None = None
    """`right`: keep its first tokens instead."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities name tokens as `token_id:N`."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    """Older names of structured_outputs' fields."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Requests of lower priority values are scheduled earlier."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Cached prefixes are shared only between requests of the same salt."""
    speculative: bool | None = None
    """False: no tokens are drafted. It changes no token, only when they come."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Part of the response's id; X-Request-Id has the same effect."""

    user: str | None = None
    """Accepted without effect, like the following fields."""
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    moderation: Any = None
    spaces_between_special_tokens: bool | None = None
    mm_processor_kwargs: JsonObject | None = None
    media_io_kwargs: JsonObject | None = None
    use_beam_search: bool | None = None
    """Only its default, like the following fields."""
    length_penalty: Literal[1] | Annotated[float, Meta(ge=1, le=1)] | None = None
    early_stopping: Literal[False] | None = None
    logits_processors: Annotated[list[Any], Meta(max_length=0)] | None = None
    kv_transfer_params: None = None
    vllm_xargs: Annotated[JsonObject, Meta(max_length=0)] | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields that completions and chats have in common."""

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    """0 with `echo` alone."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    """Not in the chunks of a streamed chat."""
    logprob_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOP_LOGPROBS)] | None
    ) = None
    """Tokens whose log-probabilities are told in place of the likeliest ones'; needs logprobs."""
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
    add_special_tokens: bool | None = None
    """Whether to begin a text with bos, where the model has one; by default it does."""


class FunctionChoice(Strict, kw_only=True):
    """A function by name."""

    name: str


class ToolName(Strict, kw_only=True):
    """A tool by name."""

    function: FunctionChoice
    type: Literal["function"] = "function"


class AllowedTools(Strict, kw_only=True):
    """Some of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolName], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Strict, kw_only=True):
    """The one tool to call, or the tools that may be called."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionChoice | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    IGNORED: ClassVar[tuple[str, ...]] = (*SamplingFields.IGNORED, "verbosity")

    messages: Messages
    """Each with `role` and `content`, and further keys that the model's template reads."""
    max_completion_tokens: Count | None = None
    """The new name of max_tokens, which it overrides."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False keeps the first call alone."""
    reasoning_effort: str | None = None
    """A template variable, for templates that read it."""
    chat_template_kwargs: JsonObject | None = None
    """Variables of the template, such as enable_thinking."""
    add_generation_prompt: bool | None = None
    """False: the prompt does not begin an answer."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message."""
    add_special_tokens: bool | None = None
    """Whether to begin the prompt with bos once more than the template does."""
    documents: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    """A template variable."""
    chat_template: TemplateText | None = None
    """Instead of the model's, where `server.request_templates` allows it."""
    echo: bool | None = None
    """Whether the answer begins with the last message, if that is the assistant's."""
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    verbosity: str | None = None
    """Accepted without effect."""
    function_call: Literal["none", "auto"] | None = None
    """Only its defaults, like the following fields."""
    functions: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
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
    chat_template: TemplateText | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
