"""The kernels install by themselves, without jaxserve."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import jaxserve
from tests import golden

KERNELS = Path(__file__).resolve().parents[2] / "pallas_kernels"
TRY = golden.text("pallas_kernels/try_of_wheel.txt")


def metadata(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())


def test_metadata():
    """All packages are named, and jax is the same as with jaxserve."""
    own, whole = metadata(KERNELS), metadata(KERNELS.parent)
    folders = {path.parent.relative_to(KERNELS.parent) for path in KERNELS.rglob("*.py")}
    named = own["tool"]["setuptools"]["packages"]
    assert sorted(named) == sorted(".".join(folder.parts) for folder in folders)
    for requirement in own["project"]["dependencies"]:
        assert requirement in whole["project"]["dependencies"]
    assert own["project"]["version"] == jaxserve.__version__


@pytest.mark.nightly
def test_its_wheel_works_without_jaxserve(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(KERNELS, source, ignore=shutil.ignore_patterns("__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--no-build-isolation", "--target", str(site), str(source)]
    subprocess.run(install, check=True, timeout=300)
    # Without site's .pth files, jaxserve is not to be found; its dependencies are.
    dependencies = Path(jax.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-S", "-c", TRY, str(site), str(dependencies)],
        cwd=tmp_path,
        env={"JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=300,
    )
