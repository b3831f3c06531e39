"""The network faces of a deployment as one thing: start, open, refuse, stop, in this order.

`LocalFaces` are the gRPC and the HTTP server in this process, with the text generator they share.
`face_processes.py` has the same life with the servers in processes of their own (`face.py`).
Called by `choice.py` and by those processes; knows nothing of devices.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxserve.config.sections import Server
from jaxserve.errors import CheckpointError
from jaxserve.server.access import Access
from jaxserve.server.front_end import LiveRequests
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.server import HttpServer
from jaxserve.server.metrics import Metrics
from jaxserve.server.shedding import shedding
from jaxserve.server.stream import MESSAGES_A_SECOND
from jaxserve.server.tracing import Tracing
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.generator import Observer, TextGenerator
from jaxserve.text.output import TokenEngine
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Port(Protocol):
    """Where requests come in: the network faces, or a worker's port for routers."""

    def start(self) -> dict[str, str]:
        """Binds the ports; requests are answered as not ready.

        Returns:
          protocol → "host:port".

        Raises:
          ConfigError: an address cannot be bound.
        """

    def open(self, engine: Any) -> None:
        """Accepts requests for a `TokenEngine` from now on."""

    def refuse(self) -> None:
        """Refuses new requests; running ones continue."""

    def stop(self, grace: float) -> None:
        """Ends running requests, waits up to `grace` seconds for responses, closes connections."""


class Faces(Port, Protocol):
    """The network faces, with their requests and metrics for operators.

    Attributes:
      requests: Requests that run; from `open` on.
      metrics: Metrics of the faces; from `open` on.
    """

    requests: LiveRequests
    metrics: Metrics


class LocalFaces:
    """The servers of a deployment on threads of this process.

    Args:
      model: folder of the tokenizer and the chat template.
      server: addresses, keys and certificates.
      insecure_bind: whether to bind to a public address without keys.
      share_ports: whether other processes listen on the same ports.
      messages_a_second: of the streams beyond the first few, see `stream.py`.

    Raises:
      ConfigError: a public address without protection, or an invalid file of keys or certificates,
        or traces are wanted without OpenTelemetry's SDK.
      CheckpointError: there is no usable tokenizer.
    """

    requests: LiveRequests
    metrics: Metrics

    def __init__(
        self,
        model: str,
        server: Server,
        insecure_bind: bool,
        *,
        share_ports: bool = False,
        messages_a_second: float = MESSAGES_A_SECOND,
    ):
        self._wait_seconds = server.wait_seconds
        self._tracing = Tracing(server.traces, "front") if server.traces else None
        self._tokenizer = Tokenizer.from_folder(model)
        self._template = _chat_template(model) if self._tokenizer.knows_text else None
        if not self._tokenizer.knows_text:
            logger.warning("%s: no tokenizer: prompts are token ids, and there are no chats", model)
        self._generator: TextGenerator | None = None
        options: dict[str, Any] = {
            "access": Access.from_config(server),
            "insecure_bind": insecure_bind,
            "share_port": share_ports,
            "messages_a_second": messages_a_second,
        }
        self._grpc = GrpcServer(server, **options)
        self._http: HttpServer | None = None
        if server.http_port >= 0 or server.http_socket:
            self._http = HttpServer(server, **options)

    def start(self) -> dict[str, str]:
        """See `Faces.start`."""
        addresses = {"grpc": self._grpc.start()}
        if self._http is not None:
            addresses["http"] = self._http.start()
        return addresses

    def open(
        self,
        engine: TokenEngine,
        metrics_folder: Path | None = None,
        elsewhere: Callable[[str], bool] | None = None,
    ) -> None:
        """See `Faces.open`.

        Args:
          engine: where tokens come from.
          metrics_folder: shared with other processes, see `Metrics`.
          elsewhere: see `TextGenerator`.
        """
        engine = shedding(engine, self._wait_seconds)
        self.metrics = Metrics(str(engine.model_info()["model"]), metrics_folder)
        self.metrics.watch(engine)
        observe: Observer = self.metrics.started
        tracing = self._tracing
        if tracing is not None:
            observe = tracing.observing(observe, runs_here=not hasattr(engine, "rolling"))
        generator = TextGenerator(engine, self._tokenizer, observe, elsewhere)
        self.requests = self._generator = generator
        self._grpc.open(generator, self.metrics, tracing)
        if self._http is not None:
            self._http.open(generator, self._template, metrics=self.metrics, tracing=tracing)

    def refuse(self) -> None:
        """See `Faces.refuse`."""
        self._grpc.refuse()
        if self._http is not None:
            self._http.refuse()

    def stop(self, grace: float) -> None:
        """See `Faces.stop`; fine in any state."""
        if self._generator is not None:
            self.refuse()
            self._generator.close()
        self._grpc.stop(grace)
        if self._http is not None:
            self._http.stop(grace)
        if self._tracing is not None:
            self._tracing.close()


def _chat_template(model: str) -> ChatTemplate | None:
    """The model's template; without a readable one, chats are refused."""
    try:
        return ChatTemplate.from_folder(model)
    except CheckpointError as error:
        logger.warning("no chats will be served: %s", error)
        return None
