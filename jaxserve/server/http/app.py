"""The ASGI application: access control, routing, error responses and the access log.

Called by uvicorn, made by `server.py`. The handlers know nothing of keys, logs or error statuses;
the application knows no field of any request.
"""

import logging
import re
import time
from collections.abc import Sequence

import h11
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from jaxserve.errors import EngineFailedError
from jaxserve.server.access import Access
from jaxserve.server.front_end import SlowReaderError
from jaxserve.server.http.document import PAGE_POLICY, document, document_page
from jaxserve.server.http.errors import HttpError, http_error
from jaxserve.server.http.exchange import ClientGone, HttpExchange
from jaxserve.server.http.operations import check_caller
from jaxserve.server.http.responses import Error
from jaxserve.server.http.routes import Endpoint
from jaxserve.server.http.service import Service

OUT_OF_SCOPE = re.compile(
    r"/(v\d/)?(assistants|audio|batches|classify|conversations|embeddings|files|fine_tuning|images|"
    r"moderations|pooling|realtime|rerank|score|threads|uploads|vector_stores|videos)(/.*)?"
)
"""Paths of OpenAI's, Cohere's and vLLM's APIs that do something else than generate text."""

CLIENT_GONE = 499
"""Logged as the status where the client had disconnected."""

MAX_LOGGED = 500
"""Characters of one value in a log line."""

logger = logging.getLogger("jaxserve.http")


class App:
    """Serves a table of endpoints.

    Args:
      service: behind the handlers.
      endpoints: which to serve.
      access: what clients have to show.
    """

    def __init__(self, service: Service, endpoints: Sequence[Endpoint], access: Access):
        self._service = service
        self._access = access
        self._document = document(endpoints, keys=access.keys is not None)
        routes = [
            Route(endpoint.path, _Target(self, endpoint), methods=[endpoint.method])
            for endpoint in endpoints
        ]
        self._page = document_page(self._document)
        for described in self._descriptions():
            routes.append(Route(described.path, _Target(self, described), methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send)
        exchange.left_out = self._service.left_out
        scope["app"], scope["exchange"] = self, exchange
        try:
            try:
                exchange.check_headers()
                await self._router(scope, receive, send)
            except (ClientGone, SlowReaderError):
                exchange.hang_up()
                exchange.status = CLIENT_GONE
            except Exception as error:
                await self._fail(exchange, error)
        except ClientGone:
            exchange.hang_up()
        except h11.LocalProtocolError:  # the body was not HTTP, and uvicorn has said so
            exchange.status = 400
            await exchange.gone()
        finally:
            self._log(exchange)
            self._count(exchange)

    async def serve(self, endpoint: Endpoint, exchange: HttpExchange) -> None:
        """Checks the key and the load, and calls the endpoint's handler."""
        exchange.error_form = endpoint.errors
        authorization = exchange.headers.get("authorization")
        if authorization is None and (key := exchange.headers.get("x-api-key")) is not None:
            authorization = f"Bearer {key}"  # as Anthropic's clients send it
        tenant = self._access.tenant(authorization)
        if tenant is None and not endpoint.public:
            raise HttpError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        exchange.tenant = tenant or ""
        if endpoint.local:
            check_caller(exchange)
        if not endpoint.counted:
            await endpoint.handler(self._service, exchange)
            return
        with self._service.active():
            await endpoint.handler(self._service, exchange)

    async def _fail(self, exchange: HttpExchange, error: Exception) -> None:
        """Sends an error; in a stream that has begun, as its last event."""
        answer = http_error(error, exchange.request_id)
        if answer.status == 500:
            logger.exception("request %s failed", exchange.request_id)
        exchange.reason = answer.code or str(answer.status)
        failed = isinstance(error, EngineFailedError)
        exchange.log["error"] = str(error) if failed else answer.message
        body = answer.body(exchange.error_form, exchange.request_id)
        if exchange.status:
            await exchange.event(body, "error" if exchange.error_form == "anthropic" else "")
            await exchange.end_events()
        else:
            await exchange.reply(body, status=answer.status, headers=answer.headers)

    def _log(self, exchange: HttpExchange) -> None:
        scope = exchange.scope
        quiet = getattr(scope.get("endpoint"), "endpoint", None)
        level = logging.DEBUG if quiet is not None and not quiet.counted else logging.INFO
        if not logger.isEnabledFor(level):
            return
        seconds = time.monotonic() - exchange.arrival
        fields = {
            "request_id": exchange.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": exchange.status,
            "seconds": round(seconds, 4),
            "tenant": exchange.tenant,
            **exchange.log,
        }
        shown = " ".join(f"{key}={_line(value)}" for key, value in fields.items() if value != "")
        logger.log(level, "%s", shown, extra={"fields": fields})

    def _count(self, exchange: HttpExchange) -> None:
        """Counts the response; by the route, as paths are without number."""
        if (metrics := self._service.metrics) is not None:
            target = getattr(exchange.scope.get("endpoint"), "endpoint", None)
            path = "" if target is None else target.path
            metrics.response(path, exchange.status, exchange.reason)

    def _descriptions(self) -> list[Endpoint]:
        """Returns the endpoints that describe the others."""

        async def openapi(service: Service, exchange: HttpExchange) -> None:
            await exchange.reply(self._document)

        async def docs(service: Service, exchange: HttpExchange) -> None:
            headers = {"Content-Security-Policy": PAGE_POLICY}
            await exchange.reply(self._page, media_type="text/html; charset=utf-8", headers=headers)

        described = {"/openapi.json": openapi, "/docs": docs}
        return [
            Endpoint(path=path, handler=handler, gives=Error) for path, handler in described.items()
        ]


class _Target:
    """An endpoint as an ASGI application, for the router."""

    def __init__(self, app: App, endpoint: Endpoint):
        self._app = app
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.serve(self.endpoint, scope["exchange"])


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    reason = f"{path[:256]!r} is not served here"
    if OUT_OF_SCOPE.fullmatch(path):
        reason += ": jaxserve generates text, by completions, chat, responses and messages"
    raise HttpError(404, reason, code="unknown_path")


def _line(value: object) -> str:
    """A value on one line: it must not forge log lines."""
    text = str(value)[:MAX_LOGGED]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
