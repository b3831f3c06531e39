"""A fleet over two Kubernetes clusters: prefill workers in one, routers and domains in the other.

Called by `kubernetes.py`. Routers and domains open all connections, to the addresses of pods. Links
between workers are encrypted by `cluster.tls` or by the clusters' network (WireGuard), and the
script refuses to go on where neither does.
"""

import shlex
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.launch.options import Options, Rendering, files_of
from jaxserve.launch.settings import filled
from jaxserve.launch.workloads import PORTS, WORKER_PORT, Workload

Tree = dict[str, Any]


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


def export(service: str, options: Options) -> Tree:
    """Returns the export of a Service to the other cluster."""
    version = "net.gke.io/v1" if options.gke else "multicluster.x-k8s.io/v1alpha1"
    return {"apiVersion": version, "kind": "ServiceExport", "metadata": {"name": service}}


def ingress(options: Options) -> Tree:
    """Returns the rule that lets the other cluster's pods reach prefill workers."""
    first, _, last = PORTS.partition("-")
    return {
        "from": [{"ipBlock": {"cidr": options.peer_pods}}],
        "ports": [{"port": WORKER_PORT}, {"port": int(first), "endPort": int(last)}],
    }


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
