"""Options of a renderer, beside the deployment."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import SERVER_FILES, Server
from jaxserve.launch.settings import Places
from jaxserve.launch.workloads import Workload

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
