"""A JobSet's processes know who they are from what a JobSet sets."""

import itertools

from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.membership import process_shares
from tests import golden
from tests.jaxserve.launch.rendered import (
    container_of,
    deployment_in,
    files_of,
    objects,
    process_of,
)

ONE = "--config step3-v6e --hardware v6e --target gke-jobset"


def processes(text: str, slices: int) -> list[ProcessArguments]:
    """Options that each pod of a JobSet reads from its variables."""
    (jobs,) = objects(text)["JobSet", "jaxserve"]["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    hosts = 16 // slices
    assert (jobs["replicas"], job["parallelism"], job["completions"]) == (slices, hosts, hosts)
    pods = itertools.product(range(slices), range(hosts))
    cluster = ({"JAXSERVE_SLICE": f"{a}", "JOB_COMPLETION_INDEX": f"{b}"} for a, b in pods)
    return [process_of(container_of(job["template"]), **each)[1] for each in cluster]


def test_a_job_a_slice(tmp_path) -> None:
    for slices in (1, 2):
        (text,) = files_of(f"{ONE} --slices {slices}").values()
        found = processes(text, slices)
        assert [(each.process_id, each.processes) for each in found] == [(n, 16) for n in range(16)]
        assert {each.coordinator for each in found} == {"jaxserve-slice-0-0.jaxserve:9001"}
    golden.check("launch/jobset.yaml", text)  # exit code 2 ends it
    made = objects(text)
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    roles = [share.role for share in process_shares(read, 16)]
    assert roles == ["attention"] * 8 + ["ffn"] * 8, "a slice a role"
