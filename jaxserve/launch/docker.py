"""Containers: the image (`Dockerfile`), its packages (`sbom.cdx.json`), and a deployment on one
host (`compose.yaml`).

Called by `__main__.py`. A Dockerfile is text. Any deployment has an image; only one that fits on a
host has a Compose file.
"""

from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.launch.packages import sbom
from jaxserve.launch.settings import (
    CACHE,
    KEYS,
    SPARE_SECONDS,
    TLS,
    TLS_FILES,
    Options,
    Places,
    Rendering,
    deployment_text,
    files_of,
    filled,
    placed,
    to_yaml,
    trees,
)
from jaxserve.launch.workloads import Workload, serve_arguments

Tree = dict[str, Any]

EXAMPLE = "python:3.12-slim"
"""Image whose digest is asked for."""
USER = 10001


def render_image(rendering: Rendering) -> dict[str, str]:
    """Returns the files of the image of any deployment.

    Raises:
      ConfigError: its roles run on different platforms, which take different packages.
    """
    options = rendering.options
    extras = _extras(rendering.works)
    if len(extras) > 1:
        raise ConfigError(
            "--target image: roles on TPUs and on GPUs take an image each; say --hardware"
        )
    extra = next(iter(extras), "cpu")
    return {
        "Dockerfile": filled(
            "Dockerfile",
            command=rendering.command,
            image=options.image,
            extra=extra,
            example=EXAMPLE,
            base=f"={options.base_image}" if options.base_image else "",
            asked="" if options.base_image else f" --build-arg BASE={EXAMPLE}@sha256:DIGEST",
            user=USER,
            cache=CACHE,
        ),
        "Dockerfile.dockerignore": filled("dockerignore"),
        "sbom.cdx.json": sbom(extra, options.base_image),
    }


def _extras(works: list[Workload]) -> set[str]:
    return {"tpu" if work.tpu else "cuda" for work in works if work.hardware is not None}


def render(rendering: Rendering) -> dict[str, str]:
    """Returns the files by name.

    Raises:
      ConfigError: the deployment does not fit on one host.
    """
    options, works = rendering.options, rendering.works
    fixed = [work for work in works if work.hardware is not None]
    devices = sum(work.workers * work.accelerators for work in fixed)
    if fixed:
        kind = fixed[0].hardware
        assert kind is not None
        if len({work.hardware_name for work in fixed}) > 1:
            raise ConfigError("--target docker: one host has one kind of hardware")
        host = kind.devices_per_host // kind.jax_devices
        if devices > host:
            raise ConfigError(
                f"--target docker: starts one host; the deployment takes {devices} of "
                f"{fixed[0].hardware_name}, a host has {host}; its image is --target image"
            )
    if several := [work for work in works if work.processes > 1]:
        raise ConfigError(
            f"--target docker: a {several[0].kind} worker of {several[0].processes} processes; a "
            "host has them in one"
        )
    if _extras(works) == {"tpu"} and sum(work.workers for work in fixed) > 1:
        raise ConfigError("--target docker: one process of a host has its TPUs")
    names = {work.kind: _services(work) for work in works}
    addresses: dict[str, Any] = {
        key: [f"{name}:{work.port}" for work in works if work.kind == kind for name in names[kind]]
        for key, kind in (("prefill", "prefill"), ("domains", "domain"), ("ffn", "ffn"))
    }
    files = files_of(rendering.deployment, options)
    places = Places(model=options.model, host="0.0.0.0", files=files, tls=TLS, **addresses)
    deployment = placed(rendering.deployment, places)
    return {
        **render_image(rendering),
        "compose.yaml": _head(rendering) + to_yaml(_compose(deployment, works, options)),
        "deployment.yaml": deployment_text(deployment),
    }


def _head(rendering: Rendering) -> str:
    lines = [
        rendering.command,
        "JAXSERVE_CLUSTER_TOKEN=$(openssl rand -hex 16) docker compose up --detach",
    ]
    files = files_of(rendering.deployment, rendering.options)
    names = [path.rpartition("/")[2] for path in files.values()]
    if names:
        lines.append(f"needs secrets/{', secrets/'.join(names)} beside this file")
    if rendering.deployment.cluster.tls:
        lines.append(f"needs tls/{', tls/'.join(TLS_FILES)} beside this file")
    return "".join(f"# {line}\n" for line in lines)


def _services(work: Workload) -> list[str]:
    """Returns one service name a worker; a router has one on one host."""
    if work.faces:
        return ["router" if work.kind == "router" else "jaxserve"]
    return [f"{work.kind}-{number}" for number in range(work.workers)]


def _compose(deployment: Deployment, works: list[Workload], options: Options) -> Tree:
    services, first = {}, 0
    for work in works:
        for number, name in enumerate(_services(work)):
            gpus = [f"{first + gpu}" for gpu in range(0 if work.tpu else work.accelerators)]
            first += len(gpus)
            services[name] = _service(deployment, work, number, name, gpus, options)
    volumes: Tree = {f"cache-{name}": {} for name in services}
    return {"name": options.name, "services": services, "volumes": volumes}


def _service(
    deployment: Deployment,
    work: Workload,
    number: int,
    name: str,
    gpus: list[str],
    options: Options,
) -> Tree:
    which = {"ffn": f"--listen={name}:{work.port}"}
    which |= dict.fromkeys(("prefill", "domain"), f"--worker={number}")
    own = [which[work.kind]] if work.kind in which else []
    given = serve_arguments(deployment, work, own)
    files = files_of(deployment, options)
    if work.faces and not files:
        given.append("--insecure-bind")
    (made,) = trees(
        "compose_service",
        work=work,
        name=name,
        gpus=gpus,
        options=options,
        server=deployment.server,
        cluster=deployment.cluster,
        files=files,
        arguments=given,
        spare_seconds=SPARE_SECONDS,
        folders={"cache": CACHE, "secrets": KEYS, "tls": TLS},
    )
    return made
