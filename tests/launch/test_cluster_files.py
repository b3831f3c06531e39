"""The cluster files start processes that fit together, as far as can be told without a cluster."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve import serve
from jaxserve.config.command_line import read_deployment
from jaxserve.fleet.arguments import from_arguments
from jaxserve.fleet.membership import process_shares

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$JAXSERVE_CLUSTER_TOKEN" "$@"
"""


@pytest.fixture
def documents() -> dict[str, Any]:
    loaded = yaml.safe_load_all((LAUNCH / "lws.yaml").read_text())
    return {document["kind"]: document for document in loaded}


def test_every_pod_of_the_leader_worker_set_is_a_process(documents: dict[str, Any]) -> None:
    group = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    (container,) = group["workerTemplate"]["spec"]["containers"]
    assert container["command"][-2:] == ["-m", "jaxserve.serve"]
    (token,) = (each["name"] for each in container["env"])
    variables = {"WORKER_INDEX": "3", "GROUP_SIZE": f"{group['size']}", "LEADER_ADDRESS": "j-0.j"}
    arguments = [
        re.sub(r"\$\(LWS_(\w+)\)", lambda found: variables[found[1]], argument)
        for argument in container["args"]
    ]
    options = serve._parse(arguments)
    process = from_arguments(options, {token: "s3cret"})
    assert (process.process_id, process.processes) == (3, 16)
    assert (process.coordinator, process.control_address) == ("j-0.j:8476", "j-0.j:8477")
    assert process.control_bind == "[::]:8477"
    # Its settings are keys of a deployment, and the devices of a pod are the share of its process.
    deployment = read_deployment(str(LAUNCH.parent / "configs/step3-v6e.yaml"), None, options.set)
    shares = process_shares(deployment, process.processes)
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    assert {share.devices for share in shares} == {chips}
    # SIGKILL comes after the drain.
    pod = group["workerTemplate"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > deployment.server.drain_seconds
    # Probes and the Service reach ports that the processes serve.
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    server = deployment.server
    assert ports == {"http": server.http_port, "grpc": server.grpc_port}
    assert server.follower_http_port == server.http_port
    targets = {port["targetPort"] for port in documents["Service"]["spec"]["ports"]}
    assert targets == set(ports)
    assert {probe for probe in container if probe.endswith("Probe")} == {
        "readinessProbe",
        "livenessProbe",
    }
    # Every mounted volume is there.
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_slurm_script_gives_all_tasks_one_secret_and_the_arguments(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    tokens = set()
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(LAUNCH / "slurm.sbatch"), "--config", "a file.yaml"],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            cwd=LAUNCH.parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        token, *arguments = done.stdout.splitlines()
        assert re.fullmatch("[0-9a-f]{32}", token)
        tokens.add(token)
        assert arguments[-6:] == [
            *("-u", "-m", "jaxserve.serve", "--distributed", "--config", "a file.yaml")
        ]
    assert len(tokens) == 2


def test_autoscalers_read_metrics_that_exist() -> None:
    """What they scale by is measured, and what they scale exists in their API versions."""
    keda, hpa = yaml.safe_load_all((LAUNCH / "autoscale.yaml").read_text())
    assert (keda["apiVersion"], keda["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    assert (hpa["apiVersion"], hpa["kind"]) == ("autoscaling/v2", "HorizontalPodAutoscaler")
    (trigger,) = keda["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    assert {"serverAddress", "query", "threshold"} == set(trigger["metadata"])
    assert keda["spec"]["minReplicaCount"] <= keda["spec"]["maxReplicaCount"]
    assert hpa["spec"]["minReplicas"] <= hpa["spec"]["maxReplicas"]
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["target"]["type"] == "Value"
    (policy,) = hpa["spec"]["behavior"]["scaleDown"]["policies"]
    assert set(policy) == {"type", "value", "periodSeconds"}
    used = set(re.findall(r"jaxserve:(\w+)", (LAUNCH / "autoscale.yaml").read_text()))
    dashboard = (LAUNCH / "grafana-dashboard.json").read_text()
    assert used == {"worker_requests", "kv_cache_usage_perc"}
    assert all(f"jaxserve:{name}" in dashboard for name in used)
