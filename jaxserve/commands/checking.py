"""`serve --check`: what a deployment weighs, and how what it leaves open was chosen.

Of the weight files only what says which tensors they have is read, and no device is touched, unless
an accelerator's memory decides over a size."""

import sys
import time

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.store import has_weights, open_checkpoint
from jaxserve.checkpoint.tensors import read_once
from jaxserve.config.deployment import Deployment, deployment_of
from jaxserve.config.model import ModelConfig
from jaxserve.config.shipped import device_kind
from jaxserve.errors import CheckpointError, ConfigError, exit_code
from jaxserve.fleet.membership import describe_roles
from jaxserve.fleet.sizing import Sizing, on_named_hardware
from jaxserve.mesh import Role
from jaxserve.roles.capacity import check_capacity, memory_of
from jaxserve.roles.capacity_report import describe
from jaxserve.roles.kernel_coverage import PLATFORMS, kernel_gaps


def check(deployment: Deployment, sizing: Sizing | None = None) -> int:
    """Prints it; returns the exit code, 1 if it does not fit, or does not run on what it names, 2
    if the weight files are not those of the model.

    Args:
      sizing: what chose the keys that were not written.
    """
    with read_once():
        return _check(deployment, sizing)


def _check(deployment: Deployment, sizing: Sizing | None) -> int:
    workers = {"": deployment}
    if deployment.prefill.workers:
        workers["a prefill worker:\n"] = deployment_of(deployment, "prefill")
    begin = time.monotonic()
    read = {title: read_model(worker) for title, worker in workers.items()}
    reading = time.monotonic() - begin
    models = {
        title: on_named_hardware(config, workers[title]) for title, (config, _) in read.items()
    }
    reported = sizing.reported(models[""], deployment) if sizing else {}
    parts = [describe_roles(deployment)]
    for title, worker in workers.items():
        parts.append(title + describe(models[title], worker, memory_of(worker, reported)))
    if sizing and (chosen := sizing.table()):
        parts.append("chosen, as not written:\n" + chosen)
    print(*parts, sep="\n\n")
    wrong = [_check_files(workers[title], names, reading) for title, (_, names) in read.items()]
    try:
        for title, worker in workers.items():
            check_capacity(models[title], worker, memory_of(worker, reported))
    except ConfigError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return max(1, *wrong)
    return max(_check_kernels(models, workers), *wrong)


def _check_files(deployment: Deployment, names: CheckpointNames, reading: float) -> int:
    """Compares the tensors that the weight files say to have with those of the model, also where
    the folder is in a bucket; returns the exit code.

    Args:
      reading: seconds in which headers were read before.
    """
    begin, folder = time.monotonic() - reading, deployment.model
    try:
        if not has_weights(folder):
            print(f"\nweight files: none in {folder}; it was read as an architecture alone")
            return 0
        size = open_checkpoint(folder, names).size
    except CheckpointError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return exit_code(error)
    seconds = time.monotonic() - begin
    print(
        f"\nweight files: all tensors there, {size / 1e9:.2f} GB, headers read in {seconds:.1f} s"
    )
    return 0


def _check_kernels(models: dict[str, ModelConfig], workers: dict[str, Deployment]) -> int:
    """Prints what has no kernel on the hardware that is named, or, where none is, on every platform
    with kernels; returns the exit code."""
    code = 0
    for title, worker in workers.items():
        hardware: dict[Role, str] = {"attention": worker.attention.hardware}
        if worker.mode == "afd":
            hardware["ffn"] = worker.ffn.hardware or worker.attention.hardware
        if not any(hardware.values()):
            lines, refused = _on_every_platform(models[title], worker)
        else:
            lines, refused = _on_hardware(models[title], worker, hardware)
        print(f"\n{title}" + "\n  ".join(lines))
        for text in refused:
            print(f"jaxserve: {text}", file=sys.stderr)
        code = code or int(bool(refused))
    return code


def _on_hardware(
    config: ModelConfig, deployment: Deployment, hardware: dict[Role, str]
) -> tuple[list[str], list[str]]:
    """Lines about the hardware of roles, and what of them is refused."""
    kinds = {role: device_kind(name) for role, name in hardware.items()}
    known: dict[Role, str] = {role: kind for role, kind in kinds.items() if kind}
    slow, impossible = kernel_gaps(config, deployment, known)
    names = ", ".join(
        f"{role} on {kind or hardware[role] or 'hardware that is not named'}"
        for role, kind in kinds.items()
    )
    unknown = [f"{role}: nothing is known of it" for role in kinds if role not in known]
    complete = not (slow or impossible or unknown)
    lines = [f"kernels ({names}): {'all there' if complete else ''}", *slow, *unknown]
    return lines, impossible + (slow if deployment.strict_kernels else [])


def _on_every_platform(config: ModelConfig, deployment: Deployment) -> tuple[list[str], list[str]]:
    """Lines about platforms, one each, and what is refused: with `strict_kernels`, if none of them
    has all kernels."""
    lacking = {}
    for kind in PLATFORMS:
        kinds: dict[Role, str] = {"attention": kind}
        if deployment.mode == "afd":
            kinds["ffn"] = kind
        slow, impossible = kernel_gaps(config, deployment, kinds, steps=1)
        parts = [f"does not run: {text}" for text in impossible[:1]]
        if ops := list(dict.fromkeys(text.split(": ")[1] for text in slow)):
            parts.append(f"plain XLA, or a slow kernel, for {', '.join(ops)}")
        if parts:
            lacking[kind] = "; ".join(parts)
    begin = "kernels (no hardware is named"
    if not lacking:
        return [f"{begin}): all there on {', '.join(PLATFORMS)}"], []
    lines = [f"{begin}; attention.hardware, one of configs/hardware, gives the reasons):"]
    lines += [f"{kind}: {lacking.get(kind, 'all there')}" for kind in PLATFORMS]
    refuses = deployment.strict_kernels and len(lacking) == len(PLATFORMS)
    none = f"strict_kernels: none of {', '.join(PLATFORMS)} has all kernels that this needs"
    return lines, [none] if refuses else []
