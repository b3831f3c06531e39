"""The gRPC server: `jaxserve.v1.Inference`, health and reflection, on a thread of its own.

Made by `faces.py`, and by `serve.py` in processes that follow, where it only answers health. The
RPCs are in `inference.py`.
"""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.server.access import Access, check_bind
from jaxserve.server.front_end import MAX_PENDING_TOKENS, FrontEnd
from jaxserve.server.inference import InferenceService
from jaxserve.server.interceptors import KeyInterceptor, MessageInterceptor, Refusals
from jaxserve.server.loop_thread import LoopThread
from jaxserve.server.metrics import Metrics
from jaxserve.server.rpc import SERVICE, inference_handlers
from jaxserve.server.stream import MESSAGES_A_SECOND
from jaxserve.server.tracing import Tracing
from jaxserve.text.generator import TextGenerator
from jaxserve.text.output import StepLoop

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

MAX_CONCURRENT_RPCS = 4096
MAX_REQUEST_BYTES = 4 * 2**20
LAST_WORDS_SECONDS = 0.5
"""How long sending the last statuses may take."""

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", 16 * 2**10),
    # By default RPCs are cancelled at random where 1,000 come faster than they are taken up.
    ("grpc.server.max_pending_requests", MAX_CONCURRENT_RPCS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CONCURRENT_RPCS),
    # Clients may ping idle connections; this server pings too, to notice peers that vanished.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class GrpcServer(LoopThread):
    """The server on its thread. `start`, `open`, `refuse`, `stop`, each once and in this order.

    Between `start` and `open` health says NOT_SERVING, and requests get UNAVAILABLE.

    Args:
      settings: the deployment's, of which it takes the address.
      access: what clients have to show.
      insecure_bind: whether to bind to a public address without keys, see `check_bind`.
      max_pending_tokens: tokens that may wait for a slow reader.
      share_port: whether other processes listen on the same port.
      messages_a_second: of the streams beyond the first few, see `stream.py`.
    """

    def __init__(
        self,
        settings: Server,
        *,
        access: Access | None = None,
        insecure_bind: bool = False,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        share_port: bool = False,
        messages_a_second: float = MESSAGES_A_SECOND,
    ):
        super().__init__("gRPC")
        self._access = access or Access()
        check_bind(host := settings.host, insecure_bind, self._access)
        self._host = f"[{host}]" if ":" in host else host
        self._port = settings.grpc_port
        self._max_pending_tokens = max_pending_tokens
        self._share_port = share_port
        self._messages_a_second = messages_a_second
        self._refused = Refusals()

    def open(
        self,
        generator: TextGenerator,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Accepts requests from now on; health says SERVING until the engine fails or drains.

        Args:
          generator: generates the text.
          metrics: count what is refused.
          tracing: of requests; None: they are not traced.
        """
        if metrics is not None:
            self._refused.count = metrics.grpc_refusal
        self._call(self._open(generator, tracing))
        generator.engine.add_failure_callback(lambda _failure: self._post(self._health_off()))

    def watch(self, step_loop: StepLoop) -> None:
        """Reports SERVING from now on; another process takes the requests."""

        async def watched() -> None:
            self._front_end.watch(step_loop)
            await self._health.set("", SERVING)

        self._call(watched())

    def refuse(self) -> None:
        """Refuses new requests; health says NOT_SERVING. Running requests continue."""
        self._call(self._refuse())

    async def _main(self) -> None:
        self._stopped = asyncio.Event()
        self._front_end = FrontEnd(
            max_pending_tokens=self._max_pending_tokens, messages_a_second=self._messages_a_second
        )
        self._health = health.aio.HealthServicer()
        keys = [KeyInterceptor(self._access, self._refused)] if self._access.keys else []
        self._server = grpc.aio.server(
            interceptors=[MessageInterceptor(SERVICE), *keys],
            # Else a second server on the same port is an error, not a lottery.
            options=[("grpc.so_reuseport", int(self._share_port)), *OPTIONS],
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        service = InferenceService(self._front_end, self._refused)
        self._server.add_generic_rpc_handlers((inference_handlers(service),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        for name in ("", SERVICE):
            await self._health.set(name, NOT_SERVING)
        try:
            port = self._add_port(f"{self._host}:{self._port}")
        except RuntimeError:
            raise ConfigError(
                f"server.grpc_port: cannot listen on {self._host}:{self._port}; is it in use?"
            ) from None
        await self._catch_up()
        await self._server.start()
        self._started.set_result(f"{self._host}:{port}")
        await self._stopped.wait()

    def _add_port(self, address: str) -> int:
        tls = self._access.tls
        if tls is None:
            return self._server.add_insecure_port(address)
        client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
        credentials = grpc.ssl_server_credentials(
            [(tls.key.read_bytes(), tls.certificate.read_bytes())],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )
        return self._server.add_secure_port(address, credentials)

    async def _health_off(self) -> None:
        await self._health.enter_graceful_shutdown()

    async def _open(self, generator: TextGenerator, tracing: Tracing | None) -> None:
        self._front_end.open(generator, tracing)
        if generator.engine.status == "ready":
            for name in ("", SERVICE):
                await self._health.set(name, SERVING)

    async def _refuse(self) -> None:
        self._front_end.draining = True
        await self._health_off()

    async def _stop(self, grace: float) -> None:
        await self._refuse()
        await self._front_end.drain(grace)
        await self._server.stop(LAST_WORDS_SECONDS)
        self._front_end.close()
        self._stopped.set()
