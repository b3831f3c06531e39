"""systemd: a unit a workload, for hosts that people keep.

Called by `__main__.py`, and by `cloud_tpu.py` for the hosts of a slice. Workers keep the addresses
that the deployment file gives them.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import SERVER_FILES
from jaxserve.errors import ConfigError
from jaxserve.launch.settings import (
    SPARE_SECONDS,
    Options,
    Rendering,
    deployment_text,
    filled,
    host_places,
    placed,
)
from jaxserve.launch.workloads import CONTROL_PORT, COORDINATOR_PORT, Workload, serve_arguments

HEAD = """\
# {command}
#
#   install -D -m 0644 deployment.yaml /etc/{name}/deployment.yaml
#   install -D -m 0600 {name}.env /etc/{name}/{name}.env     # the cluster's token and addresses
#   systemctl enable --now {instance}
"""


def render(rendering: Rendering) -> dict[str, str]:
    """The files by name.

    Raises:
      ConfigError: the deployment has no addresses for its workers, or one has several hosts.
    """
    options, works = rendering.options, rendering.works
    fleet, link = rendering.deployment.fleet, rendering.deployment.link
    if len(works) > 1 and fleet.registry != "static":
        raise ConfigError(f"--target systemd: fleet.registry = {fleet.registry}: give addresses")
    for work in works:
        if work.processes > 1 and len(works) > 1:
            raise ConfigError(
                f"--target systemd: a {work.kind} worker of {work.processes} processes; take "
                "slurm or kubernetes, which start them together"
            )
        if work.kind in ("prefill", "domain") and not fleet.domains:
            raise ConfigError("fleet.domains: empty; systemd needs the addresses of all workers")
    deployment = placed(rendering.deployment, host_places(rendering))
    environment = ["# openssl rand -hex 16; the same on all hosts", "JAXSERVE_CLUSTER_TOKEN="]
    units = {}
    for work in works:
        own = options.name if work.kind == "whole" else f"{options.name}-{work.kind}"
        given, instances = [], [""]
        if work.kind in ("prefill", "domain"):
            instances = [f"{number}" for number in range(work.workers)]
            given = ["--worker=%i"]
        elif work.kind == "ffn":
            instances, given = list(link.addresses), ["--listen=%i"]
        elif work.processes > 1:
            instances = [f"{number}" for number in range(work.processes)]
            given = ["--process-id=%i", f"--processes={work.processes}"]
            if not options.leader:
                raise ConfigError(
                    f"--target systemd: {work.processes} hosts; say --leader HOST, that of "
                    "process 0"
                )
            environment += [
                f"JAXSERVE_COORDINATOR={options.leader}:{COORDINATOR_PORT}",
                f"JAXSERVE_CONTROL={options.leader}:{CONTROL_PORT}",
            ]
        suffix = "@" if instances != [""] else ""
        names = [f"{own}{suffix}{instance}.service" for instance in instances]
        units[f"{own}{suffix}.service"] = HEAD.format(
            command=rendering.command, name=options.name, instance=" ".join(names)
        ) + unit(deployment, work, options, given)
    return {
        **units,
        "deployment.yaml": deployment_text(without_files(deployment)),
        f"{options.name}.env": "".join(f"{line}\n" for line in environment),
    }


def unit(deployment: Deployment, work: Workload, options: Options, given: Sequence[str]) -> str:
    """Returns the unit of a workload's processes.

    All units of a host are one user, whose files are the compiled programs. A process that has
    drained ends with 0; a wrong configuration (2) stays wrong, and memory that others have (75) may
    become free. SIGTERM drains; processes that are left afterwards are killed. A core file would
    hold keys, tokens and prompts in clear text.

    Args:
      given: arguments beside those of the workload.
    """
    server, name = deployment.server, options.name
    words = serve_arguments(deployment, work, given, f"/etc/{name}/deployment.yaml")
    credentials = []
    if work.faces:
        for key in SERVER_FILES:
            if source := getattr(server, key):
                credential = Path(source).name
                credentials.append(f"LoadCredential={credential}:{source}\n")
                words.append(f"--set=server.{key}=%d/{credential}")
        if not options.keys:
            words.append("--insecure-bind")
    return filled(
        "unit.service",
        kind=work.kind,
        command=" ".join([options.python, "-u", "-m", "jaxserve.serve", *words]),
        name=name,
        credentials="".join(credentials),
        seconds=int(server.drain_seconds) + SPARE_SECONDS,
    )


def without_files(deployment: Deployment) -> Deployment:
    """The same; the paths of keys and certificates are those of credentials, in the unit."""
    none = dict.fromkeys(SERVER_FILES, "")
    server = msgspec.structs.replace(deployment.server, **none)
    return msgspec.structs.replace(deployment, server=server)
