"""Deployments compiled for devices that are not there: Qwen3, and nightly every shipped file.

Each runs in its own process: libtpu looks at the environment once, and JAX's settings stay.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.launch.workloads import tpu_slice
from jaxserve.planner.hardware import load_hardware
from jaxserve.serve import main as serve
from tests import golden
from tests.pallas_kernels.gpu_aot import COMPILED

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


def compile_for(
    *arguments: str, timeout: float = 550, as_on_the_pod: bool = False
) -> tuple[int, dict, str]:
    """Exit code, what --json printed, and the errors of `plan compile`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    if not as_on_the_pod:
        environment["JAX_OPTIMIZATION_LEVEL"] = "O0"  # Two thirds of the time, for slower programs.
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.plan", "compile", "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def slice_of(path, name: str) -> str:
    """The topology that `launch` asks for to run a deployment on this hardware."""
    hardware = load_hardware(name)
    return f"{name}:{tpu_slice(name, hardware, load_deployment(path).devices).topology}"


def files_for_tpus() -> dict[str, str]:
    """Shipped files whose attention role is on TPUs, with their hardware."""
    named = {path: load_deployment(path).attention.hardware for path in CONFIGS.glob("*.yaml")}
    known = {name for name in named.values() if name and load_hardware(name).platform == "tpu"}
    return {path.name: name for path, name in sorted(named.items()) if name in known}


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", files_for_tpus())
def test_every_shipped_file_for_tpus(file):
    """All programs of all buckets compile, fit into the memory, and copy no weights or pages."""
    path, deployment = CONFIGS / file, load_deployment(CONFIGS / file)
    topology = slice_of(path, files_for_tpus()[file])
    code, found, errors = compile_for(
        *("--config", str(path), "--topology", topology), timeout=7000, as_on_the_pod=True
    )
    assert code == 0, errors
    assert found["failures"] == []
    programs = found["programs"]
    assert [one["name"] for one in programs if one["copied"]] == []
    # Decode steps, in which no lane has more tokens than slots, and prefill chunks.
    whole = {"step"} if deployment.mode == "colocated" else {"enter", "attend", "ffn", "leave"}
    decode, *_, chunk = sorted(
        {one["bucket"]["tokens"] for one in programs if one["name"] == "choose"}
    )
    assert decode <= deployment.scheduler.slots < chunk
    for tokens in (decode, chunk):
        names = {one["name"] for one in programs if one["bucket"]["tokens"] == tokens}
        assert whole <= {name.partition("_")[0] for name in names}


def test_shipped_files_for_tpus_are_found():
    found = files_for_tpus()
    assert found.items() >= {"step3-v6e.yaml": "v6e", "qwen3-32b.yaml": "v6e"}.items()
    assert slice_of(CONFIGS / "step3-v7x.yaml", found["step3-v7x.yaml"]) == "v7x:2x2x4"


def test_a_decode_bucket():
    """Attention's weights are on every device, those of the FFN are divided."""
    config = ("--config", "configs/qwen3-30b-a3b.yaml", "--topology", "v6e:2x4")
    code, found, errors = compile_for(*config, "--bucket", "32x64")
    assert code == 0, errors
    assert found["failures"] == []
    layers = {program["name"]: program["layers"] for program in found["programs"]}
    once = dict.fromkeys(["choose", "score", "logprobs", "enter_moe", "leave"], 1)
    assert layers == once | {"attend_moe": 47, "ffn_moe": 48}
    for program in found["programs"]:
        assert program["copied"] == 0, program["name"]
        crosses = program["name"].startswith("ffn")
        assert bool(program["collectives"].get("all-gather")) >= crosses
    attention, ffn = found["memory"]
    assert (attention["role"], attention["devices"]) == ("attention", 4)
    assert attention["weights"] / 1e9 == pytest.approx(3.08, rel=0.01)
    assert ffn["weights"] * 4 / 1e9 == pytest.approx(58.0, rel=0.01)


