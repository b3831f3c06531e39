"""The list of an image's packages is what the lock says, in CycloneDX's own terms."""

import importlib.metadata
import json
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from jaxserve.launch import packages
from jaxserve.launch.packages import Locked, locked, sbom
from tests import golden
from tests.jaxserve.launch.schemas import sbom_problems

BASE = f"python:3.12-slim@sha256:{'0a' * 32}"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of three packages, beside an installed h11."""
    for name in ("serve.txt", "tpu.txt"):
        (tmp_path / name).write_text(golden.text(f"launch/lock-{name}"))
    monkeypatch.setattr(packages, "FOLDERS", (tmp_path / "none", tmp_path))


def test_packages_of_the_lock(small: None) -> None:
    assert locked("cpu") == [
        Locked("h11", "0.16.0", ["aa", "bb"]),
        Locked("msgspec", "0.1", ["dd"]),
    ]
    assert [package.name for package in locked("tpu")] == ["h11", "libtpu", "msgspec"]


def test_what_is_known_of_a_package(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.metadata.version("h11") == "0.16.0"
    monkeypatch.setattr("jaxserve.__version__", importlib.metadata.version("jaxserve"))
    tree = json.loads(sbom("cpu"))
    h11, msgspec = tree["components"]
    assert (h11["bom-ref"], h11["type"], h11["name"]) == ("pkg:pypi/h11@0.16.0", "library", "h11")
    assert h11["hashes"] == [{"alg": "SHA-256", "content": each} for each in ("aa", "bb")]
    assert h11["licenses"] == [{"license": {"name": "MIT License"}}]
    assert msgspec["purl"] == "pkg:pypi/msgspec@0.1"
    assert "licenses" not in msgspec  # another version is installed
    (own,) = tree["dependencies"]
    assert own["ref"].startswith("pkg:pypi/jaxserve@")
    assert own["dependsOn"] == ["pkg:pypi/h11@0.16.0", "pkg:pypi/msgspec@0.1"]


@golden.table("launch/licences.yaml")
def test_licences(fields: list[tuple[str, str]], expected: list[Any]) -> None:
    metadata = Message()
    for name, text in fields:
        metadata[name] = text
    assert packages.licences_of(metadata) == expected


@pytest.mark.parametrize("extra", ["cpu", "cuda", "tpu"])
def test_the_schema_is_kept(extra: str) -> None:
    tree = json.loads(sbom(extra, BASE))
    assert sbom_problems(tree) == []
    names = {component["name"] for component in tree["components"]}
    expected = {"cpu": set(), "cuda": {"jax-cuda13-plugin"}, "tpu": {"libtpu"}}
    assert names >= {"jax", "grpcio", "tokenizers", "python:3.12-slim"} | expected[extra]
    assert not names & {"pytest", "ruff", "setuptools"}
    assert all(component["hashes"] for component in tree["components"])
    del tree["components"][0]["name"]
    assert sbom_problems(tree) == ['components.0: "name" is a required property']


def test_the_same_lock_has_the_same_list() -> None:
    assert sbom("cpu", BASE) == sbom("cpu", BASE)
    numbers = {json.loads(sbom(extra, BASE))["serialNumber"] for extra in ("cpu", "tpu")}
    assert len(numbers) == 2
