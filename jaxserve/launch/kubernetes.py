"""Kubernetes: a LeaderWorkerSet (0.6 or newer) a role, on TPU slices of GKE or on GPU servers; or a
JobSet for one runtime over one TPU slice or several, a Job a slice.

Called by `__main__.py`. A fleet may be divided over two clusters (`--clusters 2`): prefill workers
in one, routers and domains in the other, which open all connections, to the addresses of pods.
Links between workers are then encrypted by `cluster.tls` or by the clusters' network (WireGuard),
and the script refuses to go on where neither does. A JobSet starts all its Jobs again when one
fails, which suits one runtime and no fleet.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.launch import pods
from jaxserve.launch.pods import Tree
from jaxserve.launch.settings import TLS_FILES, Options, Rendering, files_of, filled, placed, trees
from jaxserve.launch.workloads import FFN_PORT, WORKER_PORT, Workload


def divided(works: list[Workload], options: Options) -> dict[str, list[Workload]]:
    """Returns the workloads of each cluster, by the name of its file.

    Raises:
      ConfigError: the deployment has no prefill workers, or an option is missing.
    """
    if options.clusters == 1:
        return {"kubernetes": works}
    prefill = [work for work in works if work.kind == "prefill"]
    if not prefill:
        raise ConfigError("--clusters 2: prefill.workers = 0, so nothing goes to another cluster")
    if not options.namespace:
        raise ConfigError("--clusters 2: say --namespace, the same in both clusters")
    if not options.peer_pods:
        raise ConfigError(
            "--clusters 2: say --peer-pods CIDR, the addresses of pods of the cluster with routers "
            "and domains, which alone reach prefill workers from outside"
        )
    return {"prefill": prefill, "decode": [work for work in works if work.kind != "prefill"]}


def host_of(service: str, work: Workload, options: Options) -> str:
    """Returns the name of a workload's Service for routers and domains."""
    if options.clusters == 1 or work.kind != "prefill":
        return service
    return f"{service}.{options.namespace}.svc.clusterset.local"


def script(rendering: Rendering) -> str:
    """Returns the script that makes the secret of both clusters and applies their files."""
    options, keys = rendering.options, files_of(rendering.deployment, rendering.options)
    names = [path.rpartition("/")[2] for path in keys.values()]
    given = "".join(f" \\\n        --from-file={shlex.quote(name)}" for name in names)
    if "api_keys" in keys:
        given += ' \\\n        --from-literal=metrics-key="$(head -n 1 api-keys)"'
    return filled(
        "clusters.sh",
        command=rendering.command,
        name=shlex.quote(options.name),
        namespace=shlex.quote(options.namespace),
        tls="1" if rendering.deployment.cluster.tls else "",
        files=f"\n# Beside this file: {', '.join(names)}." if names else "",
        secrets=given,
    )


MOST = 8
"""Times the workers that the deployment has."""
HEAD = """\
# Examples: thresholds and bounds are yours. Both read the routers' metrics from Prometheus.
#
# A pod that is taken away gets SIGTERM: it takes nothing new, what waits there goes elsewhere, and
# what still runs after server.drain_seconds is replayed by the routers.
#
# The HorizontalPodAutoscaler needs an adapter that serves as an external metric the rule
#   jaxserve_domain_load = max(avg by (pod) (jaxserve:kv_cache_usage_perc))
"""


def autoscaling(rendering: Rendering, works: Sequence[Workload]) -> str:
    """Returns KEDA for prefill workers and a HorizontalPodAutoscaler for domains."""
    objects = []
    for work in works:
        if work.kind in ("prefill", "domain"):
            name = pods.name_of(rendering.options, work)
            sizes = {"workers": work.workers, "most": work.workers * MOST}
            objects += trees(f"autoscale_{work.kind}", name=name, **sizes)
    return f"# {rendering.command}\n{HEAD}{pods.yaml_of(rendering.options, objects)}"


LWS = "leaderworkerset.sigs.k8s.io"


def render(rendering: Rendering) -> dict[str, str]:
    """Returns the files of the deployment by name.

    Raises:
      ConfigError: it cannot be divided over clusters.
    """
    options, works = rendering.options, rendering.works
    kinds = {work.kind: work for work in works}
    parts = divided(works, options)
    addresses: dict[str, Any] = {}
    if "domain" in kinds:
        addresses["registry"] = "kubernetes"
        for kind in ("prefill", "domain"):
            if kind in kinds:
                key = {"prefill": "prefill", "domain": "domains"}[kind]
                service = _leaders(options, kinds[kind])
                host = host_of(service, kinds[kind], options)
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
            files[f"{prefix}autoscale.yaml"] = autoscaling(rendering, workers)
    if options.clusters > 1:
        files["clusters.sh"] = script(rendering)
    return files


def _cluster(deployment: Deployment, works: list[Workload], options: Options) -> list[Tree]:
    """Returns the objects of one cluster."""
    objects = [pods.config_map(deployment, options)]
    for work in works:
        objects += _objects(deployment, work, options)
        if work.kind == "prefill" and options.clusters > 1:
            objects += trees("service_export", name=_leaders(options, work), gke=options.gke)
    faces = next((work for work in works if work.faces), None)
    policy = pods.network_policy(deployment, options, clients=faces is not None)
    if faces is None:
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


RESTARTS = 1000
"""Restarts of all Jobs before Kubernetes gives the JobSet up."""
JOBSET = "jobset.sigs.k8s.io"


def render_job_set(rendering: Rendering) -> dict[str, str]:
    """The file of the deployment.

    Raises:
      ConfigError: its roles have runtimes of their own.
    """
    options = rendering.options
    if len(rendering.works) > 1:
        kinds = ", ".join(work.kind for work in rendering.works)
        raise ConfigError(
            f"--target gke-jobset: starts all workloads anew when one fails, and here are {kinds}; "
            "take gke-lws"
        )
    (work,) = rendering.works
    deployment = placed(rendering.deployment, pods.container_places(rendering))
    given: list[str] = []
    environment: list[Tree] = []
    if work.processes > 1:
        leader = f"{options.name}-slice-0-0.{options.name}"
        given = pods.joining(leader, "$(JOB_COMPLETION_INDEX)", f"{work.processes}")
    if work.slices > 1:
        # The Job's index counts the hosts of its slice.
        given.append(f"--slices={work.slices}")
        field = {"fieldPath": f"metadata.labels['{JOBSET}/job-index']"}
        environment = [{"name": "JAXSERVE_SLICE", "valueFrom": {"fieldRef": field}}]
    template = pods.pod(deployment, work, options, given, environment=environment)
    template["spec"]["restartPolicy"] = "Never"
    metadata: Tree = {"name": options.name, "labels": pods.labels(options, work)}
    if work.tpu:
        metadata["annotations"] = {
            f"alpha.{JOBSET}/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    (job_set,) = trees(
        "jobset",
        metadata=metadata,
        restarts=RESTARTS,
        slices=work.slices,
        hosts=work.processes // work.slices,
        pod=template,
    )
    first = {
        f"{JOBSET}/jobset-name": options.name,
        f"{JOBSET}/job-index": "0",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    objects = [
        pods.config_map(deployment, options),
        job_set,
        pods.client_service(deployment, options, first),
        pods.network_policy(deployment, options),
        pods.pod_monitor(deployment, options),
    ]
    return {"jobset.yaml": f"{head(rendering, deployment)}{pods.yaml_of(options, objects)}"}
