"""The table of routes: paths, handlers, types of requests and responses.

Both the router in `app.py` and the OpenAPI document of `document.py` are made from it, so they
cannot disagree.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from jaxserve.fleet.rolling import WorkerStatus
from jaxserve.roles.expert_moves import Proposal
from jaxserve.server.http import (
    information,
    live,
    operations,
    requests,
    responses,
    role_operations,
    tokens,
)
from jaxserve.server.http.chat import chat_completions
from jaxserve.server.http.completions import completions
from jaxserve.server.http.errors import ErrorForm
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.message_input import CountTokensRequest, MessagesRequest
from jaxserve.server.http.message_output import Message, MessageEvent, TokenCount
from jaxserve.server.http.message_route import count_tokens, create_message
from jaxserve.server.http.response_input import ResponseRequest
from jaxserve.server.http.response_output import Response, ResponseEvent
from jaxserve.server.http.response_route import create_response
from jaxserve.server.http.service import Service

Handler = Callable[[Service, HttpExchange], Awaitable[None]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

    path: str
    handler: Handler
    method: Literal["GET", "POST"] = "GET"
    summary: str
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | str
    """A JSON body, or the media type of another one."""
    streams: type[msgspec.Struct] | None = None
    """The type of the events, where `stream` is true."""
    statuses: tuple[int, ...] = ()
    """Statuses of errors, in addition to those of every route."""
    errors: ErrorForm = "openai"
    """Whose form errors have."""
    public: bool = False
    """Whether it is served without an API key."""
    counted: bool = True
    """Whether it counts as an active request: limited in number, and waited for when draining."""


GENERATION = (400, 404, 408, 413, 415, 429, 499, 503, 504)
INFORMATION = (503,)

METRICS = Endpoint(
    path="/metrics",
    handler=operations.metrics,
    summary="Prometheus metrics",
    gives="text/plain",
    statuses=INFORMATION,
    counted=False,
)

PROBES = (
    Endpoint(
        path="/ping",
        handler=information.health,
        summary="The same as /health",
        gives=responses.Status,
        statuses=INFORMATION,
        public=True,
        counted=False,
    ),
    Endpoint(
        path="/health",
        handler=information.health,
        summary="Whether the process lives",
        gives=responses.Status,
        statuses=INFORMATION,
        public=True,
        counted=False,
    ),
    Endpoint(
        path="/ready",
        handler=information.ready,
        summary="Whether requests are taken",
        gives=responses.Status,
        statuses=INFORMATION,
        public=True,
        counted=False,
    ),
)
"""Health probes, of every process; the only endpoints of those that follow."""

ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        method="POST",
        handler=chat_completions,
        summary="Answer a conversation",
        takes=requests.ChatRequest,
        gives=responses.Chat,
        streams=responses.ChatChunk,
        statuses=(409, *GENERATION),
    ),
    Endpoint(
        path="/v1/completions",
        method="POST",
        handler=completions,
        summary="Complete prompts",
        takes=requests.CompletionRequest,
        gives=responses.Completion,
        streams=responses.Completion,
        statuses=(409, *GENERATION),
    ),
    Endpoint(
        path="/v1/responses",
        method="POST",
        handler=create_response,
        summary="Answer a conversation, item by item; nothing is kept",
        takes=ResponseRequest,
        gives=Response,
        streams=ResponseEvent,
        statuses=(409, *GENERATION),
    ),
    Endpoint(
        path="/v1/messages",
        method="POST",
        handler=create_message,
        summary="Answer a conversation, in Anthropic's API",
        takes=MessagesRequest,
        gives=Message,
        streams=MessageEvent,
        statuses=(409, *GENERATION),
        errors="anthropic",
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        method="POST",
        handler=count_tokens,
        summary="How many tokens a conversation has, in Anthropic's API",
        takes=CountTokensRequest,
        gives=TokenCount,
        statuses=GENERATION,
        errors="anthropic",
    ),
    Endpoint(
        path="/v1/models",
        handler=information.models,
        summary="The models that are served",
        gives=responses.ModelList,
        statuses=INFORMATION,
        counted=False,
    ),
    Endpoint(
        path="/v1/models/{model}",
        handler=information.model,
        summary="A model that is served",
        gives=responses.Model,
        statuses=(404, *INFORMATION),
        counted=False,
    ),
    Endpoint(
        path="/tokenizer_info",
        handler=information.tokenizer_info,
        summary="The tokenizer and the chat template",
        gives=responses.TokenizerInfo,
        statuses=INFORMATION,
        counted=False,
    ),
    Endpoint(
        path="/load",
        handler=information.load,
        summary="How many requests are being served",
        gives=responses.ServerLoad,
        counted=False,
    ),
    Endpoint(
        path="/tokenize",
        method="POST",
        handler=tokens.tokenize,
        summary="Text or a conversation to token ids",
        takes=requests.TokenizeRequest,
        gives=responses.Tokens,
        statuses=GENERATION,
    ),
    Endpoint(
        path="/detokenize",
        method="POST",
        handler=tokens.detokenize,
        summary="Token ids to text",
        takes=requests.DetokenizeRequest,
        gives=responses.Text,
        statuses=GENERATION,
    ),
    *PROBES,
    METRICS,
    Endpoint(
        path="/pipeline",
        handler=live.pipeline,
        summary="What runs, and what the steps measured last looked like",
        gives=live.Pipeline,
        statuses=INFORMATION,
        counted=False,
    ),
    Endpoint(
        path="/",
        handler=live.page,
        summary="A page to try the model and to watch the pipeline",
        gives="text/html",
        public=True,
        counted=False,
    ),
    Endpoint(
        path="/version",
        handler=information.version,
        summary="The version of jaxserve",
        gives=responses.Version,
        counted=False,
    ),
)
"""Endpoints of the public port."""

ADMIN_ENDPOINTS = (
    METRICS,
    Endpoint(
        path="/state",
        handler=operations.state,
        summary="What runs, and how much",
        gives=operations.State,
        statuses=(403, *INFORMATION),
        counted=False,
    ),
    Endpoint(
        path="/abort",
        method="POST",
        handler=operations.abort,
        summary="End a request",
        takes=operations.Abort,
        gives=responses.Status,
        statuses=(403, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/experts/rebalance",
        method="POST",
        handler=operations.rebalance,
        summary="Move experts to where there is less to do, or say what that would bring",
        takes=operations.Rebalance,
        gives=Proposal,
        statuses=(403, 409, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/reset_prefix_cache",
        method="POST",
        handler=operations.reset_prefix_cache,
        summary="Forget the KV pages of earlier prompts",
        gives=operations.PrefixCacheReset,
        statuses=(403, 415, 404, *INFORMATION),
        counted=False,
    ),
    Endpoint(
        path="/roles",
        handler=role_operations.roles,
        summary="The workers of a fleet",
        gives=role_operations.Roles,
        statuses=(403, 404, *INFORMATION),
        counted=False,
    ),
    Endpoint(
        path="/roles/drain",
        method="POST",
        handler=role_operations.drain_worker,
        summary="Have a worker of a fleet take nothing new",
        takes=role_operations.DrainWorker,
        gives=WorkerStatus,
        statuses=(403, 409, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/roles/resume",
        method="POST",
        handler=role_operations.resume_worker,
        summary="Have it take requests again",
        takes=role_operations.ResumeWorker,
        gives=WorkerStatus,
        statuses=(403, 409, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/roles/add",
        method="POST",
        handler=role_operations.add_worker,
        summary="Look for a worker at one more address",
        takes=role_operations.AddWorker,
        gives=WorkerStatus,
        statuses=(403, 409, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/roles/remove",
        method="POST",
        handler=role_operations.remove_worker,
        summary="Look for none there any more",
        takes=role_operations.RemoveWorker,
        gives=WorkerStatus,
        statuses=(403, 409, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/log_level",
        method="POST",
        handler=operations.log_level,
        summary="Log more or less",
        takes=operations.LogLevel,
        gives=responses.Status,
        statuses=(403, *GENERATION),
        counted=False,
    ),
    Endpoint(
        path="/drain",
        method="POST",
        handler=operations.drain,
        summary="Finish what runs and end the process",
        gives=responses.Status,
        statuses=(403, 415, *INFORMATION),
        counted=False,
    ),
)
"""Endpoints of the admin port."""
