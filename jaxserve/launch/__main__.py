"""`python -m jaxserve.launch --config FILE --target gke-lws`: files to start it elsewhere.

Renders files from the deployment file: its roles, sizes, prefill workers, domains, ffn workers and
addresses. Prints the files, or writes them into a folder. Starts nothing and asks no cluster. Exit
code 2: the deployment cannot be started that way. `--target local` is the exception: it starts the
processes on this host, and has options of its own (`local/`).
"""

import argparse
import ipaddress
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jaxserve
from jaxserve.config.command_line import add_deployment_arguments, add_options, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.launch import cloud_tpu, docker, kubernetes, slurm, systemd
from jaxserve.launch.checked import on_slice, refuse_unfit, sized, with_host_memory
from jaxserve.launch.local import __main__ as local
from jaxserve.launch.settings import Options, Rendering
from jaxserve.launch.workloads import (
    Workload,
    one_process,
    processes_on_devices,
    processes_on_hosts,
    workloads,
)
from jaxserve.planner.hardware import Hardware, known_hardware, load_hardware
from jaxserve.storage.bucket import is_url


class Target(NamedTuple):
    """A way to start a deployment.

    Attributes:
      render: to files, by name.
      help: what it is.
      contained: whether processes run in containers, which have disks of their own.
      platform: of the hardware it is for; empty: any.
      processes_of: how many processes a worker's devices take.
    """

    render: Callable[[Rendering], dict[str, str]]
    help: str
    contained: bool = True
    platform: str = ""
    processes_of: Callable[[int, Hardware | None, str], int] = processes_on_hosts


TARGETS = {
    "cloud-tpu": Target(cloud_tpu.render, "a script for slices of Cloud TPU", False, "tpu"),
    "docker": Target(docker.render, "image and Compose file of one host", processes_of=one_process),
    "gke-jobset": Target(kubernetes.render_job_set, "JobSet on TPU slices of GKE", platform="tpu"),
    "gke-lws": Target(kubernetes.render, "LeaderWorkerSets on TPU slices of GKE", platform="tpu"),
    "image": Target(docker.render_image, "the image of any deployment"),
    "kubernetes": Target(kubernetes.render, "LeaderWorkerSets on any Kubernetes"),
    "slurm": Target(
        slurm.render, "a batch script, a process a GPU", False, "gpu", processes_on_devices
    ),
    "systemd": Target(systemd.render, "units, a process a host", False),
}


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m jaxserve.launch",
        description="Write what starts a deployment on a cluster or a host.",
        epilog="; ".join(f"{name}: {target.help}" for name, target in TARGETS.items())
        + "; local: starts it on this host (--target local --help)",
    )
    add_deployment_arguments(made)
    targets = sorted([*TARGETS, "local"])
    made.add_argument("--target", required=True, choices=targets, help="where it is to run")
    made.add_argument(
        "--image", default=f"jaxserve:{jaxserve.__version__}", help="of containers (%(default)s)"
    )
    add_options(made, Path(__file__).with_name("options.yaml"))
    made.set_defaults(python=Options().python, time=Options().time)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints or writes the files; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    target = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    target.add_argument("--target")
    chosen, others = target.parse_known_args(given)
    if chosen.target == "local":
        return local.main(others)
    made = parser()
    options = made.parse_args(given)
    if options.config is None and options.model is None:
        made.error("one of the arguments --config --model is required")
    try:
        rendering = rendering_of(options, given)
        files = TARGETS[options.target].render(rendering)
        if options.preflight:
            files = {
                name: text.replace("jaxserve.serve", "jaxserve.preflight")
                for name, text in files.items()
            }
        if warning := refuse_unfit(rendering.deployment, options.hardware):
            print(f"jaxserve: {warning}", file=sys.stderr)
        for line in rendering.layouts:
            print(f"jaxserve: {line}", file=sys.stderr)
        if options.write is not None:
            options.write.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                path = options.write / name
                path.write_text(text, encoding="utf-8")
                path.chmod(0o755 if text.startswith("#!") else 0o644)
                print(path, file=sys.stderr)
    except ConfigError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"jaxserve: --write {options.write}: {error.strerror or error}", file=sys.stderr)
        return 2
    if options.write is None:
        for name, text in files.items():
            print(f"##### {name}\n{text}" if len(files) > 1 else text, end="")
    return 0


def _hardware_of(work: Workload, deployment: Deployment) -> str:
    """The keys that name a workload's hardware, with their value."""
    roles = ["ffn"] if work.kind == "ffn" else ["attention"]
    if deployment.topology.has("ffn") and work.role in ("", "decode"):
        roles.append("ffn")
    keys = " and ".join(f"{role}.hardware" for role in roles)
    missing = f"{'are' if len(roles) > 1 else 'is'} missing"
    return f"{keys} {f'= {work.hardware_name}' if work.hardware_name else missing} ({work.kind})"


def _known(platform: str) -> str:
    """Hardware of this platform that is known, as in `a, b or c`."""
    *most, last = [name for name in known_hardware() if load_hardware(name).platform == platform]
    return f"{', '.join(most)} or {last}"


NAME, BUCKET = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]"
"""Names that objects of Kubernetes with a suffix of ours, units and files may have, and buckets of
Cloud Storage."""
DIGEST = "@sha256:[0-9a-f]{64}"
"""End of an image's name that always means the same image."""


