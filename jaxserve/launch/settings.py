"""The deployment file that rendered processes read: the one given, with the cluster's addresses.

Called by `__main__.py`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import yaml

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import SERVER_FILES
from jaxserve.launch.workloads import PORTS


class Places(NamedTuple):
    """Where things are for processes that a cluster starts.

    Attributes:
      model: the model folder there; empty: as the deployment says.
      host: that process 0 listens on for clients; empty: as the deployment says.
      files: path of each file of `server`, by its key.
      tls: folder of `cluster.tls`, if the deployment has it; empty: as it says.
      prefill, domains, ffn: where workers listen, or names of Services; empty: as it says.
      registry: how routers understand them.
      follower_port: where processes other than 0 answer probes; -1: nowhere.
    """

    model: str = ""
    host: str = ""
    files: dict[str, str] = {}  # noqa: RUF012  (never changed)
    tls: str = ""
    prefill: Sequence[str] = ()
    domains: Sequence[str] = ()
    ffn: Sequence[str] = ()
    registry: str = "static"
    follower_port: int = -1


def placed(deployment: Deployment, places: Places) -> Deployment:
    """The deployment as its processes are to read it."""
    server = {key: places.files[key] for key in SERVER_FILES if key in places.files}
    if places.host:
        server["host"] = places.host
    replaced: dict[str, Any] = {"model": places.model or deployment.model}
    replaced["server"] = msgspec.structs.replace(
        deployment.server, follower_http_port=places.follower_port, **server
    )
    cluster = {"ports": deployment.cluster.ports or PORTS}
    if places.tls and deployment.cluster.tls:
        cluster["tls"] = places.tls
    replaced["cluster"] = msgspec.structs.replace(deployment.cluster, **cluster)
    if places.domains:
        replaced["fleet"] = msgspec.structs.replace(
            deployment.fleet,
            prefill=list(places.prefill),
            domains=list(places.domains),
            registry=places.registry,
        )
    if places.ffn:
        replaced["link"] = msgspec.structs.replace(deployment.link, addresses=list(places.ffn))
    return msgspec.structs.replace(deployment, **replaced)


def changed(values: msgspec.Struct) -> dict[str, Any]:
    """The keys that differ from their defaults, sections in order of the file's documentation."""
    tree = {}
    for field in msgspec.structs.fields(values):
        value = getattr(values, field.name)
        if isinstance(value, msgspec.Struct):
            if inner := changed(value):
                tree[field.name] = inner
        elif value != _default(field):
            tree[field.name] = msgspec.to_builtins(value)
    return tree


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def deployment_text(deployment: Deployment) -> str:
    """The deployment as YAML that `load_deployment` reads."""
    return to_yaml(changed(deployment))


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: Any) -> str:
    """YAML documents, one after the other."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def filled(template: str, /, **values: object) -> str:
    """Returns a template beside this file with a value in the place of each `@name@`."""
    text = (Path(__file__).parent / f"{template}.template").read_text(encoding="utf-8")
    return re.sub("@([a-z]+)@", lambda place: str(values[place[1]]), text)


YAML = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: msgspec.json.encode(value).decode(),
)
"""Templates of YAML, in which each `{{ value }}` becomes JSON, of which any YAML may consist."""


def trees(template: str, /, **values: object) -> list[dict[str, Any]]:
    """Returns the documents of a YAML template; a value may be a tree itself."""
    return list(yaml.safe_load_all(YAML.get_template(f"{template}.yaml.jinja").render(values)))
