"""Pods of every workload, as LeaderWorkerSet, JobSet and Deployment take them.

Called by `kubernetes.py`. Trees are the values of YAML documents, not text.
"""

from collections.abc import Sequence
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.launch.settings import (
    CACHE,
    KEYS,
    SECRET_FILES,
    SPARE_SECONDS,
    TLS,
    Options,
    Places,
    Rendering,
    deployment_text,
    files_of,
    to_yaml,
    trees,
)
from jaxserve.launch.workloads import (
    CONTROL_PORT,
    COORDINATOR_PORT,
    PORTS,
    WORKER_PORT,
    Workload,
    serve_arguments,
)

Tree = dict[str, Any]
Volume = tuple[str, str, bool, Tree]
"""Name, where it is mounted, whether it is only read, and what Kubernetes makes it of."""


def container_places(rendering: Rendering, **addresses: Any) -> Places:
    """Places in containers that share no disk with the host that renders."""
    deployment, options = rendering.deployment, rendering.options
    silent = any(work.processes > 1 or not work.faces for work in rendering.works)
    return Places(
        model=options.model,
        host="0.0.0.0",
        files=files_of(deployment, options),
        tls=TLS,
        follower_port=deployment.server.http_port if silent else -1,
        **addresses,
    )


def name_of(options: Options, work: Workload) -> str:
    """Name of a workload's objects."""
    return options.name if work.kind == "whole" else f"{options.name}-{work.kind}"


def labels(options: Options, work: Workload) -> dict[str, str]:
    """Labels of a workload's pods."""
    return {
        "app.kubernetes.io/name": "jaxserve",
        "app.kubernetes.io/instance": options.name,
        "app.kubernetes.io/component": work.kind,
    }


def arguments(deployment: Deployment, work: Workload, options: Options) -> list[str]:
    """Arguments of a container that all processes of a worker share."""
    which = [f"--listen=$(POD_IP):{work.port}"] if work.port else []
    if work.kind == "ffn":  # its number says which experts are its own (`ffn.instances`)
        which.append("--worker=$(WORKER)")
    made = serve_arguments(deployment, work, which)
    return made if files_of(deployment, options) else [*made, "--insecure-bind"]


def joining(leader: str, process: str, processes: str) -> list[str]:
    """The arguments by which the processes of a worker find each other.

    Args:
      leader: host name of process 0.
      process, processes: number of this process and how many there are, or variables.
    """
    return [
        f"--process-id={process}",
        f"--processes={processes}",
        f"--coordinator={leader}:{COORDINATOR_PORT}",
        f"--control={leader}:{CONTROL_PORT}",
        f"--control-bind=[::]:{CONTROL_PORT}",
    ]


def pod(
    deployment: Deployment,
    work: Workload,
    options: Options,
    given: list[str],
    *,
    leads: bool = True,
    environment: list[Tree] | None = None,
) -> Tree:
    """The template of a pod.

    Args:
      deployment: as the process reads it.
      given: arguments beside `arguments`.
      leads: whether it is process 0 (or any of a workload whose pods are all alike).
      environment: further variables.
    """
    annotations = {"gke-gcsfuse/volumes": "true"} if options.models_bucket else {}
    if work.hardware is not None:
        annotations |= options.annotations
    server = deployment.server
    ports = {"http": server.follower_http_port}
    if work.faces and leads:
        ports = {"http": server.http_port, "grpc": server.grpc_port}
    if work.port and (leads or work.kind == "ffn"):
        ports["worker"] = work.port
    (made,) = trees(
        "pod",
        work=work,
        leads=leads,
        options=options,
        server=server,
        labels=labels(options, work),
        annotations=annotations,
        arguments=[*arguments(deployment, work, options), *given],
        environment=environment or [],
        ports=ports,
        volumes=_volumes(deployment, work, options),
        cache=CACHE,
        spare_seconds=SPARE_SECONDS,
    )
    return made


def _volumes(deployment: Deployment, work: Workload, options: Options) -> list[Volume]:
    """The deployment, secrets, models, compiled programs, /tmp."""
    found: list[Volume] = [
        ("deployment", "/etc/jaxserve", True, {"configMap": {"name": options.name}}),
    ]
    files = files_of(deployment, options)
    if files:
        items = [{"key": SECRET_FILES[key], "path": SECRET_FILES[key]} for key in files]
        secret = {"secretName": options.name, "items": items}
        found.append(("secrets", KEYS, True, {"secret": secret}))
    if deployment.cluster.tls:
        found.append(("tls", TLS, True, {"secret": {"secretName": f"{options.name}-tls"}}))
    if options.models_bucket:
        bucket = {"bucketName": options.models_bucket, "mountOptions": "implicit-dirs"}
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True}
        found.append(("models", "/models", True, {"csi": driver | {"volumeAttributes": bucket}}))
    elif options.models_claim:
        claim = {"claimName": options.models_claim, "readOnly": True}
        found.append(("models", "/models", True, {"persistentVolumeClaim": claim}))
    cache: Tree = {"emptyDir": {}}
    if options.cache_claim:
        cache = {"persistentVolumeClaim": {"claimName": options.cache_claim}}
    if not options.cache_bucket:
        found.append(("cache", CACHE, False, cache))
    found += [("tmp", "/tmp", False, {"emptyDir": {}})]
    if work.hardware is not None and not work.tpu:  # NCCL's
        found.append(("shm", "/dev/shm", False, {"emptyDir": {"medium": "Memory"}}))
    return found


def yaml_of(options: Options, objects: Sequence[Tree]) -> str:
    """Returns objects as YAML, in the namespace of the options."""
    if options.namespace:
        for tree in objects:
            tree["metadata"] = {**tree["metadata"], "namespace": options.namespace}
    return to_yaml(*objects)


def config_map(deployment: Deployment, options: Options) -> Tree:
    """The deployment file."""
    (made,) = trees("config_map", name=options.name, deployment=deployment_text(deployment))
    return made


def client_service(deployment: Deployment, options: Options, selector: dict[str, str]) -> Tree:
    """The one Service of clients."""
    names = {"name": options.name, "selector": selector}
    (made,) = trees("client_service", **names, faces=_faces(deployment))
    return made


def _faces(deployment: Deployment) -> dict[str, int]:
    """Ports for clients, by their names."""
    server = deployment.server
    ports = {"http": server.http_port, "grpc": server.grpc_port}
    return {name: port for name, port in ports.items() if port > 0}


def network_policy(deployment: Deployment, options: Options, *, clients: bool = True) -> Tree:
    """Who may reach the pods: clients, or else the other cluster's pods."""
    (made,) = trees(
        "network_policy",
        name=options.name,
        clients=clients,
        faces=_faces(deployment),
        peers=options.peer_pods,
        worker_port=WORKER_PORT,
        own_ports=[int(port) for port in PORTS.split("-")],
    )
    return made


def pod_monitor(deployment: Deployment, options: Options) -> Tree:
    """Tells Prometheus to read `/metrics` of every pod."""
    (made,) = trees(
        "pod_monitor",
        name=options.name,
        keys="api_keys" in files_of(deployment, options),
        certificate=deployment.server.tls_certificate and SECRET_FILES["tls_certificate"],
    )
    return made
