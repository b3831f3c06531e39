"""The HTTP server on a thread and event loop of its own: bind, open, refuse, stop.

The same life as `GrpcServer`, so that `serve.py` treats both alike. Called by `serve.py`; the
application is in `app.py`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.errors import ConfigError
from jaxserve.server.access import Access, check_bind
from jaxserve.server.chat import ChatTemplate
from jaxserve.server.generation import TextGenerator
from jaxserve.server.http.app import App
from jaxserve.server.http.routes import ENDPOINTS, Endpoint
from jaxserve.server.http.service import MAX_PENDING_TOKENS, Service
from jaxserve.server.loop_thread import LoopThread
from jaxserve.server.metrics import Metrics
from jaxserve.server.token_engine import StepLoop

MAX_HEADER_BYTES = 32 * 2**10
MAX_CONNECTIONS = 8192
BACKLOG = 2048
HEADER_SECONDS = 15.0
"""How long a connection may take for a request line and headers, or do nothing at all."""
KEEP_ALIVE_SECONDS = 75
LAST_WORDS_SECONDS = 0.5
"""How long answers may take to leave after the last request ended."""
LAST_WORDS_LOOKS = 50

logger = logging.getLogger(__name__)


class HttpServer(LoopThread):
    """The server on its thread. `start`, `open`, `refuse`, `stop`, each once and in this order.

    Between `start` and `open` /health says "starting", and requests get 503.

    Args:
      host: an address of this machine; see `check_bind`.
      port: 0 picks a free one.
      access: what clients have to show.
      insecure_bind: whether to serve strangers all the same.
      endpoints: which routes to serve.
      request_seconds: the longest that a request may run.
      max_pending_tokens: tokens that may wait for a slow reader.
      name: of the key that sets the port, for errors.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        access: Access | None = None,
        insecure_bind: bool = False,
        endpoints: Sequence[Endpoint] = ENDPOINTS,
        request_seconds: float = 3600.0,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        name: str = "server.http_port",
    ):
        super().__init__("HTTP")
        self._access = access or Access()
        check_bind(host, insecure_bind, self._access)
        self._host, self._port, self._key = host, port, name
        self._endpoints = endpoints
        self._request_seconds = request_seconds
        self._max_pending_tokens = max_pending_tokens

    def open(
        self,
        generator: TextGenerator,
        template: ChatTemplate | None = None,
        *,
        metrics: Metrics | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        """Takes requests from now on.

        Args:
          generator: behind the handlers.
          template: of chats; None: they are refused.
          metrics: what /metrics shows.
          on_drain: has the process end in good order; called on the server's thread.
        """

        async def opened() -> None:
            self._service.template = template
            self._service.metrics = metrics
            self._service.on_drain = on_drain
            self._service.generator, self._service.step_loop = generator, generator.engine

        self._call(opened())

    def watch(self, step_loop: StepLoop) -> None:
        """Answers probes about a step loop from now on; for endpoints that need no generator."""

        async def watched() -> None:
            self._service.step_loop = step_loop

        self._call(watched())

    def refuse(self) -> None:
        """Takes no new requests; /ready says 503. What runs goes on."""

        async def refused() -> None:
            self._service.draining = True

        self._call(refused())

    async def _main(self) -> None:
        listener = self._bind()
        self._service = Service(self._request_seconds, self._max_pending_tokens)
        config = uvicorn.Config(
            App(self._service, self._endpoints, self._access),
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
        port = listener.getsockname()[1]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._server.on_start = lambda: self._started.set_result(f"{shown}:{port}")
        try:
            await self._server.serve(sockets=[listener])
        finally:
            self._service.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

    def _bind(self) -> socket.socket:
        """A listening socket."""
        listener: socket.socket | None = None
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.bind(address)
            listener.setblocking(False)
            return listener
        except OSError as error:
            if listener is not None:
                listener.close()
            raise ConfigError(
                f"{self._key}: cannot listen on {self._host}:{self._port} "
                f"({error.strerror or error}); is it in use?"
            ) from None

    async def _stop(self, grace: float) -> None:
        self._service.draining = True
        if not await self._service.wait_until_idle(grace):
            logger.warning("requests were still running after %g s and are cut", grace)
        for _ in range(LAST_WORDS_LOOKS):
            if not self._unsent():
                break
            await asyncio.sleep(LAST_WORDS_SECONDS / LAST_WORDS_LOOKS)
        self._server.should_exit = True

    def _unsent(self) -> bool:
        """Whether answers wait in buffers."""
        return any(
            connection.transport.get_write_buffer_size()
            for connection in self._server.server_state.connections
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn's, which says when it listens."""

    on_start: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()


class _Connection(H11Protocol):
    """uvicorn's, with a deadline for headers, and known to the handlers of its requests."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self._headers_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch_headers(self) -> None:
        """Sets the deadline where a request has not come whole, lifts it where it has."""
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._stop_watching()
        elif self._headers_deadline is None:
            self._headers_deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._headers_deadline is not None:
            self._headers_deadline.cancel()
            self._headers_deadline = None
