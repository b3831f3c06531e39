"""The batch script runs with stand-ins for Slurm; its steps are what `serve` takes."""

import os
import subprocess
from pathlib import Path
from typing import Any

from jaxserve import serve
from jaxserve.config.load import load_deployment
from jaxserve.fleet.membership import process_shares
from jaxserve.launch.workloads import PORTS
from tests import golden
from tests.jaxserve.launch.rendered import files_of, write
from tests.jaxserve.launch.tools import judge

WHOLE = "--config qwen3-235b-a22b --hardware h100 --target slurm"
FLEET = "--config step3-prefill --target slurm --without-keys"
KINDS = {"prefill.attention": "h20", "attention": "h800", "ffn": "a800"}
THREE = " ".join(f"--set {role}.hardware={kind}" for role, kind in KINDS.items())
THREE = f"--config demo-fleet-afd --target slurm {THREE}"
COMPONENTS = ("NODELIST", "CPUS_PER_NODE")
NAMES = ("srun", "sinfo", "scontrol")
STAND_INS = {name: golden.text(f"launch/stand-in-{name}.txt") for name in NAMES}


def run(files: dict[str, str], folder: Path, *more: str) -> list[list[str]]:
    """The calls of `srun`, each its environment's secret and its arguments."""
    write(files | STAND_INS, folder)
    judge("shellcheck", folder / "jaxserve.sbatch")
    slurm = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[0-7]"}
    for number, cores in enumerate(("64", "48(x2)", "32,16")):
        slurm |= {f"SLURM_JOB_{name}_HET_GROUP_{number}": cores for name in COMPONENTS}
    command, how = ["bash", "jaxserve.sbatch", *more], {"cwd": folder, "env": os.environ | slurm}
    done = subprocess.run(command, **how, capture_output=True, text=True, timeout=60, check=True)
    return [line.split("\x1f")[:-1] for line in done.stdout.splitlines()]


def served(call: list[str]) -> Any:
    """Options that `serve` reads from a step's command line."""
    start = call.index("jaxserve.serve") + 1
    return serve.parse(serve.parser(), call[start:])


def test_a_runtime_is_one_step(tmp_path: Path) -> None:
    files = files_of(WHOLE)
    golden.check("launch/whole.sbatch", files["jaxserve.sbatch"])
    (first,) = run(files, tmp_path, "--set", "lanes=3")
    (second,) = run(files, tmp_path)
    assert len(first[0]) == 32
    assert first[0] != second[0], "a secret a job"
    options = served(first)
    assert (options.distributed, options.set, options.insecure_bind) == (True, ["lanes=3"], False)
    read = load_deployment(tmp_path / options.config)
    assert {share.devices for share in process_shares(read, 16)} == {1}
    assert read == load_deployment("qwen3-235b-a22b", {"cluster.ports": PORTS})


def test_a_fleet_is_a_step_a_worker(tmp_path: Path) -> None:
    files = files_of(FLEET)
    golden.check("launch/fleet.sbatch", files["jaxserve.sbatch"])
    calls = run(files, tmp_path)
    steps = {(served(call).role, served(call).worker) for call in calls}
    assert steps == {*(("prefill", n) for n in range(4)), ("decode", 0), ("router", None)}
    for call in calls:
        options = served(call)
        assert options.insecure_bind
        read = load_deployment(tmp_path / options.config, options.set)
        assert read.fleet.prefill == [f"n{n}:9100" for n in range(4)]
        assert (read.fleet.domains, read.fleet.registry) == (["n4:9100"], "static")
        assert options.distributed == (options.role != "router")


def test_kinds_of_hardware_are_components_of_a_job(tmp_path: Path) -> None:
    """srun counts the nodes of each from 0; each task has the cores of the smallest node."""
    files = files_of(THREE)
    golden.check("launch/kinds.sbatch", files["jaxserve.sbatch"])
    calls = [" ".join(call[1:]).replace(str(tmp_path), "FOLDER") for call in run(files, tmp_path)]
    golden.check("launch/kinds-steps.txt", "\n".join(sorted(calls)) + "\n")


def test_it_starts_again_on_nodes_that_answer_until_its_configuration_is_wrong(tmp_path: Path):
    """The first start fails and a node dies, the second finds its configuration wrong."""
    srun = golden.text("launch/srun-whole.txt")
    python = golden.text("launch/serve-once.txt")
    script = files_of(f"{WHOLE} --spares 1")["jaxserve.sbatch"]
    stand_ins = {"srun": srun, "sinfo": STAND_INS["sinfo"], "sleep": "#!/bin/sh\n", "py": python}
    write({"jaxserve.sbatch": script, **stand_ins}, tmp_path)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHON": "./py", "SLURM_JOB_NODELIST": "n[0-2]"}
    done = subprocess.run(
        ["bash", "jaxserve.sbatch"], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert (tmp_path / "calls").read_text() == "--nodelist=n0,n1\n--nodelist=n0,n2\n"
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill", "#SBATCH --mem=0"} <= set(directives)
