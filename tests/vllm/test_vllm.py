"""vLLM's own endpoint tests against our server with the demo model: `make vllm`.

The tests are in vLLM's source package, which pip downloads; none is kept here. What runs, and why
the rest does not, is in `endpoint_tests.yaml`; how they find our server, in `plugin.py`.
"""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "vllm"
ENTRYPOINTS = "tests/entrypoints"
PACKAGES = ("pytest-asyncio", "jsonschema")
"""Packages that the tests need beside those of our own tests."""
DOWNLOAD_SECONDS = 600
RUN_SECONDS = 3000
TEST_SECONDS = 180

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(RUN_SECONDS + 2 * DOWNLOAD_SECONDS)]


@pytest.fixture(scope="module")
def listed() -> Any:
    return yaml.safe_load((HERE / "endpoint_tests.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def source(listed: Any) -> Path:
    """vLLM's unpacked tests, of exactly the version that the list was made for."""
    folder = BUILD / listed["package"].replace("==", "-")
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        pip += ["--no-build-isolation", "--require-hashes", "--dest", str(BUILD)]
        BUILD.mkdir(parents=True, exist_ok=True)
        wanted = BUILD / "requirements.txt"
        wanted.write_text(f"{listed['package']} --hash=sha256:{listed['sha256']}\n")
        backend = os.environ | {"PYTHONPATH": str(HERE / "backend")}
        subprocess.run(
            [*pip, "--requirement", str(wanted)], check=True, timeout=DOWNLOAD_SECONDS, env=backend
        )
        with tarfile.open(folder.with_name(f"{folder.name}.tar.gz")) as archive:
            tests = [one for one in archive if one.name.startswith(f"{folder.name}/tests/")]
            archive.extractall(BUILD, tests, filter="data")
    return folder


@pytest.fixture(scope="module")
def packages() -> Path:
    folder = BUILD / "packages"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, *PACKAGES], check=True, timeout=DOWNLOAD_SECONDS)
    return folder


def test_every_file_is_listed(source: Path, listed: Any) -> None:
    folder = source / ENTRYPOINTS
    found = {str(path.relative_to(folder)) for path in folder.rglob("test_*.py")}
    assert set(listed["files"]) <= found
    assert not set(listed["files"]) & set(listed["elsewhere"])
    for path in found - set(listed["files"]):
        above = {path, *map(str, Path(path).parents)}
        assert above & set(listed["elsewhere"]), f"{path} is not in the list"
    assert all((folder / name).exists() for name in listed["elsewhere"])


def test_what_applies_passes(source: Path, packages: Path, listed: Any) -> None:
    report = BUILD / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-c", os.devnull, "-q"]
    command += [f"--rootdir={source}", f"--confcutdir={ENTRYPOINTS}", f"--junitxml={report}"]
    command += [f"--timeout={TEST_SECONDS}", "-p", "no:cacheprovider", "--tb=short"]
    paths = os.pathsep.join((str(HERE), str(packages), str(ROOT)))
    run = subprocess.run(
        [*command, *(f"{ENTRYPOINTS}/{file}" for file in listed["files"])],
        cwd=source,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        timeout=RUN_SECONDS,
        check=False,
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped"))
    ]
    assert (failed, len(cases)) == ([], listed["passes"])
    assert run.returncode == 0
