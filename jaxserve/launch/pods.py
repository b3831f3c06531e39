"""Pods of every workload: what LeaderWorkerSet, JobSet and Deployment have in common.

Called by `kubernetes.py` and `jobset.py`. Trees are what YAML takes; nothing here is text.
"""

from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.launch.machines import gpu_product
from jaxserve.launch.options import CACHE, KEYS, SECRET_FILES, Options, Rendering, files_of
from jaxserve.launch.settings import Places, deployment_text
from jaxserve.launch.workloads import CONTROL_PORT, COORDINATOR_PORT, Workload, host_processes

Tree = dict[str, Any]

LEAVE_SECONDS = 5
"""From the order to end until SIGTERM: load balancers stop sending meanwhile."""
SPARE_SECONDS = 25
"""For a process to end after its drain."""
START_SECONDS = 3600
"""For loading and compiling, after which a pod that does not answer is given up."""
USER = 10001


def container_places(rendering: Rendering, **addresses: Any) -> Places:
    """Places in containers that share no disk with whoever renders."""
    deployment, options = rendering.deployment, rendering.options
    followers = any(work.processes > 1 for work in rendering.works)
    return Places(
        model=options.model,
        host="0.0.0.0",
        files=files_of(deployment, options),
        follower_port=deployment.server.http_port if followers else -1,
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
    """Arguments of `python -m jaxserve.serve` that all processes of a worker share."""
    made = ["--config=/etc/jaxserve/deployment.yaml", "--log-format=json"]
    if work.role:
        made.append(f"--role={work.role}")
    if work.port:
        made.append(f"--listen=$(POD_IP):{work.port}")
    made += host_processes(deployment, work)
    if work.faces and not files_of(deployment, options):
        made.append("--insecure-bind")
    return made


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
    serves = work.faces and leads
    container: Tree = {
        "name": "jaxserve",
        "image": options.image,
        "command": ["python", "-u", "-m", "jaxserve.serve"],
        "args": [*arguments(deployment, work, options), *given],
        "env": [*_environment(work, options), *(environment or [])],
        "ports": _ports(deployment, work, leads),
        "resources": _resources(work),
        **_probes(deployment, work, leads),
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_SECONDS}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    mounts, volumes = _volumes(deployment, work, options, serves)
    container["volumeMounts"] = mounts
    grace = LEAVE_SECONDS + server.drain_seconds + SPARE_SECONDS
    spec: Tree = {
        "terminationGracePeriodSeconds": int(grace),
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_placement(work, options),
        "containers": [container],
        "volumes": volumes,
    }
    metadata: Tree = {"labels": labels(options, work)}
    if options.models_bucket:
        metadata["annotations"] = {"gke-gcsfuse/volumes": "true"}
    return {"metadata": metadata, "spec": spec}


def _environment(work: Workload, options: Options) -> list[Tree]:
    secret = {"secretKeyRef": {"name": options.name, "key": "cluster-token"}}
    made: list[Tree] = [{"name": "JAX_COMPILATION_CACHE_DIR", "value": CACHE}]
    if work.kind != "whole" or work.processes > 1:
        made.append({"name": "JAXSERVE_CLUSTER_TOKEN", "valueFrom": secret})
    if work.port:
        field = {"fieldRef": {"fieldPath": "status.podIP"}}
        made.append({"name": "POD_IP", "valueFrom": field})
    return made


def _ports(deployment: Deployment, work: Workload, leads: bool) -> list[Tree]:
    server = deployment.server
    made = {}
    if work.faces and leads:
        made = {"http": server.http_port, "grpc": server.grpc_port}
    elif not leads:
        made = {"http": server.follower_http_port}
    if work.port and leads:
        made["worker"] = work.port
    return [{"name": name, "containerPort": port} for name, port in made.items() if port > 0]


def _resources(work: Workload) -> Tree:
    if work.hardware is None:
        return {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "16Gi"}}
    kind = "google.com/tpu" if work.tpu else "nvidia.com/gpu"
    number = str(work.accelerators)
    return {"requests": {"cpu": "4", "memory": "16Gi", kind: number}, "limits": {kind: number}}


