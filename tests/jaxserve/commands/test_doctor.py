import json
import subprocess

import pytest

from jaxserve.commands import doctor

HOPPER = {
    "platform": "gpu",
    "kind": "NVIDIA H200",
    "devices": 8,
    "memory": 141 * 10**9,
    "kernels": "mosaic_gpu",
    "links": {"device_put": True, "ppermute": True, "pull": "RuntimeError: no route"},
}


@pytest.fixture(autouse=True)
def _few_deployments(monkeypatch):
    monkeypatch.setattr(doctor, "deployment_names", lambda: ["demo", "qwen3-32b", "deepseek-v3"])


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict]]:
    code = doctor.main(["--json", *arguments])
    return code, {found["name"]: found for found in json.loads(capsys.readouterr().out)}


def test_it_tries_jax_on_this_host_and_says_that_the_demo_would_run(capsys):
    code, found = findings(capsys, "--config", "demo")
    assert code == 0
    assert found["cpu"]["text"].startswith("no accelerator")
    links = [found[link]["text"] for link in ("device_put", "ppermute", "pull")]
    assert links == ["arrays arrive"] * 3
    assert found["demo"]["text"] == "would run on 2 simulated CPU devices"
    assert found["packages"]["state"] == "ok"


def test_deployments_are_judged_by_devices_and_their_memory(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda: HOPPER)
    code, found = findings(capsys)
    assert code == 0
    assert found["gpu"]["text"] == "8 x NVIDIA H200, 141.0 GB each"
    assert (found["pull"]["state"], found["pull"]["text"]) == ("wrong", "RuntimeError: no route")
    assert found["qwen3-32b"]["text"].startswith("would run: 8 devices of ")
    assert found["deepseek-v3"]["text"].endswith("this host has 8: several hosts")
    monkeypatch.setattr(doctor, "probe", lambda: {**HOPPER, "memory": 10**10})
    _, found = findings(capsys, "--config", "qwen3-32b")
    assert found["qwen3-32b"]["text"].endswith("a device here has 10 GB")


def test_without_jax_the_rest_is_still_said(capsys, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nImportError: no libtpu.so\n")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    code, found = findings(capsys, "--config", "demo")
    assert code == 1
    assert found["jax"]["text"] == "JAX does not start (exit 1): ImportError: no libtpu.so"
    assert found["demo"]["state"] == "wrong"

    def late(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(doctor.subprocess, "run", late)
    _, found = findings(capsys, "--config", "demo")
    assert "did not answer within 120 s" in found["jax"]["text"]


def test_a_deployment_of_ones_own_is_judged_and_its_mistakes_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "probe", lambda: HOPPER)
    path = tmp_path / "mine.yaml"
    path.write_text("model: nowhere\n")
    code, found = findings(capsys, "--config", str(path))
    assert code == 1
    assert found[str(path)]["state"] == "wrong"
    assert "nowhere" in found[str(path)]["text"]


def test_few_open_files_are_a_note(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda: HOPPER)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 4096))
    _, found = findings(capsys, "--config", "demo")
    assert found["open files"]["state"] == "note"
    assert found["open files"]["text"].startswith("1024 (at most 4096); below 4096")
