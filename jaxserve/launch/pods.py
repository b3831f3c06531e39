"""Pods of every workload, as LeaderWorkerSet, JobSet and Deployment take them.

Called by `kubernetes.py` and `jobset.py`. Trees are the values of YAML documents, not text.
"""

from collections.abc import Sequence
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.launch.options import (
    CACHE,
    KEYS,
    SECRET_FILES,
    SPARE_SECONDS,
    TLS,
    Options,
    Rendering,
    files_of,
)
from jaxserve.launch.settings import Places, deployment_text, to_yaml, trees
from jaxserve.launch.workloads import CONTROL_PORT, COORDINATOR_PORT, Workload, serve_arguments

Tree = dict[str, Any]

LEAVE_SECONDS = 5
"""From the order to end until SIGTERM: load balancers stop sending meanwhile."""
START_SECONDS = 3600
"""For loading and compiling, after which a pod that does not answer is given up."""
USER = 10001


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
    server = deployment.server
    container: Tree = {
        "name": "jaxserve",
        "image": options.image,
        "command": _command(work, options),
        "args": [*arguments(deployment, work, options), *given],
        "env": [*_environment(work, options), *(environment or [])],
        "ports": _ports(deployment, work, leads),
        "resources": _resources(work, options),
        **_probes(deployment, work, leads),
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_SECONDS}}},
        "securityContext": _container_security(work, options),
    }
    mounts, volumes = _volumes(deployment, work, options)
    container["volumeMounts"] = mounts
    grace = LEAVE_SECONDS + server.drain_seconds + SPARE_SECONDS
    spec: Tree = {
        "terminationGracePeriodSeconds": int(grace),
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(work, options),
        **_account(options),
        **_placement(work, options),
        "containers": [container],
        "volumes": volumes,
    }
    metadata: Tree = {"labels": labels(options, work)}
    annotations = {"gke-gcsfuse/volumes": "true"} if options.models_bucket else {}
    if work.hardware is not None:
        annotations |= options.annotations
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


