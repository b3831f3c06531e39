"""A JobSet's processes know who they are from what a JobSet sets."""

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


def test_one_slice() -> None:
    (text,) = files_of(ONE).values()
    made = objects(text)
    spec = made["JobSet", "jaxserve"]["spec"]
    (jobs,) = spec["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert (jobs["replicas"], job["parallelism"], job["completions"]) == (1, 16, 16)
    container = container_of(job["template"])
    _, process = process_of(container, JOB_COMPLETION_INDEX="5")
    assert (process.process_id, process.processes) == (5, 16)
    assert process.coordinator == "jaxserve-slice-0-0.jaxserve:8476"


def test_a_job_a_slice(tmp_path) -> None:
    (text,) = files_of(f"{ONE} --slices 2").values()
    golden.check("launch/jobset.yaml", text)
    made = objects(text)
    (jobs,) = made["JobSet", "jaxserve"]["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert (jobs["replicas"], job["parallelism"]) == (2, 8)
    container = container_of(job["template"])
    for slice_index in range(2):
        for host in range(8):
            cluster = {"JOB_COMPLETION_INDEX": f"{host}", "JAXSERVE_SLICE": f"{slice_index}"}
            _, process = process_of(container, **cluster)
            assert (process.process_id, process.processes) == (8 * slice_index + host, 16)
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    roles = [share.role for share in process_shares(read, 16)]
    assert roles == ["attention"] * 8 + ["ffn"] * 8, "a slice a role"
