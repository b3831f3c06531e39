"""Renders files for tests, and reads them as their launchers do."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxserve import serve
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.fleet.arguments import ProcessArguments, from_arguments
from jaxserve.launch import __main__ as launch

SECRET = {"JAXSERVE_CLUSTER_TOKEN": "a long s3cret here"}


def files_of(text: str) -> dict[str, str]:
    """The files that a command line renders."""
    given = text.split()
    return launch.render(launch.parser().parse_args(given), given)


def write(files: Mapping[str, str], folder: Path) -> None:
    """Writes files, which may be executed."""
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def objects(text: str) -> dict[tuple[str, str], Any]:
    """Kubernetes objects of a file, by kind and name."""
    trees = list(yaml.safe_load_all(text))
    found = {(tree["kind"], tree["metadata"]["name"]): tree for tree in trees}
    assert len(found) == len(trees)
    return found


def deployment_in(text: str, tmp_path: Any) -> Deployment:
    """A rendered deployment file, read as `serve` does."""
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return load_deployment(path)


def process_of(container: Any, **variables: str) -> tuple[Any, ProcessArguments]:
    """Returns the options that `serve` reads from a container's command line."""
    command, arguments = container["command"], container["args"]
    assert command == ["python", "-u", "-m", "jaxserve.serve"]
    environment = {}
    for variable in container["env"]:
        name = variable["name"]
        environment[name] = variable.get("value", variables.get(name, SECRET.get(name, "")))
    known = environment | variables
    parsed = serve.parse(
        serve.parser(),
        [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each) for each in arguments],
    )
    return parsed, from_arguments(parsed, environment)


def container_of(template: Any) -> Any:
    (container,) = template["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (how,) = container[probe].keys() & {"httpGet", "tcpSocket"}
        assert container[probe][how]["port"] in ports
    return container
