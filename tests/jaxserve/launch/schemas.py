"""Schemas of Kubernetes, of its extensions and of CycloneDX, as `make prepare` has fetched them.

Those of Kubernetes itself are read from the wheel of `kubernetes-validate`, that of CycloneDX from
the wheel of `cyclonedx-python-lib`; those of LeaderWorkerSet, JobSet, PodMonitor and ScaledObject
from the CustomResourceDefinitions of their pinned sources. Unknown fields are errors everywhere.
"""

import functools
import json
import zipfile
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / "build" / "schemas"
KUBERNETES = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"

needs_schemas = pytest.mark.skipif(
    not any(FOLDER.glob("kubernetes*.whl")) or len(list(FOLDER.glob("*.yaml"))) < 4,
    reason="schemas were not fetched (`make prepare`: PyPI and Go)",
)


def sbom_problems(tree: Any, version: str = "1.6") -> list[str]:
    """Violations of the schema of CycloneDX."""
    wheels = list(FOLDER.glob("cyclonedx_python_lib-*.whl"))
    if not wheels:
        pytest.skip("schema was not fetched (`make prepare`: PyPI)")
    with zipfile.ZipFile(wheels[0]) as files:

        def read(name: str) -> Any:
            name = name.rpartition("/")[2]
            return json.loads(files.read(f"cyclonedx/schema/_res/{name}"))

        schema = read(f"bom-{version}.SNAPSHOT.schema.json")
        judge = jsonschema_rs.validator_for(schema, retriever=read, validate_formats=True)
    return [
        f"{'.'.join(map(str, error.instance_path))}: {error.message}"
        for error in judge.iter_errors(tree)
    ]


def problems(tree: dict[str, Any]) -> list[str]:
    """Lists violations of the schema of an object's kind."""
    kind = (tree["apiVersion"], tree["kind"])
    return [
        f"{kind[1]}.{'.'.join(map(str, error.instance_path))}: {error.message}"
        for error in validator(*kind).iter_errors(tree)
    ]


@functools.cache
def validator(version: str, kind: str) -> Any:
    if (extended := _extended().get((version, kind))) is not None:
        return jsonschema_rs.validator_for(_strict(extended))
    definitions = _kubernetes()
    group, _, number = version.rpartition("/")
    wanted = {"group": group, "version": number, "kind": kind}
    (name,) = (
        name
        for name, schema in definitions.items()
        if wanted in schema.get("x-kubernetes-group-version-kind", ())
    )
    return jsonschema_rs.validator_for({"$ref": f"#/$defs/{name}", "$defs": definitions})


@functools.cache
def _kubernetes() -> dict[str, Any]:
    (wheel,) = FOLDER.glob("kubernetes_validate-*.whl")
    with zipfile.ZipFile(wheel) as files:
        text = files.read(KUBERNETES).decode()
    return dict(json.loads(text.replace("/api/_definitions.json#", "#"))["$defs"])


@functools.cache
def _extended() -> dict[tuple[str, str], Any]:
    found = {}
    for path in FOLDER.glob("*.yaml"):
        spec = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def _strict(schema: Any, root: bool = True) -> Any:
    """The same, without fields that it does not know; a server would drop them silently."""
    if isinstance(schema, list):
        return [_strict(each, False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _strict(each, False) for name, each in value.items()}
        if key == "properties"
        else _strict(value, False)
        for key, value in schema.items()
        if key not in ("description", "default", "x-kubernetes-validations")
    }
    free = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in made and not free:
        made["additionalProperties"] = False
    if root:
        made["properties"]["metadata"] = {"type": "object"}
    return made
