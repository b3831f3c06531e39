"""A rehearsal on one machine: what the command renders is started, host by host, with the variables
that each launcher sets, and clients get the tokens of one process.

Hosts are network namespaces. Paths of containers are replaced, as there are none here; arguments
and variables are those of the files.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from jaxserve import LLM, SamplingParams
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.launch import kubernetes
from jaxserve.launch.settings import Options, Rendering
from jaxserve.launch.workloads import workloads
from tests import golden
from tests.jaxserve.fleet.launched import output_of, started
from tests.jaxserve.launch.hosts import END_SECONDS, Hosts, can_make_hosts, hosts, surroundings
from tests.jaxserve.launch.rendered import files_of, objects, write

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.multihost,
    pytest.mark.unoptimised,
    pytest.mark.timeout(2000),
    pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces here"),
]
THREE_KINDS = (
    "deploy --attention-hardware h20 --ffn-hardware h800 --prefill-hardware a800 --rate 5 --modes "
    "afd --prompts 64 --outputs 16 --ttft p95=500ms --tpot p95=50ms --max-devices 2 --write"
)
PROMPT, COUNT = "def fibonacci(n):\n", 24
SMALL = [
    *("lanes=1", "scheduler.slots=4", "scheduler.token_budget=16", "scheduler.token_buckets=[16]"),
    *("scheduler.max_length=256", "scheduler.page_buckets=[16]", "cluster.start_seconds=600"),
]
PROCESSES = [*SMALL, "attention.processes=1", "ffn.processes=1"]
TWO = " ".join(f"--set {setting}" for setting in PROCESSES)
KEY = "a-key-of-a-rehearsal"
SECRET = {"JAXSERVE_CLUSTER_TOKEN": "0123456789abcdef"}


@pytest.fixture(scope="module")
def expected() -> Iterator[str]:
    """The text of one process, colocated."""
    with LLM("demo", overrides=[*SMALL, "mode=colocated"]) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=COUNT, temperature=0))
        yield output.text


def answer(url: str) -> str:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}"}
    got = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def local(text: str, folder: Path) -> str:
    """The same with paths of this machine for those of a container."""
    places = {"/etc/jaxserve": folder, "/models": CONFIGS, "/run/secrets/jaxserve": folder}
    for there, here in places.items():
        text = text.replace(f"{there}/", f"{here}/")
    return text


def unpack(text: str, folder: Path) -> None:
    """The deployment file and the keys of a container."""
    (folder / "deployment.yaml").write_text(local(text, folder))
    (folder / "api-keys").write_text(f"{KEY}\n")


def start_container(made: Hosts, name: str, container: Any, folder: Path, **known: str) -> None:
    """Starts a container's command on a host, with the variables of its launcher."""
    command = [
        re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], local(word, folder))
        for word in (*container["command"], *container["args"])
    ]
    made.start(name, command, SECRET | known)


def drains(made: Hosts, number: int) -> None:
    """SIGTERM to one process ends all, in order."""
    made.processes[number].send_signal(signal.SIGTERM)
    codes = [process.wait(END_SECONDS) for process in made.processes]
    assert codes == [0] * len(codes), made.said()


