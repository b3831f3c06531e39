"""The table of routes: paths, handlers, types of requests and responses.

Both the router in `app.py` and the OpenAPI document of `document.py` are made from it, so they
cannot disagree.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from jaxserve.fleet.rolling import WorkerStatus
from jaxserve.roles.worker import Proposal
from jaxserve.server.http import information, live, operations, requests, responses
from jaxserve.server.http.chat import chat_completions
from jaxserve.server.http.completions import completions
from jaxserve.server.http.errors import ErrorForm
from jaxserve.server.http.event_routes import (
    cancel_response,
    count_tokens,
    create_message,
    create_response,
    delete_response,
    get_response,
)
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.message_input import CountTokensRequest, MessagesRequest
from jaxserve.server.http.message_output import Message, MessageEvent, TokenCount
from jaxserve.server.http.response_input import ResponseRequest
from jaxserve.server.http.response_output import DeletedResponse, Response, ResponseEvent
from jaxserve.server.http.service import Service

Handler = Callable[[Service, HttpExchange], Awaitable[None]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

    path: str
    handler: Handler
    method: Literal["GET", "POST", "DELETE"] = "GET"
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | str
    """A JSON body, or the media type of another one."""
    streams: type[msgspec.Struct] | None = None
    """The type of the events, where `stream` is true."""
    statuses: tuple[int, ...] = ()
    """Statuses of errors, in addition to those of every route."""
    errors: ErrorForm = "openai"
    """The API whose form errors have."""
    public: bool = False
    """True: served without an API key."""
    counted: bool = False
    """True: counts as an active request, limited in number and waited for when draining."""
    local: bool = False
    """True: for operators on this machine, see `operations.check_caller`."""

    @property
    def summary(self) -> str:
        """First line of the handler's docstring, for the OpenAPI document."""
        return (self.handler.__doc__ or "").partition("\n")[0].removesuffix(".")


GENERATION = (400, 404, 408, 413, 415, 429, 499, 503, 504)
KEYED = (409, *GENERATION)
"""Statuses of requests that may carry an idempotency key."""
INFORMATION = (503,)
Body = type[msgspec.Struct]


def _read(
    path: str,
    handler: Handler,
    gives: Body | str,
    statuses: tuple[int, ...] = INFORMATION,
    public: bool = False,
) -> Endpoint:
    """Returns a GET; one that gives 403 is for operators."""
    local = 403 in statuses
    return Endpoint(
        path=path, handler=handler, gives=gives, statuses=statuses, public=public, local=local
    )


def _ask(
    path: str,
    handler: Handler,
    takes: Body,
    gives: Body,
    streams: Body | None = None,
    errors: ErrorForm = "openai",
) -> Endpoint:
    """Returns a POST of clients; one that can stream may carry an idempotency key."""
    return Endpoint(
        path=path,
        method="POST",
        handler=handler,
        takes=takes,
        gives=gives,
        streams=streams,
        statuses=GENERATION if streams is None else KEYED,
        errors=errors,
        counted=True,
    )


def _change(
    path: str,
    handler: Handler,
    takes: Body | None,
    gives: Body,
    statuses: tuple[int, ...] = GENERATION,
) -> Endpoint:
    """Returns a POST of operators."""
    return Endpoint(
        path=path,
        method="POST",
        handler=handler,
        takes=takes,
        gives=gives,
        statuses=(403, *statuses),
        local=True,
    )


METRICS = _read("/metrics", operations.metrics, "text/plain")

PROBES = (
    _read("/ping", information.health, responses.Status, public=True),
    _read("/health", information.health, responses.Status, public=True),
    _read("/ready", information.ready, responses.Status, public=True),
)
"""Health probes, of every process; the only endpoints of those that follow."""

ENDPOINTS = (
    _ask(
        "/v1/chat/completions",
        chat_completions,
        requests.ChatRequest,
        responses.Chat,
        responses.ChatChunk,
    ),
    _ask(
        "/v1/completions",
        completions,
        requests.CompletionRequest,
        responses.Completion,
        responses.Completion,
    ),
    _ask("/v1/responses", create_response, ResponseRequest, Response, ResponseEvent),
    _read("/v1/responses/{response}", get_response, Response, (404, *INFORMATION)),
    Endpoint(
        path="/v1/responses/{response}",
        method="DELETE",
        handler=delete_response,
        gives=DeletedResponse,
        statuses=(404, *INFORMATION),
    ),
    Endpoint(
        path="/v1/responses/{response}/cancel",
        method="POST",
        handler=cancel_response,
        gives=Response,
        statuses=(400, 404, *INFORMATION),
    ),
    _ask("/v1/messages", create_message, MessagesRequest, Message, MessageEvent, "anthropic"),
    _ask(
        "/v1/messages/count_tokens",
        count_tokens,
        CountTokensRequest,
        TokenCount,
        errors="anthropic",
    ),
    _read("/v1/models", information.models, responses.ModelList),
    _read("/v1/models/{model}", information.model, responses.Model, (404, *INFORMATION)),
    _read("/tokenizer_info", information.tokenizer_info, responses.TokenizerInfo),
    _read("/load", information.load, responses.ServerLoad, ()),
    _ask("/tokenize", information.tokenize, requests.TokenizeRequest, responses.Tokens),
    _ask(
        "/detokenize", information.detokenize, requests.DetokenizeRequest, responses.DetokenizedText
    ),
    *PROBES,
    METRICS,
    _read("/pipeline", live.pipeline, live.Pipeline),
    _read("/", live.page, "text/html", (), public=True),
    _read("/version", information.version, responses.Version, ()),
)
"""Endpoints of the public port."""

ADMIN_ENDPOINTS = (
    METRICS,
    _read("/state", operations.state, operations.State, (403, *INFORMATION)),
    _change("/abort", operations.abort, operations.Abort, responses.Status),
    _change("/experts/rebalance", operations.rebalance, operations.Rebalance, Proposal, KEYED),
    _change(
        "/reset_prefix_cache",
        operations.reset_prefix_cache,
        None,
        operations.PrefixCacheReset,
        (415, 404, *INFORMATION),
    ),
    _read("/roles", operations.roles, operations.Roles, (403, 404, *INFORMATION)),
    *(
        _change(path, handler, takes, WorkerStatus, KEYED)
        for path, handler, takes in (
            ("/roles/drain", operations.drain_worker, operations.DrainWorker),
            ("/roles/resume", operations.resume_worker, operations.ResumeWorker),
            ("/roles/add", operations.add_worker, operations.AddWorker),
            ("/roles/remove", operations.remove_worker, operations.RemoveWorker),
        )
    ),
    _change(
        "/roles/domains", operations.want_domains, operations.WantDomains, operations.Roles, KEYED
    ),
    _change("/profile", operations.profile, operations.Profile, operations.Profiled, KEYED),
    _change("/log_level", operations.log_level, operations.LogLevel, responses.Status),
    _change("/drain", operations.drain, None, responses.Status, (415, *INFORMATION)),
)
"""Endpoints of the admin port."""