def _check_names(options: argparse.Namespace) -> None:
    """Refuses names that would only fail where the files are applied."""
    if not re.fullmatch(NAME, options.name):
        raise ConfigError(
            f"--name {options.name!r}: needs 1 to 40 of a-z, 0-9 and -, a letter first, and no - "
            "at the end"
        )
    if not re.fullmatch(rf"[^\s@]+({DIGEST})?", options.image):
        raise ConfigError(
            f"--image {options.image!r}: is no image (NAME, or NAME@sha256: and 64 of 0-9, a-f)"
        )
    if options.base_image and not re.fullmatch(rf"[^\s@]+{DIGEST}", options.base_image):
        raise ConfigError(
            f"--base-image {options.base_image!r}: needs its digest, NAME@sha256: and 64 of 0-9, "
            "a-f, since a tag may come to name another image"
        )
    if options.base_image and options.target not in ("docker", "image"):
        raise ConfigError(
            f"--base-image {options.base_image}: only --target docker and image make an image"
        )
    if options.cache_bucket and not is_url(options.cache_bucket):
        raise ConfigError(f"--cache-bucket {options.cache_bucket!r}: expected gs:// or s3://")
    if options.cache_bucket and options.cache_claim:
        raise ConfigError("--cache-bucket and --cache-claim: one place for compiled programs")
    if options.namespace and not re.fullmatch(NAME, options.namespace):
        raise ConfigError(f"--namespace {options.namespace!r}: is no name of a namespace")
    if options.clusters > 1 and options.target not in ("gke-lws", "kubernetes"):
        raise ConfigError(f"--clusters {options.clusters}: take --target gke-lws or kubernetes")
    try:
        ipaddress.ip_network(options.peer_pods or "::/0")
    except ValueError as error:
        raise ConfigError(f"--peer-pods {options.peer_pods!r}: {error}") from None
    if options.spares < 0:
        raise ConfigError(f"--spares {options.spares}: expected 0 or more")
    if options.models_bucket and not re.fullmatch(BUCKET, options.models_bucket):
        raise ConfigError(
            f"--models-bucket {options.models_bucket!r}: is a bucket's name alone, of a-z, 0-9, -, "
            "_ and ."
        )


def render(options: argparse.Namespace, given: Sequence[str]) -> dict[str, str]:
    """Returns the files by name, without the check of `main`: see `rendering_of`."""
    return TARGETS[options.target].render(rendering_of(options, given))


def rendering_of(options: argparse.Namespace, given: Sequence[str]) -> Rendering:
    """Returns the input of a renderer.

    Raises:
      ConfigError: the deployment is wrong, or cannot be started that way.
    """
    target = TARGETS[options.target]
    _check_names(options)
    deployment = read_deployment(options.config, options.model, options.set)
    if options.hardware:
        deployment = sized(deployment, options.hardware)
    if options.slices < 1:
        raise ConfigError(f"--slices {options.slices}: expected 1 or more")
    lines: list[str] = []
    if options.slices == 1:
        deployment, lines = on_slice(deployment, options.hardware)
    works = workloads(deployment, options.hardware, options.slices, target.processes_of)
    for work in works:
        platform = work.hardware.platform if work.hardware else ""
        if target.platform and work.kind != "router" and platform != target.platform:
            raise ConfigError(
                f"--target {options.target}: is for a {target.platform}, and "
                f"{_hardware_of(work, deployment)}; write {_known(target.platform)} there, or say "
                "it with --hardware"
            )
    if options.slices > 1 and options.target == "gke-lws":
        raise ConfigError(
            f"--slices {options.slices}: a group of LeaderWorkerSet has one slice; take gke-jobset"
        )
    if options.slices > 1 and any(work.tpu is None for work in works):
        raise ConfigError(f"--slices {options.slices}: only TPUs come in slices")
    if options.models_bucket and not options.target.startswith("gke-"):
        raise ConfigError(f"--models-bucket {options.models_bucket}: only GKE mounts buckets")
    if target.contained and deployment.server.http_port < 1:
        raise ConfigError(
            f"server.http_port = {deployment.server.http_port}: probes need a port of HTTP"
        )
    pods = options.target in ("gke-jobset", "gke-lws", "kubernetes")
    model = options.model_path
    if target.contained and not model:
        away = is_url(deployment.model)
        model = deployment.model if away else f"/models/{Path(deployment.model).name}"
    if is_url(model) and options.models_bucket:
        raise ConfigError(
            f"--models-bucket {options.models_bucket}: the model is read from {model} without it"
        )
    tpus = {work.hardware_name for work in works if work.tpu}
    said = {name: value for name, value in vars(options).items() if name in Options._fields}
    derived = {
        "model": model,
        "models_claim": "" if is_url(model) else options.models_claim,
        "environment": _pairs("--env", options.environment),
        "node_selector": _pairs("--node-selector", options.node_selector),
        "annotations": _pairs("--pod-annotation", options.annotations),
        "rdma": next(
            iter(_pairs("--rdma", [options.rdma] if options.rdma else []).items()), ("", "")
        ),
        "gpu_kinds": len({work.hardware_name for work in works if work.accelerators} - tpus),
        "gke": options.target.startswith("gke-"),
    }
    return Rendering(
        deployment,
        [with_host_memory(work, deployment) for work in works] if pods else works,
        Options(**said | derived),
        _command(given),
        lines,
    )


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Returns NAME=VALUE arguments as a dictionary."""
    for text in given:
        if not re.fullmatch("[^=]+=.*", text, re.DOTALL):
            raise ConfigError(f"{option} {text!r}: expected NAME=VALUE")
    return dict(text.split("=", 1) for text in given)


def _command(given: Sequence[str]) -> str:
    """The command again, without where it wrote to."""
    words = list(given)
    if "--write" in words:
        at = words.index("--write")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--write=")]
    return f"python -m jaxserve.launch {shlex.join(words)}"


if __name__ == "__main__":
    sys.exit(main())
