"""Slurm: one batch script. A runtime with all roles is one job step; so is each worker of a fleet.

Called by `__main__.py`. The text is a Bash program; `shlex` quotes the parts that vary.
"""

import shlex

from jaxserve.errors import ConfigError
from jaxserve.launch.options import Options, Rendering, host_places
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

# Devices pin host memory. Slurm passes the limit on to the processes.
ulimit -l unlimited || echo "locked memory stays at $(ulimit -l) KB: PropagateResourceLimits?" >&2

# A process that finds its configuration wrong ends with 2 and leaves a file, since srun reports the
# highest exit code of all: nothing is started again then.
wrong="$PWD/.{name}-${{SLURM_JOB_ID:-0}}.wrong"
rm -f "$wrong"
# shellcheck disable=SC2016
watch='trap : TERM; code=0; "${{@:2}}" || code=$?; [[ $code != 2 ]] || touch "$1"; exit $code'
serve=(bash -c "$watch" serve "$wrong" "$PYTHON" -u -m jaxserve.serve)

# Neighbouring cores, with their memory, for each task of a node; tasks are GPUs in their order.
cpus=$((${{SLURM_CPUS_ON_NODE:-$(nproc)}} / {tasks}))
step=(srun --kill-on-bad-exit=1 --no-kill --wait=120 --label --propagate=MEMLOCK
  --cpus-per-task="$((cpus > 0 ? cpus : 1))" --cpu-bind=cores --distribution=block:block
  --mem-bind=local)
ended=
trap 'ended=1' TERM INT # scancel signals the steps itself: they drain
"""
WHOLE = """
# --distributed takes the number of this process, of all, and the first node's name from Slurm.
# If one process fails, the leader names it and ends the others; --kill-on-bad-exit ends what is
# left. --wait: seconds between the first end and that of all. Then all start again, on nodes of
# the job that answer.
while :; do
  mapfile -t up < <(sinfo --noheader --Node --responding --states=alloc,mix,comp --format=%n \\
    --nodes="$SLURM_JOB_NODELIST" | sort --unique | head -n {nodes})
  if ((${{#up[@]}} < {nodes})); then
    echo "${{#up[@]}} nodes of the job are up, {nodes} are needed" >&2
    exit 1
  fi
  code=0
  "${{step[@]}}" --nodes={nodes} --nodelist="$(IFS=,; echo "${{up[*]}}")" \\
    --ntasks-per-node={tasks} "${{serve[@]}}" --distributed \\
    {arguments} "$@" || code=$?
  if [[ -e $wrong ]]; then exit 2; fi
  if [[ $code == 0 || -n $ended ]]; then exit "$code"; fi
  sleep 5
done
"""
FLEET = """
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# A worker is a job step on nodes of its own and starts again when it dies, unless its configuration
# is wrong. scancel sends SIGTERM to all steps: they drain and end with 0.
worker() {{ # first node, nodes, tasks, arguments of serve
  local first=$1 count=$2 tasks=$3
  shift 3
  until "${{step[@]}}" --overlap --relative="$first" --nodes="$count" --ntasks="$tasks" \\
    "${{serve[@]}}" "$@"; do
    if [[ -n $ended || -e $wrong ]]; then return; fi
    sleep 1
  done
}}
addresses=(
{settings}
)
common=(--config {config} "${{addresses[@]}}"{insecure} "$@")

{calls}
while [[ -n $(jobs -pr) ]]; do wait || true; done
if [[ -e $wrong ]]; then exit 2; fi
"""


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
    nodes, tasks = _size(works)
    head = HEAD.format(
        command=rendering.command,
        name=options.name,
        directives=_directives(options, works),
        tasks=tasks,
    )
    if len(works) == 1:
        given = f"--config {shlex.quote(config)}{insecure}"
        body = WHOLE.format(arguments=given, nodes=nodes, tasks=tasks)
    elif options.spares:
        raise ConfigError(
            f"--spares {options.spares}: workers of a fleet keep their nodes, whose names the "
            "others know"
        )
    else:
        body = _fleet(works, config, insecure)
    return {f"{options.name}.sbatch": head + body, config: deployment_text(deployment)}


def _size(works: list[Workload]) -> tuple[int, int]:
    """Returns the nodes of a deployment, and the tasks on each."""
    sizes = [(work.workers, *_on_nodes(work)) for work in works]
    return sum(workers * nodes for workers, nodes, _ in sizes), max(tasks for *_, tasks in sizes)


def _directives(options: Options, works: list[Workload]) -> str:
    nodes, per_node = _size(works)
    lines = [
        f"--job-name={options.name}",
        f"--nodes={nodes + options.spares}",
        f"--ntasks-per-node={per_node}",
        f"--gpus-per-node={max(_gpus_on_node(work) for work in works)}",
        "--gpu-bind=none",
        "--exclusive",
        "--mem=0",
        f"--time={options.time}",
        "--no-kill",
        "--requeue",
        f"--output={options.name}-%j.log",
    ]
    return "\n".join(f"#SBATCH {line}" for line in lines)


def _on_nodes(work: Workload) -> tuple[int, int]:
    """Returns the nodes of a worker and its tasks on each. The router runs beside the first."""
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
