"""Kubernetes: a LeaderWorkerSet (0.6 or newer) a role, on TPU slices of GKE or on GPU servers.

Called by `__main__.py`.
"""

from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.launch import autoscaling, clusters, pods
from jaxserve.launch.options import TLS_FILES, Options, Rendering, files_of
from jaxserve.launch.pods import Tree
from jaxserve.launch.settings import placed, trees
from jaxserve.launch.workloads import FFN_PORT, WORKER_PORT, Workload

LWS = "leaderworkerset.sigs.k8s.io"


def render(rendering: Rendering) -> dict[str, str]:
    """Returns the files of the deployment by name.

    Raises:
      ConfigError: it cannot be divided over clusters.
    """
    options, works = rendering.options, rendering.works
    kinds = {work.kind: work for work in works}
    parts = clusters.divided(works, options)
    addresses: dict[str, Any] = {}
    if "domain" in kinds:
        addresses["registry"] = "kubernetes"
        for kind in ("prefill", "domain"):
            if kind in kinds:
                key = {"prefill": "prefill", "domain": "domains"}[kind]
                service = _leaders(options, kinds[kind])
                host = clusters.host_of(service, kinds[kind], options)
                addresses[key] = [f"{host}:{WORKER_PORT}"]
    if "ffn" in kinds:
        own, ffn = pods.name_of(options, kinds["ffn"]), kinds["ffn"]
        addresses["ffn"] = [
            f"{own}-{worker}{f'-{process}' if process else ''}.{own}:{FFN_PORT}"
            for worker in range(ffn.workers)
            for process in range(ffn.processes)
        ]
    deployment = placed(rendering.deployment, pods.container_places(rendering, **addresses))
    files = {}
    for name, workers in parts.items():
        objects = _cluster(deployment, workers, options)
        text = f"{head(rendering, deployment)}{pods.yaml_of(options, objects)}"
        files[f"{name}.yaml"] = text
        if "domain" in kinds:
            prefix = f"{name}-" if options.clusters > 1 else ""
            files[f"{prefix}autoscale.yaml"] = autoscaling.render(rendering, workers)
    if options.clusters > 1:
        files["clusters.sh"] = clusters.script(rendering)
    return files


def _cluster(deployment: Deployment, works: list[Workload], options: Options) -> list[Tree]:
    """Returns the objects of one cluster."""
    objects = [pods.config_map(deployment, options)]
    for work in works:
        objects += _objects(deployment, work, options)
        if work.kind == "prefill" and options.clusters > 1:
            objects.append(clusters.export(_leaders(options, work), options))
    policy = pods.network_policy(deployment, options)
    faces = next((work for work in works if work.faces), None)
    if faces is None:
        policy["spec"]["ingress"][-1] = clusters.ingress(options)
        return [*objects, policy]
    selector = _first(options, faces) if faces.kind != "router" else pods.labels(options, faces)
    return [
        *objects,
        pods.client_service(deployment, options, selector),
        policy,
        pods.pod_monitor(deployment, options),
    ]


def head(rendering: Rendering, deployment: Deployment) -> str:
    """Comments with the commands that come first."""
    options = rendering.options
    files = files_of(deployment, options)
    where = f" --namespace={options.namespace}" if options.namespace else ""
    secret = [f"kubectl create secret generic {options.name}{where} \\"]
    secret.append('  --from-literal=cluster-token="$(openssl rand -hex 16)" \\')
    secret += [f"  --from-file={path.rpartition('/')[2]}=FILE \\" for path in files.values()]
    if "api_keys" in files:
        secret.append('  --from-literal=metrics-key="$(head -n 1 FILE)" \\')
    secret[-1] = secret[-1].removesuffix(" \\")
    if deployment.cluster.tls:
        names = " ".join(f"--from-file={name}" for name in TLS_FILES)
        secret.append(f"kubectl create secret generic {options.name}-tls{where} {names}")
    models = "" if options.models_bucket else options.models_claim
    claims = [claim for claim in (models, options.cache_claim) if claim]
    lines = [rendering.command, *secret]
    if claims:
        lines.append(f"and PersistentVolumeClaims: {', '.join(claims)}; image {options.image}")
    if "@" not in options.image:
        lines.append("a tag may come to name another image: --image NAME@sha256:DIGEST does not")
    return "".join(f"# {line}\n" for line in lines)


def _objects(deployment: Deployment, work: Workload, options: Options) -> list[Tree]:
    """The objects of one workload."""
    if work.kind == "router":
        return _router(deployment, work, options)
    made = _leader_worker_set(deployment, work, options)
    if work.kind in ("prefill", "domain"):
        names = {"name": _leaders(options, work), "selector": _first(options, work)}
        made += trees("leader_service", **names, port=WORKER_PORT)
    return made


def _leader_worker_set(deployment: Deployment, work: Workload, options: Options) -> list[Tree]:
    group: Tree = {"size": work.processes, "restartPolicy": "RecreateGroupOnPodRestart"}
    if work.processes > 1:
        # LeaderWorkerSet sets these variables in every container.
        given = pods.joining("$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)", "$(LWS_GROUP_SIZE)")
        group["leaderTemplate"] = pods.pod(deployment, work, options, given)
        group["workerTemplate"] = pods.pod(deployment, work, options, given, leads=False)
    else:
        group["workerTemplate"] = pods.pod(deployment, work, options, [])
    metadata: Tree = {"name": pods.name_of(options, work), "labels": pods.labels(options, work)}
    if work.tpu and work.tpu.hosts > 1:
        # All pods of a group on one slice, which is one node pool.
        metadata["annotations"] = {f"{LWS}/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return trees("leader_worker_set", metadata=metadata, workers=work.workers, group=group)


def _router(deployment: Deployment, work: Workload, options: Options) -> list[Tree]:
    names = {"name": pods.name_of(options, work), "own": pods.labels(options, work)}
    pod = pods.pod(deployment, work, options, [])
    return trees("router", **names, workers=work.workers, pod=pod)


def _leaders(options: Options, work: Workload) -> str:
    """Name of the Service whose ready pods are the workers; LeaderWorkerSet makes one of its own
    name with all pods."""
    return f"{pods.name_of(options, work)}-leaders"


def _first(options: Options, work: Workload) -> dict[str, str]:
    """Labels of process 0 of a workload's workers."""
    return {f"{LWS}/name": pods.name_of(options, work), f"{LWS}/worker-index": "0"}
