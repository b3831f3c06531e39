"""Autoscaling of a fleet's workloads by its routers' metrics. Called by `kubernetes.py`."""

from collections.abc import Sequence

from jaxserve.launch import pods
from jaxserve.launch.options import Rendering
from jaxserve.launch.pods import Tree
from jaxserve.launch.workloads import Workload

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


def render(rendering: Rendering, works: Sequence[Workload]) -> str:
    """Returns KEDA for prefill workers and a HorizontalPodAutoscaler for domains."""
    of_kind = {"prefill": _prefill, "domain": _domains}
    trees = [
        of_kind[work.kind](pods.name_of(rendering.options, work), work.workers)
        for work in works
        if work.kind in of_kind
    ]
    return f"# {rendering.command}\n{HEAD}{pods.yaml_of(rendering.options, trees)}"


def _prefill(name: str, workers: int) -> Tree:
    """Scales prefill workers by the prompts that wait or run in each."""
    waiting = 'jaxserve:worker_requests{role="prefill", state=~"running|waiting"}'
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": _target(name),
            "minReplicaCount": 1,
            "maxReplicaCount": workers * MOST,
            "cooldownPeriod": 300,
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": "http://prometheus.monitoring.svc:9090",
                        "query": f"max(sum by (pod) ({waiting}))",
                        "threshold": "8",
                    },
                }
            ],
        },
    }


def _domains(name: str, workers: int) -> Tree:
    """Scales domains by the used share of the KV cache, one at a time: other domains compute the
    requests of one that goes anew."""
    slowly = {
        "stabilizationWindowSeconds": 600,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
    }
    target = {"type": "Value", "value": "700m"}
    metric = {"metric": {"name": "jaxserve_domain_load"}, "target": target}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": _target(name),
            "minReplicas": workers,
            "maxReplicas": workers * MOST,
            "metrics": [{"type": "External", "external": metric}],
            "behavior": {"scaleDown": slowly},
        },
    }


def _target(name: str) -> dict[str, str]:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": name,
    }
