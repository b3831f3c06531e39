"""The programs of examples/ against a server of the demo, each as its reader runs it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {"langchain_tools": "langchain_openai", "light_agent": "agents"}
"""Example → the package without which it is skipped."""
SAYS = {
    "chat": r"(?s).+\n.+\n",
    "tools": r'(weather \{"city": ?"(Oslo|Rome)", ?"celsius": ?(true|false)\} → .*\n){2}',
    "structured": r"mood='(good|bad)' stars=[1-5]\n",
    "batch": r"('.*' → .*\n){6}resp_\w+ ['\"]",
    "langchain_tools": r"(\{'on': (True|False)\} → (on|off)\n){2}outside=(True|False)\n",
    "light_agent": r"(?s)light (True|False)\n.*light (True|False)\n",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "jaxserve.serve", "--config", "configs/demo.yaml"]
    command += ["--set", "server.http_port=0", "--set", "server.grpc_port=0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        ready = re.search(r"\bhttp=(\S+)", server.stdout.readline())
        assert ready is not None
        yield f"http://{ready[1]}"
        server.terminate()


@pytest.mark.parametrize("name", SAYS)
def test_an_example(address: str, name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    run = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        env=os.environ | {"JAXSERVE_URL": address},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.match(SAYS[name], run.stdout), run.stdout + run.stderr


def test_the_manifests(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["examples/kubernetes.sh", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert {path.suffix for path in tmp_path.iterdir()} >= {".yaml"}


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SAYS)
