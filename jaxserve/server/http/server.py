"""The HTTP server on a thread and event loop of its own: start, open, refuse, stop.

It has the same methods as `GrpcServer`. Made by `faces.py` and `serve.py`; the application is in
`app.py`.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.config.sections import Server
from jaxserve.server.access import Access, check_bind
from jaxserve.server.front_end import MAX_PENDING_TOKENS, LiveRequests
from jaxserve.server.http.app import App
from jaxserve.server.http.exchange import JSON, MAX_HEADER_BYTES, headers_too_large
from jaxserve.server.http.routes import ENDPOINTS, Endpoint
from jaxserve.server.http.service import Service
from jaxserve.server.listener import bind, bind_unix, remove_unix
from jaxserve.server.loop_thread import LoopThread
from jaxserve.server.metrics import Metrics
from jaxserve.server.stream import MESSAGES_A_SECOND
from jaxserve.server.tracing import Tracing
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.generator import TextGenerator
from jaxserve.text.output import StepLoop

CORS_SECONDS = 600
"""How long a browser may remember that it may call."""
MAX_CONNECTIONS = 8192
BACKLOG = 2048
HEADER_SECONDS = 15.0
"""How long a connection may take to send a request's headers, or be idle before the first."""
KEEP_ALIVE_SECONDS = 75
REST_SECONDS = 10.0
REST_BYTES = 64 * 2**20
"""Longest time, and most bytes, that the rest of a body may take after its answer."""
LAST_WORDS_SECONDS = 0.5
"""How long sending the last responses may take."""
LAST_WORDS_LOOKS = 50


