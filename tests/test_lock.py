"""The lock is complete: an exact version and hashes of everything that pyproject.toml asks for."""

import importlib.metadata
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(
    r"^(?P<pin>\w[^\\\n]*==[^\\\n]*)(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", re.MULTILINE
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ASKED = {
    "serve": PROJECT["project"]["dependencies"],
    "cuda": EXTRAS["cuda"],
    "tpu": EXTRAS["tpu"],
    "test": EXTRAS["test"] + EXTRAS["dev"] + EXTRAS["train"],
    **PROJECT["dependency-groups"],
}


def text_of(name: str) -> str:
    """A file with those that it begins with."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return text.replace("-r serve.txt\n", text_of("serve") if name != "serve" else "")


def pins(name: str) -> Iterator[Requirement]:
    return (Requirement(found["pin"]) for found in PIN.finditer(text_of(name)))


@pytest.mark.parametrize("name", ASKED)
def test_everything_that_is_asked_for_is_locked(name: str) -> None:
    found = {canonicalize_name(pin.name): pin for pin in pins(name)}
    for asked in map(Requirement, ASKED[name]):
        pin = found[canonicalize_name(asked.name)]
        (version,) = pin.specifier
        assert version.operator == "=="
        assert asked.specifier.contains(version.version), f"{asked} is not {pin}: run `make lock`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_have_pins_with_hashes_and_name_no_index(path: Path) -> None:
    rest = PIN.sub("", path.read_text()).splitlines()
    head = "# Made by `make lock` from pyproject.toml. Do not edit."
    assert rest in ([head, "--only-binary :all:"], [head, "-r serve.txt"])
    assert {each.stem for each in FILES} == set(ASKED)


def test_a_package_has_one_version_where_it_is_installed() -> None:
    for name in ASKED:
        names = [canonicalize_name(pin.name) for pin in pins(name)]
        assert len(names) == len(set(names)), name


def test_programs_for_tpus_are_compiled_here_by_the_compiler_of_the_pod() -> None:
    """The tests' libtpu is the one of `jax[tpu]`, in the lock and where it is installed."""
    asked = map(Requirement, importlib.metadata.requires("jax") or ())
    (libtpu,) = (each.specifier for each in asked if each.name == "libtpu")
    tests, pod = (
        next(str(pin) for pin in pins(name) if pin.name == "libtpu") for name in ("test", "tpu")
    )
    assert tests == pod
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("libtpu is not installed here")
    assert installed in libtpu, f"libtpu {installed}, jax[tpu] wants {libtpu}: run `make prepare`"


def test_hashes_are_of_wheels_for_supported_platforms() -> None:
    wanted = runpy.run_path(str(ROOT / ".ci" / "lock"))["wanted"]
    linux = "manylinux_2_17_x86_64"
    supported = [
        *("py3-none-any", "py2.py3-none-any", f"cp313-cp313-{linux}.manylinux2014_x86_64"),
        *("cp39-abi3-macosx_11_0_arm64", "py3-none-manylinux_2_27_aarch64"),
    ]
    others = [
        *(f"cp311-cp311-{linux}", f"cp314-cp314t-{linux}", "cp312-cp312-musllinux_1_2_x86_64"),
        *("cp312-cp312-win_amd64", "cp312-cp312-manylinux_2_17_i686"),
    ]
    assert [tags for tags in supported if not wanted(f"a-1-{tags}.whl")] == []
    assert [tags for tags in others if wanted(f"a-1-{tags}.whl")] == []
