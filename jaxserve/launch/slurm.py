"""Slurm: one batch script. A runtime with all roles is one job step; so is each worker of a fleet.
Several kinds of hardware are a heterogeneous job, whose components take nodes with the feature of
their kind (`--constraint`).

Called by `__main__.py`. The text is a Bash program; `shlex` quotes the parts that vary.
"""

import shlex

from jaxserve.errors import ConfigError
from jaxserve.launch.settings import (
    Options,
    Rendering,
    deployment_text,
    filled,
    host_places,
    placed,
)
from jaxserve.launch.workloads import Workload


def render(rendering: Rendering) -> dict[str, str]:
    """Returns the script and its deployment file.

    Raises:
      ConfigError: a fleet is given spare nodes.
    """
    options = rendering.options
    config = f"{options.name}-deployment.yaml"
    deployment = placed(rendering.deployment, host_places(rendering))
    insecure = "" if options.keys else " --insecure-bind"
    works = rendering.works
    kinds = {work.hardware_name: None for work in works if work.hardware is not None}
    groups = [[work for work in works if work.hardware_name == kind] for kind in kinds]
    nodes, tasks = _size(works)
    head = filled(
        "slurm_head.sh",
        command=rendering.command,
        name=options.name,
        directives=_directives(options, groups),
        cores=_cores(groups),
        tasks=tasks,
    )
    if len(works) == 1:
        given = f"--config {shlex.quote(config)}{insecure}"
        body = filled("slurm_whole.sh", arguments=given, nodes=nodes, tasks=tasks)
    elif options.spares:
        raise ConfigError(
            f"--spares {options.spares}: workers of a fleet keep their nodes, whose names the "
            "others know"
        )
    else:
        body = _fleet(groups, works[0].kind == "router", config, insecure)
    return {f"{options.name}.sbatch": head + body, config: deployment_text(deployment)}


def _size(works: list[Workload]) -> tuple[int, int]:
    """Returns the nodes of a deployment, and the tasks on each."""
    sizes = [(work.workers, *_on_nodes(work)) for work in works]
    return sum(workers * nodes for workers, nodes, _ in sizes), max(tasks for *_, tasks in sizes)


def _directives(options: Options, groups: list[list[Workload]]) -> str:
    """Returns the options of the job, with a component for each kind of hardware."""
    lines = [f"--job-name={options.name}"]
    for number, works in enumerate(groups):
        nodes, per_node = _size(works)
        lines += ["hetjob"] if number else []
        lines += [f"--constraint={works[0].hardware_name}"] if len(groups) > 1 else []
        lines += [
            f"--nodes={nodes + options.spares}",
            f"--ntasks-per-node={per_node}",
            f"--gpus-per-node={max(_on_nodes(work)[1] * work.devices for work in works)}",
            "--gpu-bind=none",
            "--exclusive",
            "--mem=0",
            f"--time={options.time}",
        ]
        if number == 0:
            lines += ["--no-kill", "--requeue", f"--output={options.name}-%j.log"]
    return "\n".join(f"#SBATCH {line}" for line in lines)


def _of_components(variable: str, groups: list[list[Workload]]) -> list[str]:
    """Returns a variable of Slurm for each component; a job of one kind has none."""
    if len(groups) == 1:
        return [f"${variable}"]
    return [f"${{{variable}_HET_GROUP_{number}}}" for number in range(len(groups))]


def _cores(groups: list[list[Workload]]) -> str:
    """Returns the cores of a node; of several kinds of nodes, those of the smallest."""
    if len(groups) == 1:
        return "${SLURM_CPUS_ON_NODE:-$(nproc)}"
    counts = " ".join(f'"{each}"' for each in _of_components("SLURM_JOB_CPUS_PER_NODE", groups))
    return f"$(printf '%s\\n' {counts} | sed 's/[(,].*//' | sort -n | head -n 1)"


def _on_nodes(work: Workload) -> tuple[int, int]:
    """Returns the nodes of a worker and its tasks on each. The router runs beside the first."""
    if work.hardware is None:
        return 0, 1
    host = max(1, work.hardware.devices_per_host // work.devices)
    tasks = min(work.processes, host)
    return -(-work.processes // tasks), tasks


def _fleet(groups: list[list[Workload]], routed: bool, config: str, insecure: str) -> str:
    keys = {"prefill": "fleet.prefill", "domain": "fleet.domains", "ffn": "link.addresses"}
    settings, calls = ["  --set 'fleet.registry=static'"], []
    first = 0
    for number, works in enumerate(groups):
        # srun counts the nodes of a component from 0, scontrol lists those of all.
        component = f"component={number} " if len(groups) > 1 else ""
        before = first
        for work in works:
            nodes, tasks = _on_nodes(work)
            places = [first + n * nodes for n in range(work.workers)]
            first += nodes * work.workers
            if work.port:
                listening = places
                if work.kind == "ffn":
                    listening = [place + at for place in places for at in range(nodes)]
                    if tasks > 1:
                        raise ConfigError(
                            f"ffn.processes = {work.processes}: {tasks} on a node, expected 1"
                        )
                found = ", ".join(f"${{nodes[{place}]}}:{work.port}" for place in listening)
                settings.append(f'  --set "{keys[work.kind]}=[{found}]"')
            for worker, place in enumerate(places):
                given = [f"--role {work.role}"]
                if work.kind in ("prefill", "domain", "ffn"):
                    given.append(f"--worker {worker}")
                if work.processes > 1:
                    given.append("--distributed")
                at = f"{component}worker {place - before} {nodes} {work.processes}"
                calls.append(f'{at} {" ".join(given)} "${{common[@]}}" &')
    if routed:
        at = "component=0 worker" if len(groups) > 1 else "worker"
        calls.append(f'{at} 0 1 1 --role router "${{common[@]}}" &')
    return filled(
        "slurm_fleet.sh",
        nodes=",".join(_of_components("SLURM_JOB_NODELIST", groups)),
        settings="\n".join(settings),
        config=shlex.quote(config),
        insecure=insecure,
        calls="\n".join(calls),
    )