class HttpServer(LoopThread):
    """The server on its thread. `start`, `open`, `refuse`, `stop`, each once and in this order.

    Between `start` and `open` /health says "starting", and requests get 503.

    Args:
      settings: the deployment's; it listens on `http_port`, or on `http_socket`.
      access: what clients have to show.
      insecure_bind: whether to bind to a public address without keys, see `check_bind`.
      endpoints: which routes to serve.
      key: the key of the deployment that sets the port, for errors.
      share_port: whether other processes listen on the same port.
      max_pending_tokens: tokens that may wait for a slow reader.
      messages_a_second: of the streams beyond the first few, see `stream.py`.
    """

    def __init__(
        self,
        settings: Server,
        *,
        access: Access | None = None,
        insecure_bind: bool = False,
        endpoints: Sequence[Endpoint] = ENDPOINTS,
        key: str = "server.http_port",
        share_port: bool = False,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        messages_a_second: float = MESSAGES_A_SECOND,
    ):
        super().__init__("HTTP")
        self._access = access or Access()
        if not settings.http_socket:
            check_bind(settings.host, insecure_bind, self._access)
        self._settings, self._endpoints = settings, endpoints
        self._key, self._share_port = key, share_port
        self._pace = max_pending_tokens, messages_a_second

    def open(
        self,
        generator: TextGenerator,
        template: ChatTemplate | None = None,
        *,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Accepts requests from now on; chats only with a template."""

        async def opened() -> None:
            self._service.template = template
            self._service.metrics = metrics
            self._service.open(generator, tracing)

        self._call(opened())

    def operate(
        self, requests: LiveRequests, metrics: Metrics, on_drain: Callable[[], None]
    ) -> None:
        """Accepts operators' requests from now on; for the endpoints of the admin port. `on_drain`
        starts draining the process, and is called on the server's thread."""

        async def operated() -> None:
            self._service.requests = requests
            self._service.metrics = metrics
            self._service.on_drain = on_drain

        self._call(operated())

    def watch(self, step_loop: StepLoop, metrics: Metrics | None = None) -> None:
        """Answers probes about a step loop from now on, that of the engine or of a process without
        one; for endpoints that need no generator."""

        async def watched() -> None:
            self._service.watch(step_loop)
            self._service.metrics = metrics

        self._call(watched())

    def refuse(self) -> None:
        """Refuses new requests; /ready says 503. Running requests continue."""

        async def refused() -> None:
            self._service.draining = True

        self._call(refused())

    async def _main(self) -> None:
        settings, path = self._settings, self._settings.http_socket
        if path:
            listener = bind_unix(path, "server.http_socket")
        else:
            listener = bind(
                settings.host, settings.http_port, self._key, reuse_port=self._share_port
            )
        listener.setblocking(False)
        self._service = Service(settings, *self._pace, stores=not self._share_port)
        config = uvicorn.Config(
            self._application(),
            http=_Connection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        config.load()
        if self._access.tls is not None:
            config.ssl = self._access.tls.context()
        self._server = _Uvicorn(config)
        self._server.force_exit = True  # the waiting is done in `_stop`
        address = self._shown(listener)
        self._server.on_start = lambda: self._started.set_result(address)
        await self._catch_up()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self._service.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            if path:
                remove_unix(path)

    def _application(self) -> ASGIApp:
        """The application, and around it what answers browsers from other origins."""
        app: ASGIApp = App(self._service, self._endpoints, self._access)
        if not self._settings.cors_origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self._settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=CORS_SECONDS,
        )

    def _shown(self, listener: socket.socket) -> str:
        """Where it listens, as it is told."""
        if self._settings.http_socket:
            return f"unix:{self._settings.http_socket}"
        host = self._settings.host
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{listener.getsockname()[1]}"

    async def _stop(self, grace: float) -> None:
        await self._service.drain(grace)
        for _ in range(LAST_WORDS_LOOKS):
            if not self._unsent():
                break
            await asyncio.sleep(LAST_WORDS_SECONDS / LAST_WORDS_LOOKS)
        self._server.should_exit = True

    def _unsent(self) -> bool:
        """Whether any connection has unsent data."""
        return any(
            connection.transport.get_write_buffer_size()
            for connection in self._server.server_state.connections
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, with a callback when it listens."""

    on_start: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()


class _Connection(H11Protocol):
    """uvicorn's protocol with a deadline for headers, and accessible to the handlers."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self._headers_deadline: asyncio.TimerHandle | None = None
        self._rest_deadline: asyncio.TimerHandle | None = None
        self._rest = 0  # bytes of a body that came after its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no request: 400, or 431 where the headers are too large."""
        received = self.conn.trailing_data[0]
        if self.conn.our_state is not h11.IDLE or len(received) <= MAX_HEADER_BYTES:
            super().send_400_response(msg)
            return
        body = headers_too_large(f"more than {MAX_HEADER_BYTES} bytes").body()
        headers = [("Content-Type", JSON), ("Content-Length", str(len(body)))]
        start = h11.Response(status_code=431, headers=[*headers, ("Connection", "close")])
        events = (start, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._rest_deadline is not None:
            self._rest += len(data)
            if self.conn.their_state is not h11.SEND_BODY:
                self._stop_watching_rest()
            elif self._rest > REST_BYTES:
                self.transport.abort()
        self._watch_headers()

    def send_part(self, body: bytes) -> bool:
        """Sends a part of a chunked answer past h11, whose checks take longer than the writing.
        Returns False, having sent nothing, unless the connection is sending such an answer and may
        be written to now. Not for HEAD.
        """
        cycle, conn = self.cycle, self.conn
        if cycle is None or cycle.disconnected or self.flow.write_paused:
            return False
        if conn.our_state is not h11.SEND_BODY or conn.their_http_version != b"1.1":
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def on_response_complete(self) -> None:
        """Bounds what a client may go on sending of a body that is answered already."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._stop_watching_rest()
            self._rest_deadline = self.loop.call_later(REST_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        self._stop_watching_rest()

    def _watch_headers(self) -> None:
        """Sets the deadline while a request's headers are incomplete, and lifts it after that."""
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._stop_watching()
        elif self._headers_deadline is None:
            self._headers_deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._headers_deadline is not None:
            self._headers_deadline.cancel()
            self._headers_deadline = None

    def _stop_watching_rest(self) -> None:
        self._rest = 0
        if self._rest_deadline is not None:
            self._rest_deadline.cancel()
            self._rest_deadline = None
