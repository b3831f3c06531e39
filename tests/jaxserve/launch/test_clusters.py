"""A fleet over two clusters finds its prefill workers there, over a network that encrypts."""

import os
import re
import subprocess

from tests import golden
from tests.jaxserve.launch.rendered import files_of, objects, write
from tests.jaxserve.launch.schemas import needs_schemas, problems
from tests.jaxserve.launch.tools import judge

TWO = (
    "--config step3-prefill --target kubernetes --clusters 2 --namespace serving "
    "--peer-pods 10.8.0.0/14"
)
KUBECTL = golden.text("launch/kubectl.txt")


@needs_schemas
def test_each_cluster_has_its_roles_and_one_deployment_file():
    """The prefill cluster's file shows who reaches its workers, and on which ports."""
    files = files_of(TWO)
    golden.check("launch/prefill.yaml", files["prefill.yaml"])
    trees = {name: objects(text) for name, text in files.items() if name.endswith(".yaml")}
    for found in trees.values():
        for (kind, _), tree in found.items():
            assert kind == "ServiceExport" or problems(tree) == []
    key = ("ConfigMap", "jaxserve")
    assert trees["prefill.yaml"][key] == trees["decode.yaml"][key]
    workers = ("LeaderWorkerSet", "jaxserve-domain"), ("Deployment", "jaxserve-router")
    assert trees["decode.yaml"].keys() >= set(workers)


@golden.table("launch/encryption.yaml")
def test_both_get_one_secret_where_links_are_encrypted(says, kept, given, code, tmp_path):
    write(
        {**files_of(f"{TWO} {given}"), "kubectl": KUBECTL, "api-keys": "k", "calls": ""}, tmp_path
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    more = {"PATH": path, "PREFILL": "p", "DECODE": "d", "SAYS": says, "KEPT": kept}
    command = [tmp_path / "clusters.sh", "apply"]
    judge("shellcheck", command[0])
    done = subprocess.run(command, env={**os.environ, **more}, timeout=60, capture_output=True)
    assert done.returncode == code
    calls = (tmp_path / "calls").read_text()
    secrets = re.findall("cluster-token=(.*) --from-file", calls)
    files = re.findall("--context=(.).* apply --filename=(.*).yaml", calls)
    assert files == ([] if code else [("p", "prefill"), ("d", "decode")])
    assert len(set(secrets)) == 1 - code
    assert not kept or secrets == [kept] * 2
