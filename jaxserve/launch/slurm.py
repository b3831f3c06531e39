"""Slurm: one batch script. A runtime with all roles is one job step; of a fleet each worker is one.

Called by `__main__.py`. Here text is a program, in Bash; what varies is quoted by `shlex`.
"""

import shlex

from jaxserve.launch.options import Rendering, host_places
from jaxserve.launch.settings import deployment_text, placed
from jaxserve.launch.workloads import Workload

HEAD = """\
#!/usr/bin/env bash
# {command}
#
#   sbatch {name}.sbatch      from a folder that all nodes see; more arguments go to every process
#
{directives}
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"

# The secret that the processes of this job show each other; srun passes the environment on.
JAXSERVE_CLUSTER_TOKEN="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
export JAXSERVE_CLUSTER_TOKEN
PYTHON="${{PYTHON:-.venv/bin/python}}"
"""
WHOLE = """
# --distributed takes the number of this process, of all, and the first node's name from Slurm.
# If one process fails, the leader names it and ends the others; --kill-on-bad-exit ends what is
# left. --wait: seconds between the first end and that of all.
exec srun --cpu-bind=none --kill-on-bad-exit=1 --wait=120 --label \\
  "$PYTHON" -u -m jaxserve.serve --distributed {arguments} "$@"
"""
FLEET = """
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# A worker is a job step on nodes of its own; what dies is started again. scancel sends SIGTERM to
# all steps: they drain and end with 0.
worker() {{ # first node, nodes, tasks, arguments of serve
  local first=$1 count=$2 tasks=$3
  shift 3
  until srun --overlap --cpu-bind=none --relative="$first" --nodes="$count" --ntasks="$tasks" \\
    --kill-on-bad-exit=1 --wait=120 --label "$PYTHON" -u -m jaxserve.serve "$@"; do
    sleep 1
  done
}}
addresses=(
{settings}
)
common=(--config {config} "${{addresses[@]}}"{insecure} "$@")

{calls}
wait
"""


def render(rendering: Rendering) -> dict[str, str]:
    """The script and its deployment file."""
    options = rendering.options
    config = f"{options.name}-deployment.yaml"
    deployment = placed(rendering.deployment, host_places(rendering))
    insecure = "" if options.keys else " --insecure-bind"
    works = rendering.works
    head = HEAD.format(
        command=rendering.command, name=options.name, directives=_directives(options.name, works)
    )
    if len(works) == 1:
        given = f"--config {shlex.quote(config)}{insecure}"
        body = WHOLE.format(arguments=given)
    else:
        body = _fleet(works, config, insecure)
    return {f"{options.name}.sbatch": head + body, config: deployment_text(deployment)}


def _directives(name: str, works: list[Workload]) -> str:
    nodes, per_node = 0, 1
    for work in works:
        count, tasks = _on_nodes(work)
        nodes, per_node = nodes + work.workers * count, max(per_node, tasks)
    gpus = max(_gpus_on_node(work) for work in works)
    lines = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={per_node}",
        f"--gpus-per-node={gpus}",
        "--gpu-bind=none",
        "--exclusive",
        "--requeue",
        f"--output={name}-%j.log",
    ]
    return "\n".join(f"#SBATCH {line}" for line in lines)


def _on_nodes(work: Workload) -> tuple[int, int]:
    """Nodes of a worker, and its tasks on each; the router runs beside the first."""
    if work.hardware is None:
        return 0, 1
    host = max(1, work.hardware.devices_per_host // work.devices)
    tasks = min(work.processes, host)
    return -(-work.processes // tasks), tasks


def _gpus_on_node(work: Workload) -> int:
    return _on_nodes(work)[1] * work.devices


def _fleet(works: list[Workload], config: str, insecure: str) -> str:
    keys = {"prefill": "fleet.prefill", "domain": "fleet.domains", "ffn": "link.addresses"}
    settings, calls = ["  --set 'fleet.registry=static'"], []
    router = ""
    first = 0
    for work in works:
        if work.kind == "router":
            router = 'worker 0 1 1 --role router "${common[@]}" &'
            continue
        nodes, _ = _on_nodes(work)
        places = [first + n * nodes for n in range(work.workers)]
        first += nodes * work.workers
        if work.port:
            found = ", ".join(f"${{nodes[{place}]}}:{work.port}" for place in places)
            settings.append(f'  --set "{keys[work.kind]}=[{found}]"')
        for number, place in enumerate(places):
            given = [f"--role {work.role}"]
            if work.kind in ("prefill", "domain"):
                given.append(f"--worker {number}")
            if work.kind == "ffn":
                given.append(f'--listen "${{nodes[{place}]}}:{work.port}"')
            if work.processes > 1:
                given.append("--distributed")
            joined = " ".join(given)
            calls.append(f'worker {place} {nodes} {work.processes} {joined} "${{common[@]}}" &')
    if router:
        calls.append(router)
    return FLEET.format(
        settings="\n".join(settings),
        config=shlex.quote(config),
        insecure=insecure,
        calls="\n".join(calls),
    )
