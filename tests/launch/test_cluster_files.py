"""Autoscalers read metrics that exist."""

import re
from pathlib import Path

from tests.jaxserve.launch.rendered import files_of, objects

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_autoscalers_read_metrics_that_exist() -> None:
    text = files_of("--config step3-prefill --target kubernetes")["autoscale.yaml"]
    used = set(re.findall(r"jaxserve:(\w+)", text))
    dashboard = (LAUNCH / "grafana-dashboard.json").read_text()
    assert used == {"worker_requests", "kv_cache_usage_perc"}
    assert all(f"jaxserve:{name}" in dashboard for name in used)
    scaled = objects(text)
    keda = scaled["ScaledObject", "jaxserve-prefill"]["spec"]
    assert keda["minReplicaCount"] <= keda["maxReplicaCount"]
    domains = scaled["HorizontalPodAutoscaler", "jaxserve-domain"]["spec"]
    assert domains["minReplicas"] <= domains["maxReplicas"]
