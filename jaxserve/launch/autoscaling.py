"""Autoscaling of a fleet's workloads by its routers' metrics. Called by `kubernetes.py`."""

from collections.abc import Sequence

from jaxserve.launch import pods
from jaxserve.launch.options import Rendering
from jaxserve.launch.settings import trees
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
    objects = []
    for work in works:
        if work.kind in ("prefill", "domain"):
            name = pods.name_of(rendering.options, work)
            target = {
                "apiVersion": "leaderworkerset.x-k8s.io/v1",
                "kind": "LeaderWorkerSet",
                "name": name,
            }
            sizes = {"workers": work.workers, "most": work.workers * MOST}
            objects += trees(f"autoscale_{work.kind}", name=name, target=target, **sizes)
    return f"# {rendering.command}\n{HEAD}{pods.yaml_of(rendering.options, objects)}"
