"""Options of a renderer, and the deployment file that rendered processes read: the one given, with
the cluster's addresses.

Called by `__main__.py` and the renderers.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
import msgspec
import yaml

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import SERVER_FILES, Server
from jaxserve.launch.workloads import PORTS, Workload


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


KEYS = "/run/secrets/jaxserve"
"""Folder of API keys and certificates in a container."""
TLS = "/run/secrets/jaxserve-tls"
"""Folder of `cluster.tls` in a container."""
TLS_FILES = ("ca.crt", "tls.crt", "tls.key")
CACHE = "/var/cache/jaxserve"
"""Compiled programs, in a container."""

SECRET_FILES = {
    "api_keys": "api-keys",
    "tls_certificate": "tls.crt",
    "tls_key": "tls.key",
    "tls_client_ca": "ca.crt",
}
"""Names of secret files by the keys of `server`."""


class Options(NamedTuple):
    """Options of the command.

    Attributes:
      name: name of everything that is made.
      image: image that containers run.
      base_image: image of Python, with its digest, that the image is built from; empty: given when
        it is built.
      model: model folder where the processes run; empty: the deployment's.
      models_claim: PersistentVolumeClaim with models, mounted at /models; empty: none.
      models_bucket: bucket of Cloud Storage, mounted there instead (GKE's driver for gcsfuse).
      cache_claim: PersistentVolumeClaim that hosts share for compiled programs; empty: none.
      cache_bucket: URL of a bucket's folder for compiled programs; empty: none.
      python: Python that hosts without containers run.
      leader: host of process 0, where nothing else names it.
      keys: whether clients must present an API key.
      namespace: namespace of Kubernetes; empty: the one that `kubectl` uses.
      service_account: account of Kubernetes that pods run as; empty: the namespace's default.
      pull_secrets: Secrets of Kubernetes for the image's registry.
      environment: further variables of processes.
      node_selector: labels of nodes that pods require.
      annotations: annotations of pods with accelerators, as for further networks.
      rdma: resource of the network cards of a pod with GPUs and its number; empty: none.
      privileged: whether containers with accelerators are privileged and lock any memory.
      clusters: clusters of Kubernetes: 2 have prefill workers apart.
      peer_pods: CIDR of pods of the cluster that reaches prefill workers of another.
      gpu_kinds: kinds of GPUs that the deployment runs on.
      gke: whether the cluster is GKE's.
      spares: nodes of a Slurm job beyond those that the deployment needs.
      time: time limit of a Slurm job.
    """

    name: str = "jaxserve"
    image: str = ""
    base_image: str = ""
    model: str = ""
    models_claim: str = ""
    models_bucket: str = ""
    cache_claim: str = ""
    python: str = "/opt/jaxserve/bin/python"
    leader: str = ""
    keys: bool = True
    cache_bucket: str = ""
    namespace: str = ""
    service_account: str = ""
    pull_secrets: tuple[str, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})
    node_selector: Mapping[str, str] = MappingProxyType({})
    annotations: Mapping[str, str] = MappingProxyType({})
    rdma: tuple[str, str] = ("", "")
    privileged: bool = False
    clusters: int = 1
    peer_pods: str = ""
    gpu_kinds: int = 1
    gke: bool = False
    spares: int = 0
    time: str = "24:00:00"


SPARE_SECONDS = 25
"""Time for a process to end after its drain."""


class Rendering(NamedTuple):
    """Input of a renderer.

    Attributes:
      deployment: as given.
      works: its workloads.
      options: of the command.
      command: command line that made it, for the head of files.
      layouts: layouts of the roles on a TPU slice with their hops, the chosen one first.
    """

    deployment: Deployment
    works: list[Workload]
    options: Options
    command: str
    layouts: Sequence[str] = ()


def host_places(rendering: Rendering) -> Places:
    """Places on hosts without containers. Clients of other hosts are let in with keys or client
    certificates, or where `--without-keys` or `server.open` says that they need none; otherwise
    `server.host` stays."""
    server, options = rendering.deployment.server, rendering.options
    guarded = server.api_keys or server.tls_client_ca or server.open or not options.keys
    loopback = server.host == Server().host
    return Places(model=options.model, host="0.0.0.0" if guarded and loopback else "")


def files_of(deployment: Deployment, options: Options) -> dict[str, str]:
    """Where the files of `server` are in a container."""
    there = [key for key in SERVER_FILES if getattr(deployment.server, key)]
    keys = ["api_keys"] if options.keys and "api_keys" not in there else []
    return {key: f"{KEYS}/{SECRET_FILES[key]}" for key in [*keys, *there]}