def _account(options: Options) -> Tree:
    made: Tree = {}
    if options.service_account:
        made["serviceAccountName"] = options.service_account
    if options.pull_secrets:
        made["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    return made


def _command(work: Workload, options: Options) -> list[str]:
    """Returns the command of a container. A privileged one may raise its limit of locked memory,
    which libtpu needs for its transfers and runtimes do not set."""
    serve = ["python", "-u", "-m", "jaxserve.serve"]
    if not _privileged(work, options):
        return serve
    return ["sh", "-c", f'ulimit -l unlimited && exec {" ".join(serve)} "$@"', "serve"]


def _privileged(work: Workload, options: Options) -> bool:
    return options.privileged and work.hardware is not None


def _locks_memory(work: Workload, options: Options) -> bool:
    """Returns True if network cards read and write the memory of a pod's GPUs."""
    return bool(options.rdma[0]) and work.hardware is not None and work.tpu is None


def _container_security(work: Workload, options: Options) -> Tree:
    made: Tree = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    if _privileged(work, options):
        return made | {"allowPrivilegeEscalation": True, "privileged": True}
    made["capabilities"] = {"drop": ["ALL"]}
    if _locks_memory(work, options):
        made["capabilities"]["add"] = ["IPC_LOCK"]
    return made


def _pod_security(work: Workload, options: Options) -> Tree:
    """Returns the user of a pod. Capabilities that a container adds are those of root alone."""
    root = _privileged(work, options) or _locks_memory(work, options)
    user = 0 if root else USER
    return {
        "runAsNonRoot": not root,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _environment(work: Workload, options: Options) -> list[Tree]:
    secret = {"secretKeyRef": {"name": options.name, "key": "cluster-token"}}
    cache = options.cache_bucket or CACHE
    made: list[Tree] = [{"name": "JAX_COMPILATION_CACHE_DIR", "value": cache}]
    if work.kind != "whole" or work.processes > 1:
        made.append({"name": "JAXSERVE_CLUSTER_TOKEN", "valueFrom": secret})
    if work.port:
        fields = {"POD_IP": "status.podIP"}
        if work.kind == "ffn":
            fields["WORKER"] = "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
        for name, path in fields.items():
            made.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    variables: dict[str, str] = {}
    if work.hardware is not None and not work.tpu:
        # NCCL says what fails, and looks for network cards of InfiniBand or RoCE where a pod has
        # some.
        variables = {"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "0" if options.rdma[0] else "1"}
    variables |= options.environment
    return [*made, *({"name": name, "value": value} for name, value in variables.items())]


def _ports(deployment: Deployment, work: Workload, leads: bool) -> list[Tree]:
    server = deployment.server
    made = {}
    if work.faces and leads:
        made = {"http": server.http_port, "grpc": server.grpc_port}
    else:
        made = {"http": server.follower_http_port}
    if work.port and (leads or work.kind == "ffn"):
        made["worker"] = work.port
    return [{"name": name, "containerPort": port} for name, port in made.items() if port > 0]


def _resources(work: Workload, options: Options) -> Tree:
    memory = f"{work.host_gib}Gi"
    if work.hardware is None:
        most = f"{2 * work.host_gib}Gi"
        return {"requests": {"cpu": "2", "memory": memory}, "limits": {"memory": most}}
    kind = "google.com/tpu" if work.tpu else "nvidia.com/gpu"
    devices = {kind: str(work.accelerators)}
    if _locks_memory(work, options):
        resource, number = options.rdma
        devices[resource] = number
    return {"requests": {"cpu": "4", "memory": memory, **devices}, "limits": devices}


def _probes(deployment: Deployment, work: Workload, leads: bool) -> Tree:
    """Returns the probes. `/health` answers while a process loads, `/ready` once it is warm.
    Workers answer routers and attention workers alone, so Kubernetes only tries their port."""
    server = deployment.server
    often: Tree = {"periodSeconds": 10}
    if (work.faces or not leads) and not server.tls_client_ca:
        scheme = {"scheme": "HTTPS"} if server.tls_certificate else {}

        def get(path: str) -> Tree:
            return {"httpGet": {"path": path, "port": "http", **scheme}}

        return {
            "startupProbe": {**get("/health"), **often, "failureThreshold": 30},
            "readinessProbe": {**get("/ready"), "periodSeconds": 5},
            "livenessProbe": {**get("/health"), **often, "failureThreshold": 6},
        }
    port = {"tcpSocket": {"port": "worker" if leads and not work.faces else "http"}}
    return {
        "startupProbe": {**port, **often, "failureThreshold": START_SECONDS // 10},
        "readinessProbe": {**port, "periodSeconds": 5},
        "livenessProbe": {**port, **often, "failureThreshold": 6},
    }


def _volumes(
    deployment: Deployment, work: Workload, options: Options
) -> tuple[list[Tree], list[Tree]]:
    """Mounts and volumes: the deployment, secrets, models, compiled programs, /tmp."""
    found: list[tuple[str, str, bool, Tree]] = [
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
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if fixed else {})}
        for name, path, fixed, _ in found
    ]
    return mounts, [{"name": name, **source} for name, _, _, source in found]


def _placement(work: Workload, options: Options) -> Tree:
    """Returns nodes with the hardware, and for GPUs preferably one zone."""
    if work.hardware is None:
        return {}
    if work.tpu:
        return {
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": work.tpu.kind.label,
                "cloud.google.com/gke-tpu-topology": work.tpu.topology,
                **options.node_selector,
            }
        }
    required, preferred = (
        f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred")
    )
    affinity: Tree = {}
    if product := work.hardware.gpu_product:
        # GPU feature discovery sets the label. GKE's nodes lack it unless it is installed. Where
        # there are several kinds of GPUs, a role must not take the nodes of another.
        own = {"key": "nvidia.com/gpu.product", "operator": "In", "values": [product]}
        term = {"matchExpressions": [own]}
        affinity["nodeAffinity"] = {preferred: [{"weight": 100, "preference": term}]}
        if options.gpu_kinds > 1:
            affinity["nodeAffinity"] = {required: {"nodeSelectorTerms": [term]}}
    zone = {
        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": options.name}},
        "topologyKey": "topology.kubernetes.io/zone",
    }
    near = {"weight": 100, "podAffinityTerm": zone}
    affinity["podAffinity"] = {preferred: [near]}
    return {
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": affinity,
    }


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
    ports = [
        {"name": name, "port": port, "targetPort": name}
        for name, port in _faces(deployment).items()
    ]
    (made,) = trees("client_service", name=f"{options.name}-api", selector=selector, ports=ports)
    return made


def _faces(deployment: Deployment) -> dict[str, int]:
    """Ports for clients, by their names."""
    server = deployment.server
    ports = {"http": server.http_port, "grpc": server.grpc_port}
    return {name: port for name, port in ports.items() if port > 0}


def network_policy(deployment: Deployment, options: Options) -> Tree:
    """Clients reach the faces; everything else is between the pods of the deployment: JAX's own
    services are not encrypted, and the control plane only with `cluster.tls`."""
    faces = [{"port": port} for port in _faces(deployment).values()]
    own = {"matchLabels": {"app.kubernetes.io/instance": options.name}}
    (made,) = trees("network_policy", name=options.name, own=own, faces=faces)
    return made


def pod_monitor(deployment: Deployment, options: Options) -> Tree:
    """Prometheus reads `/metrics` of every pod, with the Secret's `metrics-key`, one of the API
    keys."""
    endpoint: Tree = {"port": "http", "path": "/metrics", "interval": "15s"}
    if "api_keys" in files_of(deployment, options):
        endpoint["authorization"] = {"credentials": {"name": options.name, "key": "metrics-key"}}
    if deployment.server.tls_certificate:
        own = {"secret": {"name": options.name, "key": SECRET_FILES["tls_certificate"]}}
        trusted = {"ca": own, "serverName": f"{options.name}-api"}
        endpoint |= {"scheme": "https", "tlsConfig": trusted}
    (made,) = trees("pod_monitor", name=options.name, endpoint=endpoint)
    return made
