"""Which servers a process has, by its deployment: for clients, for operators, for probes.

Called by `jaxserve/commands/`. The servers are made here and started there.
"""

from jaxserve.config.deployment import Deployment
from jaxserve.server.access import Access
from jaxserve.server.faces import Faces, LocalFaces
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.routes import ADMIN_ENDPOINTS, PROBES
from jaxserve.server.http.server import HttpServer
from jaxserve.server.processes.host import FaceProcesses


def network_faces(deployment: Deployment, insecure_bind: bool, log_format: str) -> Faces:
    """Makes the faces for clients; raises as `LocalFaces`."""
    model, server = deployment.model, deployment.server
    if server.processes:
        return FaceProcesses(model, server, insecure_bind, log_format)
    return LocalFaces(model, server, insecure_bind)


def admin_face(deployment: Deployment) -> HttpServer | None:
    """Makes the face for operators; None if the deployment has none."""
    server = deployment.server
    if server.admin_port < 0:
        return None
    return HttpServer(
        "127.0.0.1",
        server.admin_port,
        access=Access(Access.from_config(server).keys),
        endpoints=ADMIN_ENDPOINTS,
        name="server.admin_port",
    )


def probe_faces(deployment: Deployment, insecure_bind: bool) -> dict[str, GrpcServer | HttpServer]:
    """Makes the servers of a process without clients, by protocol; raises as `LocalFaces`."""
    server = deployment.server
    faces: dict[str, GrpcServer | HttpServer] = {}
    if max(server.follower_grpc_port, server.follower_http_port) < 0:
        return faces
    access = Access.from_config(server)
    if server.follower_grpc_port >= 0:
        faces["grpc"] = GrpcServer(
            server.host, server.follower_grpc_port, access=access, insecure_bind=insecure_bind
        )
    if server.follower_http_port >= 0:
        faces["http"] = HttpServer(
            server.host,
            server.follower_http_port,
            access=access,
            insecure_bind=insecure_bind,
            endpoints=PROBES,
            name="server.follower_http_port",
        )
    return faces
