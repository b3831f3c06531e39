"""Which servers a process has, by its deployment: for clients, for operators, for probes.

Called by `jaxserve/commands/`. The servers are made here and started there.
"""

import logging
import time
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import Server
from jaxserve.fleet.worker_port import WorkerPort
from jaxserve.server.access import Access
from jaxserve.server.face_processes import FaceProcesses
from jaxserve.server.faces import Faces, LocalFaces, Port
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.routes import ADMIN_ENDPOINTS, METRICS, PROBES
from jaxserve.server.http.server import HttpServer
from jaxserve.server.metrics import Metrics
from jaxserve.server.tracing import Tracing
from jaxserve.text.output import StepLoop

LAST_ANSWERS_SECONDS = 5.0


logger = logging.getLogger(__name__)


def network_faces(deployment: Deployment, insecure_bind: bool, log_format: str) -> Faces:
    """Makes the faces for clients; raises as `LocalFaces`."""
    if deployment.server.processes:
        return FaceProcesses(deployment, insecure_bind, log_format)
    return LocalFaces(deployment.model, deployment.server, insecure_bind)


def admin_face(deployment: Deployment) -> HttpServer | None:
    """Makes the face for operators; None if the deployment has none."""
    server = deployment.server
    if server.admin_port < 0:
        return None
    return HttpServer(
        Server(http_port=server.admin_port, unknown_fields="refuse"),
        access=Access(Access.from_config(server).keys),
        endpoints=ADMIN_ENDPOINTS,
        key="server.admin_port",
    )


def probe_faces(deployment: Deployment, insecure_bind: bool) -> dict[str, GrpcServer | HttpServer]:
    """Makes the servers of a process without clients, by protocol; raises as `LocalFaces`."""
    server = deployment.server
    faces: dict[str, GrpcServer | HttpServer] = {}
    if max(server.follower_grpc_port, server.follower_http_port) < 0:
        return faces
    access, http_port = Access.from_config(server), server.follower_http_port
    own = Server(host=server.host, grpc_port=server.follower_grpc_port, http_port=http_port)
    if own.grpc_port >= 0:
        faces["grpc"] = GrpcServer(own, access=access, insecure_bind=insecure_bind)
    if http_port >= 0:
        faces["http"] = HttpServer(
            own,
            access=access,
            insecure_bind=insecure_bind,
            endpoints=(*PROBES, METRICS),
            key="server.follower_http_port",
        )
    return faces


def worker_port(deployment: Deployment, role: str, address: str, *arguments: Any) -> WorkerPort:
    """Makes the port of a worker, which traces its requests if the deployment wants that.

    Raises:
      ConfigError: as `Tracing` and `WorkerPort`, which has the further arguments.
    """
    traces = deployment.server.traces
    tracing = Tracing(traces, role, address) if traces else None
    return WorkerPort(address, *arguments, tracing=tracing)


class Probes:
    """The servers of a process that serves no clients, where its deployment wants them.

    They answer health probes and `/metrics` on `server.follower_http_port`, and gRPC's health
    checks on `server.follower_grpc_port`. A context manager: started inside, stopped behind it.
    Arguments and errors as of `probe_faces`.
    """

    def __init__(self, deployment: Deployment, insecure_bind: bool):
        self._faces = probe_faces(deployment, insecure_bind)
        self._model = deployment.model

    def __enter__(self) -> "Probes":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Binds the ports."""
        for name, face in self._faces.items():
            logger.info("%s probes are answered on %s", name, face.start())

    def watch(self, step_loop: StepLoop) -> None:
        """Answers for an engine, or for another step loop, from now on."""
        for face in self._faces.values():
            if isinstance(face, GrpcServer):
                face.watch(step_loop)
            else:
                metrics = Metrics(self._model)
                metrics.watch_loop(step_loop)
                face.watch(step_loop, metrics)

    def stop(self) -> None:
        """Closes the ports, after some seconds for answers on their way."""
        for face in self._faces.values():
            face.stop(LAST_ANSWERS_SECONDS)


class ProbedPort:
    """The port of a worker, and beside it the servers that answer probes.

    Args:
      port: The worker's port for routers.
    """

    def __init__(self, port: Port, deployment: Deployment, insecure_bind: bool):
        self._port, self._probes = port, Probes(deployment, insecure_bind)

    def start(self) -> dict[str, str]:
        """See `Port`."""
        self._probes.start()
        return self._port.start()

    def open(self, engine: Any) -> None:
        """See `Port`."""
        self._port.open(engine)
        self._probes.watch(engine)

    def refuse(self) -> None:
        """See `Port`."""
        self._port.refuse()

    def stop(self, grace: float) -> None:
        """See `Port`."""
        self._port.stop(grace)
        self._probes.stop()


class ProbedLoop:
    """The loop of a process without an engine, behind servers that answer probes."""

    def __init__(self, deployment: Deployment, insecure_bind: bool):
        self.status = "starting"
        self.last_turn = time.monotonic()
        probes = Probes(deployment, insecure_bind)
        probes.start()
        probes.watch(self)

    def turn(self) -> None:
        """Called at each turn of the loop, once the process is ready."""
        self.status, self.last_turn = "ready", time.monotonic()
