"""Options of a renderer, beside the deployment."""

from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import SERVER_FILES, Server
from jaxserve.launch.settings import Places
from jaxserve.launch.workloads import Workload

KEYS = "/run/secrets/jaxserve"
"""Folder of API keys and certificates in a container."""
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
      name: of everything that is made.
      image: that containers run.
      base_image: image of Python, with its digest, that the image is built from; empty: said when
        it is built.
      model: the model folder where the processes run; empty: the deployment's.
      models_claim: PersistentVolumeClaim with models, mounted at /models; empty: none.
      models_bucket: of Cloud Storage, mounted there in its place (GKE's driver for gcsfuse).
      cache_claim: PersistentVolumeClaim that hosts share for compiled programs; empty: none.
      python: that hosts without containers run.
      leader: host of process 0, where nothing else says so.
      keys: whether clients must present an API key.
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


class Rendering(NamedTuple):
    """Input of a renderer.

    Attributes:
      deployment: as given.
      works: its workloads.
      options: of the command.
      command: that made it, for the head of files.
    """

    deployment: Deployment
    works: list[Workload]
    options: Options
    command: str


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