def test_leader_worker_set(expected: str, tmp_path: Path) -> None:
    (text,) = files_of(f"--config demo --target kubernetes {TWO}").values()
    tree = objects(text)
    unpack(tree["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    group = tree["LeaderWorkerSet", "jaxserve"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    with hosts(["jaxserve-0.jaxserve", "jaxserve-0-1.jaxserve"], tmp_path) as made:
        for index, name in enumerate(made.addresses):
            template = group["workerTemplate" if index else "leaderTemplate"]
            (container,) = template["spec"]["containers"]
            leader = {"LWS_LEADER_ADDRESS": "jaxserve-0.jaxserve", "LWS_GROUP_SIZE": "2"}
            variables = leader | {"LWS_WORKER_INDEX": f"{index}"}
            start_container(made, name, container, tmp_path, **variables)
        url = made.wait_ready("jaxserve-0.jaxserve")
        assert answer(url) == expected
        follower = made.wait_ready("jaxserve-0-1.jaxserve")
        assert httpx.get(f"{follower}/health").status_code == 200
        drains(made, 1)


def test_job_set_of_two_slices(expected: str, tmp_path: Path) -> None:
    """A host a slice: each is number 0 of its Job."""
    deployment = load_deployment("demo", PROCESSES)
    works = workloads(deployment, slices=2, processes_of=lambda devices, kind, name: 1)
    rendering = Rendering(deployment, works, Options(model="/models/demo"), "")
    (text,) = kubernetes.render_job_set(rendering).values()
    tree = objects(text)
    unpack(tree["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    (jobs,) = tree["JobSet", "jaxserve"]["spec"]["replicatedJobs"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    assert (jobs["replicas"], jobs["template"]["spec"]["completions"]) == (2, 1)
    names = [f"jaxserve-slice-{n}-0.jaxserve" for n in range(2)]
    with hosts(names, tmp_path) as made:
        for number, name in reversed(list(enumerate(names))):
            variables = {"JOB_COMPLETION_INDEX": "0", "JAXSERVE_SLICE": f"{number}"}
            start_container(made, name, container, tmp_path, **variables)
        assert answer(made.wait_ready(names[0])) == expected
        drains(made, 0)


def test_pods_of_tpu_slices_find_their_numbers(expected: str, tmp_path: Path) -> None:
    """`--distributed` with the variables that GKE gives the pods of two slices."""
    (text,) = files_of(f"--config demo --target kubernetes {TWO}").values()
    unpack(objects(text)["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    names = [f"serve-slice-{n}-0.serve" for n in range(2)]
    command = ["python", "-u", "-m", "jaxserve.serve", "--distributed"]
    command += ["--config", str(tmp_path / "deployment.yaml")]
    with hosts(names, tmp_path) as made:
        for number, name in reversed(list(enumerate(names))):
            tpu = {"WORKER_ID": "0", "WORKER_HOSTNAMES": name, "SKIP_MDS_QUERY": "true"}
            tpu |= {"TOPOLOGY": "2x2", "ACCELERATOR_TYPE": "v6e-4"}
            scale = {"COORDINATOR_ADDRESS": f"{names[0]}:8080", "SLICE_ID": f"{number}"}
            scale |= {"NUM_SLICES": "2"}
            variables = {f"TPU_{key}": value for key, value in tpu.items()}
            variables |= {f"MEGASCALE_{key}": value for key, value in scale.items()}
            made.start(name, command, SECRET | variables)
        assert answer(made.wait_ready(names[0])) == expected
        drains(made, 1)


SRUN = golden.text("launch/srun.txt")
SINFO = "#!/bin/sh\necho node7\n"


def test_slurm(expected: str, tmp_path: Path) -> None:
    """The script itself, with a stand-in for `srun`, on one node; `tests.rehearsal` has four."""
    shared = "--set server.host=0.0.0.0 --without-keys"
    command = f"--config demo --hardware l4 --target slurm {TWO} {shared}"
    write(files_of(command) | {"srun": SRUN, "sinfo": SINFO}, tmp_path)
    with hosts(["node7"], tmp_path) as made:
        write({"on-node7": f'#!/bin/sh\nexec {shlex.join(made.on("node7"))} "$@"\n'}, tmp_path)
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
        slurm = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node7"}
        slurm |= {"SLURM_JOB_NODELIST": "node7"}
        slurm |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
        how = {"cwd": tmp_path, "env": surroundings() | own | slurm, "start_new_session": True}
        script = subprocess.Popen(["bash", "jaxserve.sbatch"], **how)
        made.processes.append(script)
        assert answer(made.wait_ready("node7")) == expected
        script.send_signal(signal.SIGTERM)
        children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
        for step in map(int, children):
            os.kill(step, signal.SIGTERM)
        assert script.wait(END_SECONDS) == 0, made.said()


def test_containers_of_a_fleet(expected: str, tmp_path: Path) -> None:
    """A host a container, found by the names of their services."""
    small = " ".join(f"--set {setting}" for setting in SMALL)
    files = files_of(f"--config demo-fleet --target docker {small}")
    unpack(files["deployment.yaml"], tmp_path)
    services = yaml.safe_load(files["compose.yaml"])["services"]
    with hosts(list(services), tmp_path) as made:
        for name, service in services.items():
            command = [local(word, tmp_path) for word in service["command"]]
            made.start(name, ["python", "-u", "-m", "jaxserve.serve", *command], SECRET)
        url = made.wait_ready("router")
        assert answer(url) == expected
        for name, service in services.items():
            check = service["healthcheck"]["test"]
            assert check[:3] == ["CMD", "python", "-c"]
            subprocess.run([*made.on(name), "python3", "-c", check[3]], check=True, timeout=30)
        for process in made.processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(END_SECONDS) for process in made.processes]
        assert codes == [0] * len(codes), made.said()


def test_a_plan_for_three_kinds_of_hardware(tmp_path: Path) -> None:
    """One command each: a plan, its check, files for a cluster, and processes of this host."""
    plan, model = str(tmp_path / "plan.yaml"), f"--model {CONFIGS / 'demo'}"
    output_of("-m", "jaxserve.plan", *THREE_KINDS.split(), plan, *model.split(), timeout=900)
    said = output_of("-m", "jaxserve.serve", "--check", "--config", plan, timeout=300)
    for role, kind in {"attention": "H20", "ffn": "H800", "prefill": "A800"}.items():
        assert re.search(rf"{role}.*NVIDIA {kind}", said, re.DOTALL), said
    text = "".join(files_of(f"--config {plan} --target kubernetes").values())
    assert {"h20", "h800", "a800"} <= set(re.findall(r"[ah]\d+", text.lower())), text
    rehearsed = f"-m jaxserve.launch --target local --fleet --rehearse --config {plan}".split()
    rehearsed += ["--set", "server.grpc_port=0", "--set", "server.http_port=0"]
    with started(rehearsed, {"JAX_PLATFORMS": "cpu"}) as run:
        url = run.wait_for(r"^\[0\] ready .* http=(\S+)", 600)[1]
        for process in (1, 2, 3):
            run.wait_for(rf"^\[{process}\] ready ", 600)
        first = answer(f"http://{url}")
        assert first
        assert answer(f"http://{url}") == first
        run.process.send_signal(signal.SIGTERM)
        assert run.end(600) == 0, run.output
