"""A fleet over two clusters finds its prefill workers there, over a network that encrypts."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.jaxserve.launch.rendered import deployment_in, files_of, objects, write
from tests.jaxserve.launch.schemas import needs_schemas, problems
from tests.jaxserve.launch.tools import judge

TWO = (
    "--config step3-prefill --target kubernetes --clusters 2 --namespace serving "
    "--peer-pods 10.8.0.0/14"
)
KUBECTL = """#!/usr/bin/env bash
echo "$*" >> calls
case "$*" in
  *"cilium status") printf 'KVStore: Ok\\nEncryption: %s\\n' "$SAYS" ;;
  *"get secret"*) printf %s "$KEPT" | base64 ;;
  *"create secret"*) echo secret ;;
  *"filename=-") cat > /dev/null ;;
esac
"""


@needs_schemas
def test_each_cluster_has_its_roles() -> None:
    files = files_of(TWO)
    kinds = {}
    for name in ("prefill.yaml", "decode.yaml", "prefill-autoscale.yaml", "decode-autoscale.yaml"):
        found = objects(files[name])
        kinds[name] = {name for kind, name in found if kind in ("LeaderWorkerSet", "Deployment")}
        for (kind, _), tree in found.items():
            assert tree["metadata"]["namespace"] == "serving"
            assert kind == "ServiceExport" or problems(tree) == []
    assert kinds["prefill.yaml"] == {"jaxserve-prefill"}
    assert kinds["decode.yaml"] == {"jaxserve-router", "jaxserve-domain"}


def test_prefill_workers_are_reached_from_the_other_cluster(tmp_path: Path) -> None:
    prefill, decode = (objects(files_of(TWO)[f"{name}.yaml"]) for name in ("prefill", "decode"))
    key = ("ConfigMap", "jaxserve")
    assert prefill[key] == decode[key]
    read = deployment_in(decode[key]["data"]["deployment.yaml"], tmp_path)
    assert read.fleet.prefill == ["jaxserve-prefill-leaders.serving.svc.clusterset.local:9100"]
    assert read.fleet.domains == ["jaxserve-domain-leaders:9100"]
    assert ("ServiceExport", "jaxserve-prefill-leaders") in prefill
    assert ("Service", "jaxserve-prefill-leaders") in prefill
    _, outside = prefill["NetworkPolicy", "jaxserve"]["spec"]["ingress"]
    assert outside["from"] == [{"ipBlock": {"cidr": "10.8.0.0/14"}}]
    assert outside["ports"] == [{"port": 9100}, {"port": 9110, "endPort": 9199}]
    assert read.cluster.ports == "9110-9199", "where pages are handed over"


@pytest.mark.parametrize(
    ("says", "kept", "code"),
    [
        ("Wireguard [cilium_wg0]", "a secret of before", 0),
        ("Wireguard", "", 0),
        ("Disabled", "", 1),
    ],
)
def test_both_get_one_secret_where_the_network_encrypts(
    says: str, kept: str, code: int, tmp_path: Path
) -> None:
    write({**files_of(TWO), "kubectl": KUBECTL, "api-keys": "k", "calls": ""}, tmp_path)
    path = f"{tmp_path}:{os.environ['PATH']}"
    more = {"PATH": path, "PREFILL": "p", "DECODE": "d", "SAYS": says, "KEPT": kept}
    command = [tmp_path / "clusters.sh", "apply"]
    done = subprocess.run(command, env={**os.environ, **more}, timeout=60, capture_output=True)
    assert done.returncode == code
    calls = (tmp_path / "calls").read_text().splitlines()
    secrets = [
        call.split("cluster-token=")[1].split(" --")[0] for call in calls if "token=" in call
    ]
    applied = [call for call in calls if call.endswith(".yaml")]
    if code:
        assert (secrets, applied) == ([], [])
        return
    assert len(set(secrets)) == 1
    assert secrets[0] == kept or (len(secrets[0]) == 32 and not kept)
    assert applied == [
        "--context=p --namespace=serving apply --filename=prefill.yaml",
        "--context=d --namespace=serving apply --filename=decode.yaml",
    ]


def test_the_script_is_clean(tmp_path: Path) -> None:
    write(files_of(TWO), tmp_path)
    judge("shellcheck", tmp_path / "clusters.sh")
