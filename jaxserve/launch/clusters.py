"""A fleet over two Kubernetes clusters: prefill workers in one, routers and domains in the other.

Called by `kubernetes.py`. Routers and domains open all connections, to the addresses of pods. The
links between workers are authenticated but not encrypted by jaxserve: the clusters' network does
that (WireGuard), and the script refuses to go on where it does not.
"""

import shlex
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.launch.options import Options, Rendering, files_of
from jaxserve.launch.workloads import PORTS, WORKER_PORT, Workload

Tree = dict[str, Any]

SCRIPT = """\
#!/usr/bin/env bash
# {command}
#
#   PREFILL=CONTEXT DECODE=CONTEXT ./clusters.sh apply     both clusters, with one secret
#   PREFILL=CONTEXT DECODE=CONTEXT ./clusters.sh delete
#
# CONTEXT: of kubectl. The clusters share a network in which pods reach pods of the other, and
# Services that are exported (GKE: VPC-native clusters of one fleet with multi-cluster Services).
# Worker links are encrypted by the network: GKE Dataplane V2 with inter-node transparent encryption
# for several clusters, or Cilium with WireGuard (AGENT=cilium). UNENCRYPTED=1 does without.{files}
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
: "${{PREFILL:?the context of the cluster with prefill workers}}"
: "${{DECODE:?the context of the cluster with routers and domains}}"
name={name} namespace={namespace}
on() {{ # context, arguments of kubectl
  kubectl --context="$1" --namespace="$namespace" "${{@:2}}"
}}
encrypted() {{ # context
  kubectl --context="$1" --namespace=kube-system exec "daemonset/${{AGENT:-anetd}}" -- \\
    cilium status | grep --ignore-case '^Encryption:.*wireguard' > /dev/null
}}

case "${{1:-}}" in
  apply)
    for context in "$PREFILL" "$DECODE"; do
      if [[ -z "${{UNENCRYPTED:-}}" ]] && ! encrypted "$context"; then
        echo "$context: its network does not encrypt traffic between nodes" >&2
        exit 1
      fi
    done
    token=$(on "$DECODE" get secret "$name" --ignore-not-found \\
      --output=jsonpath='{{.data.cluster-token}}' | base64 --decode)
    token=${{token:-$(openssl rand -hex 16)}}
    for context in "$PREFILL" "$DECODE"; do
      on "$context" create secret generic "$name" --dry-run=client --output=yaml \\
        --from-literal=cluster-token="$token"{secrets} | on "$context" apply --filename=-
    done
    on "$PREFILL" apply --filename=prefill.yaml
    on "$DECODE" apply --filename=decode.yaml
    ;;
  delete)
    on "$DECODE" delete --ignore-not-found --filename=decode.yaml
    on "$PREFILL" delete --ignore-not-found --filename=prefill.yaml
    ;;
  *)
    grep '^#   ' "$0" >&2
    exit 2
    ;;
esac
"""


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
    return SCRIPT.format(
        command=rendering.command,
        name=shlex.quote(options.name),
        namespace=shlex.quote(options.namespace),
        files=f"\n# Beside this file: {', '.join(names)}." if names else "",
        secrets=given,
    )
