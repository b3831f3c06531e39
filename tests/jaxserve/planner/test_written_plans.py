"""Files of `plan search --write` pass `serve --check` and, for TPUs, the compiler."""

import subprocess
import sys

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.planner.hardware import known_hardware, load_hardware
from jaxserve.serve import main as serve
from tests import golden
from tests.jaxserve.planner.test_aot import compile_for, slice_of

MODELS = ["qwen3-30b-a3b", "qwen3-32b", "qwen3-235b-a22b", "step3", "deepseek-v3", "kimi-k2"]
HARDWARE = [name for name in known_hardware() if load_hardware(name).platform in ("gpu", "tpu")]
MODES = {"afd": ["afd"], "colocated": ["ep", "tp"]}


def search(path, model, hardware, mode, cache) -> tuple[bool, str]:
    """Whether there is a plan, which is then in the file; and what was said of it.

    In a process of its own: checking the types of every call takes most of the time here.
    """
    asked = ["search", "--model", model, "--hardware", hardware, "--context", "4K", "--best", "1"]
    asked += ["--tpot", "100ms", "--modes", *MODES[mode], "--write", str(path)]
    asked += [] if cache == "auto" else ["--cache", cache]
    command = [sys.executable, "-m", "jaxserve.plan", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0, done.stderr


def check(path, model, hardware, mode, cache, capsys) -> bool:
    found, said = search(path, model, hardware, mode, cache)
    if not found:
        assert "what would meet it" in said or "no change" in said
        return False
    assert serve(["--config", str(path), "--check"]) == 0, capsys.readouterr().err
    deployment, one = load_deployment(path), load_hardware(hardware)
    if one.platform == "tpu":
        eight_bits = deployment.cache_format in ("fp8", "int8")
        assert deployment.cache.page_size == (256 if eight_bits else 128)
        assert one.slice_of(deployment.devices)
        assert deployment.cache_format != "fp8" or "fp8" in one.teraflops
    return True


def test_a_sample(tmp_path, capsys):
    assert check(tmp_path / "plan.yaml", "qwen3-30b-a3b", "v6e", "afd", "auto", capsys)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cache", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("model", MODELS)
def test_models_by_hardware_by_formats(tmp_path, capsys, model, hardware, mode, cache):
    """Points of their own: `-k "step3 and h800"` runs a part, `--last-failed` what failed."""
    check(tmp_path / "plan.yaml", model, hardware, mode, cache, capsys)


@pytest.mark.nightly
@pytest.mark.tpu_aot
@pytest.mark.timeout(3600)
@golden.table("planner/plans_for_tpus.yaml")
def test_plans_for_tpus_compile(tmp_path, model, hardware, mode):
    """One plan of each model, since shipped files do not have every family on TPUs."""
    path = tmp_path / "plan.yaml"
    assert search(path, model, hardware, mode, "auto")[0]
    # In a process of its own: what the tests' compile cache holds for TPUs cannot be read here.
    code, found, errors = compile_for(
        *("--config", str(path), "--topology", slice_of(path, hardware)), timeout=3500
    )
    assert code == 0, errors
    assert [program["copied"] for program in found["programs"]] == [0] * len(found["programs"])
