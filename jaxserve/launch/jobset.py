"""GKE: a JobSet for one runtime over one TPU slice or several, a Job a slice.

Called by `__main__.py`. A JobSet starts all its Jobs again when one fails, which suits one runtime
and no fleet.
"""

from jaxserve.errors import ConfigError
from jaxserve.launch import pods
from jaxserve.launch.kubernetes import head
from jaxserve.launch.options import Rendering
from jaxserve.launch.pods import Tree
from jaxserve.launch.settings import placed, trees

RESTARTS = 1000
"""Restarts of all Jobs before Kubernetes gives the JobSet up."""
JOBSET = "jobset.sigs.k8s.io"


def render(rendering: Rendering) -> dict[str, str]:
    """The file of the deployment.

    Raises:
      ConfigError: its roles have runtimes of their own.
    """
    options = rendering.options
    if len(rendering.works) > 1:
        kinds = ", ".join(work.kind for work in rendering.works)
        raise ConfigError(
            f"--target gke-jobset: starts all workloads anew when one fails, and here are {kinds}; "
            "take gke-lws"
        )
    (work,) = rendering.works
    deployment = placed(rendering.deployment, pods.container_places(rendering))
    given: list[str] = []
    environment: list[Tree] = []
    if work.processes > 1:
        leader = f"{options.name}-slice-0-0.{options.name}"
        given = pods.joining(leader, "$(JOB_COMPLETION_INDEX)", f"{work.processes}")
    if work.slices > 1:
        # The Job's index counts the hosts of its slice.
        given.append(f"--slices={work.slices}")
        field = {"fieldPath": f"metadata.labels['{JOBSET}/job-index']"}
        environment = [{"name": "JAXSERVE_SLICE", "valueFrom": {"fieldRef": field}}]
    template = pods.pod(deployment, work, options, given, environment=environment)
    template["spec"]["restartPolicy"] = "Never"
    metadata: Tree = {"name": options.name, "labels": pods.labels(options, work)}
    if work.tpu:
        metadata["annotations"] = {
            f"alpha.{JOBSET}/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    (job_set,) = trees(
        "jobset",
        metadata=metadata,
        restarts=RESTARTS,
        slices=work.slices,
        hosts=work.processes // work.slices,
        pod=template,
    )
    first = {
        f"{JOBSET}/jobset-name": options.name,
        f"{JOBSET}/job-index": "0",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    objects = [
        pods.config_map(deployment, options),
        job_set,
        pods.client_service(deployment, options, first),
        pods.network_policy(deployment, options),
        pods.pod_monitor(deployment, options),
    ]
    return {"jobset.yaml": f"{head(rendering, deployment)}{pods.yaml_of(options, objects)}"}