DECODE = {
    "v6e:8x8": (32, "int8", "page_size: 128, pages: 768", 32, 64),
    "v7x:2x2x4": (16, "fp8", "page_size: 512, pages: 1024, format: fp8", 64, 16),
    "h200:4x8": (16, "fp8", "page_size: 128, pages: 1024, format: fp8", 64, 64),
}
"""Topology -> devices of each role, the format of weights and rows, the cache, slots, and pages of
a sequence."""


MODELS = "deepseek-v4-flash", "gpt-oss-120b", "deepseek-v3.2", "glm-5", "qwen3-next-80b-a3b"
LARGE = [(model, "h200:4x8") for model in ("qwen3.5-397b-a17b", "deepseek-v4-pro")]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "where"),
    [
        pytest.param(*each, marks=COMPILED if "h200" in each[1] else ())
        for each in [*itertools.product(MODELS, DECODE), *LARGE]
    ],
)
def test_a_decode_step(tmp_path, capsys, model, where):
    """V4-Flash has layers of five kinds, gpt-oss rows of 2,880 columns. Memory is that of
    `--check`, but for additions of the compiler. Pools, weights and embeddings are not copied."""
    path, entries = tmp_path / "deployment.yaml", golden.text("planner/decode_step.txt")
    *own, slots, pages = DECODE[where]
    first = CONFIGS / "models" / model, where.partition(":")[0]
    path.write_text(entries.format(*first, *own, slots))
    options = ("--config", str(path), "--topology", where, "--bucket", f"{slots}x{pages}")
    code, found, errors = compile_for(*options, timeout=3500)
    assert code == 0, errors
    assert [program["name"] for program in found["programs"] if program["copied"]] == []
    check_memory(path, found["memory"], capsys)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@golden.table("planner/both_roles.yaml")
def test_a_step_of_both_roles_as_one_program(file, changes, bucket, alone, tmp_path, capsys):
    """61 layers and three lanes, or 94 and two, with `attention.tp`. Neither pools, 12 to 65 GB,
    nor weights are copied. Exchanges begin before a role's computation and end after it, but for
    those of the last turns, and with two lanes for answers; in colocated mode at both ends."""
    path, text = tmp_path / "step.yaml", (CONFIGS / f"{file}.yaml").read_text()
    for old, new in changes.items():
        text = text.replace(old, str(new))
    path.write_text(text.replace("models/", f"{CONFIGS}/models/") + "pipeline: step\n")
    there = slice_of(path, file.rpartition("-")[2])
    where = ("--config", str(path), "--topology", there, "--bucket", bucket)
    code, found, errors = compile_for(*where, timeout=3500, as_on_the_pod=True)
    assert code == 0, errors
    (step,) = [program for program in found["programs"] if program["name"].startswith("step_")]
    assert step["waited_for"] == alone
    assert step["copied"] == 0
    assert step["temporaries"] < 0.03 * found["memory"][0]["cache"]
    check_memory(path, found["memory"], capsys)


def check_memory(path, memory, capsys):
    """The bytes of a role's devices are those of `--check`, which also counts the temporaries of
    prompts."""
    assert serve(["--config", str(path), "--check"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    kept = {part["role"]: (part["total"] - part["temporaries"]) / 1e9 for part in memory}
    devices = str(memory[0]["devices"])
    rows = [row for row in rows if row[1:2] == [devices] and row[0] in kept]
    activations = {row[0]: float(row[-4]) for row in rows}
    said = {row[0]: float(row[-2]) - activations[row[0]] for row in rows}
    assert kept == pytest.approx(said, rel=0.05)
    assert all(part["temporaries"] / 1e9 < activations[part["role"]] + 0.5 for part in memory)


@pytest.mark.parametrize(
    ("topology", "said"),
    [("v6e:2x2", "= 64 devices, but there are 4"), ("v99:2x2", "--topology 'v99:2x2'")],
)
def test_topologies_that_do_not_fit(topology, said):
    code, found, errors = compile_for("--config", "configs/step3-v6e.yaml", "--topology", topology)
    assert (code, found) == (2, {})
    assert said in errors