def _probes(deployment: Deployment, work: Workload, leads: bool) -> Tree:
    """`/health` answers while a process loads, `/ready` is true when it is warm. Workers answer
    nobody but routers and attention workers, who ask them themselves: their port is open, or
    not."""
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
    deployment: Deployment, work: Workload, options: Options, serves: bool
) -> tuple[list[Tree], list[Tree]]:
    """Mounts and volumes: the deployment, secrets, models, compiled programs, /tmp."""
    found: list[tuple[str, str, bool, Tree]] = [
        ("deployment", "/etc/jaxserve", True, {"configMap": {"name": options.name}}),
    ]
    files = files_of(deployment, options)
    if files and (serves or work.processes > 1):
        items = [{"key": SECRET_FILES[key], "path": SECRET_FILES[key]} for key in files]
        secret = {"secretName": options.name, "items": items}
        found.append(("secrets", KEYS, True, {"secret": secret}))
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
    found += [("cache", CACHE, False, cache), ("tmp", "/tmp", False, {"emptyDir": {}})]
    if work.hardware is not None and not work.tpu:  # NCCL's
        found.append(("shm", "/dev/shm", False, {"emptyDir": {"medium": "Memory"}}))
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if fixed else {})}
        for name, path, fixed, _ in found
    ]
    return mounts, [{"name": name, **source} for name, _, _, source in found]


def _placement(work: Workload, options: Options) -> Tree:
    """Nodes with the hardware; the pods of GPU workloads in one zone."""
    if work.hardware is None:
        return {}
    if work.tpu:
        return {
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": work.tpu.kind.label,
                "cloud.google.com/gke-tpu-topology": work.tpu.topology,
            }
        }
    product = gpu_product(work.hardware)
    chosen = {"nodeSelector": {"nvidia.com/gpu.product": product}} if product else {}
    same = {"app.kubernetes.io/instance": options.name}
    zone = {
        "labelSelector": {"matchLabels": same},
        "topologyKey": "topology.kubernetes.io/zone",
    }
    return {
        **chosen,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [zone]}},
    }


def config_map(deployment: Deployment, options: Options) -> Tree:
    """The deployment file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": options.name},
        "data": {"deployment.yaml": deployment_text(deployment)},
    }


def client_service(deployment: Deployment, options: Options, selector: dict[str, str]) -> Tree:
    """The one Service of clients."""
    server = deployment.server
    ports = {"http": server.http_port, "grpc": server.grpc_port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{options.name}-api"},
        "spec": {
            "selector": selector,
            "ports": [
                {"name": name, "port": port, "targetPort": name}
                for name, port in ports.items()
                if port > 0
            ],
        },
    }


def network_policy(deployment: Deployment, options: Options) -> Tree:
    """Clients reach the faces; everything else is between the pods of the deployment: neither the
    control plane nor JAX's own services are encrypted."""
    server = deployment.server
    faces = [{"port": port} for port in (server.http_port, server.grpc_port) if port > 0]
    own = {"matchLabels": {"app.kubernetes.io/instance": options.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": options.name},
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}, {"ports": faces}],
        },
    }


def pod_monitor(deployment: Deployment, options: Options, selector: dict[str, str]) -> Tree:
    """Prometheus reads `/metrics` of whoever serves clients, with the Secret's `metrics-key`, one
    of the API keys."""
    endpoint: Tree = {"port": "http", "path": "/metrics", "interval": "15s"}
    if "api_keys" in files_of(deployment, options):
        endpoint["authorization"] = {"credentials": {"name": options.name, "key": "metrics-key"}}
    if deployment.server.tls_certificate:
        own = {"secret": {"name": options.name, "key": SECRET_FILES["tls_certificate"]}}
        trusted = {"ca": own, "serverName": f"{options.name}-api"}
        endpoint |= {"scheme": "https", "tlsConfig": trusted}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": options.name},
        "spec": {
            "selector": {"matchLabels": selector},
            "podMetricsEndpoints": [endpoint],
        },
    }
