"""The image is clean, and the containers of a host find each other."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from jaxserve import serve
from tests import golden
from tests.jaxserve.launch.rendered import deployment_in, files_of
from tests.jaxserve.launch.schemas import FOLDER
from tests.jaxserve.launch.tools import judge

ONE = "--config qwen3-30b-a3b --hardware v6e --target docker"
GPUS = "--config qwen3-30b-a3b --hardware h100 --target docker"
FLEET = "--config demo-fleet-afd --hardware h100 --target docker --without-keys"


@pytest.mark.parametrize(
    ("command", "extra"), [(ONE, "tpu"), (GPUS, "cuda"), ("--config demo --target docker", "cpu")]
)
def test_the_image_is_clean(command: str, extra: str, tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    assert files_of(command.replace("docker", "image")).keys() < files_of(command).keys()
    file.write_text(files_of(command)["Dockerfile"])
    assert f"ARG EXTRA={extra}\n" in file.read_text()
    judge("hadolint", "--no-color", file)


def test_the_image_begins_with_a_digest_and_has_locked_packages() -> None:
    base = f"python:3.12-slim@sha256:{'5f' * 32}"
    files = files_of(f"{ONE} --base-image {base}")
    golden.check("launch/Dockerfile", files["Dockerfile"])
    assert "!requirements\n" in files["Dockerfile.dockerignore"]
    components = json.loads(files["sbom.cdx.json"])["components"]
    (container,) = (each for each in components if each["type"] == "container")
    assert (container["name"], container["version"]) == ("python:3.12-slim", base[17:])
    assert any(each["name"] == "libtpu" for each in components)


@pytest.mark.parametrize(("base", "code"), [("python:3.12-slim", 1), (f"p@sha256:{'5f' * 32}", 0)])
def test_without_a_digest_the_build_stops(base: str, code: int) -> None:
    """The file has no default base, and its first step refuses one without a digest."""
    dockerfile = files_of(ONE)["Dockerfile"]
    assert "\nARG BASE\nFROM ${BASE} AS build\n" in dockerfile
    step = dockerfile.partition("\nRUN ")[2].partition("\nWORKDIR")[0]
    done = subprocess.run(
        ["sh", "-c", step], env={"BASE": base}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert done.stderr == (
        "" if code == 0 else "BASE=python:3.12-slim: say python:3.12-slim@sha256:DIGEST\n"
    )


@pytest.mark.parametrize("command", [ONE, GPUS, FLEET])
def test_the_compose_file_is_what_its_schema_says(command: str) -> None:
    path = FOLDER / "compose-spec.json"
    if not path.exists():
        pytest.skip("schema was not fetched (`make prepare`: Go)")
    validator = jsonschema_rs.validator_for(json.loads(path.read_text()))
    tree = yaml.safe_load(files_of(command)["compose.yaml"])
    assert [error.message for error in validator.iter_errors(tree)] == []
    next(iter(tree["services"].values()))["comand"] = []
    assert not validator.is_valid(tree)


def services(files: dict[str, str]) -> dict[str, Any]:
    return dict(yaml.safe_load(files["compose.yaml"])["services"])


def test_one_container_has_the_devices_of_the_host(tmp_path: Path) -> None:
    files = files_of(GPUS)
    ((name, service),) = services(files).items()
    options = serve.parse(serve.parser(), service["command"])
    assert (name, options.role, options.insecure_bind) == ("jaxserve", "", False)
    assert "--host-processes=8" in service["command"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == [f"{gpu}" for gpu in range(8)]
    read = deployment_in(files["deployment.yaml"], tmp_path)
    assert read.server.api_keys == "/run/secrets/jaxserve/api-keys"
    assert "./secrets:/run/secrets/jaxserve:ro" in service["volumes"]
    (tpu,) = services(files_of(ONE)).values()
    assert tpu["devices"] == ["/dev/vfio:/dev/vfio"]
    assert not any("host-processes" in word for word in tpu["command"])


def test_a_fleet_divides_the_gpus(tmp_path: Path) -> None:
    files = files_of(FLEET)
    golden.check("launch/compose.yaml", files["compose.yaml"])
    made = services(files)
    read = deployment_in(files["deployment.yaml"], tmp_path)
    assert read.fleet.prefill == ["prefill-0:9100"]
    assert read.fleet.domains == ["domain-0:9100", "domain-1:9100"]
    assert read.link.addresses == ["ffn-0:9000"]
    given = {
        name: serve.parse(serve.parser(), service["command"]) for name, service in made.items()
    }
    domains = {"domain-0": "attention", "domain-1": "attention"}
    roles = {"router": "router", "prefill-0": "prefill", "ffn-0": "ffn"} | domains
    assert {name: options.role for name, options in given.items()} == roles
    assert (given["domain-1"].worker, given["ffn-0"].listen) == (1, "ffn-0:9000")
    for name, service in made.items():
        compile(service["healthcheck"]["test"][-1], name, "exec")


@pytest.mark.parametrize(("mode", "expected"), [("afd", 1), ("colocated", 0)])
def test_prefill_workers_with_both_roles_have_a_process_a_gpu(mode: str, expected: int) -> None:
    command = "--config demo-fleet --set mode=afd --hardware h100 --target docker --without-keys"
    made = services(files_of(f"{command} --set prefill.mode={mode}"))
    given = {name: service["command"] for name, service in made.items()}
    assert given["domain-0"].count("--host-processes=2") == 1
    assert given["prefill-0"].count("--host-processes=2") == expected
