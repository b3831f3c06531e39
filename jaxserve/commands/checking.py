"""`serve --check`: what a deployment weighs, and how what it leaves open was chosen.

No weight is read, and no device touched, unless an accelerator's memory decides over a size."""

import sys

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment, deployment_of
from jaxserve.config.model import ModelConfig
from jaxserve.config.sections import AttentionRole, FFNRole
from jaxserve.config.shipped import device_kind
from jaxserve.errors import ConfigError
from jaxserve.fleet.membership import describe_roles
from jaxserve.fleet.sizing import Sizing
from jaxserve.mesh import Role
from jaxserve.roles.capacity import check_capacity, memory_of
from jaxserve.roles.capacity_report import describe
from jaxserve.roles.kernel_coverage import kernel_gaps


def check(deployment: Deployment, sizing: Sizing | None = None) -> int:
    """Prints it; returns the exit code, 1 if it does not fit, or does not run on what it names.

    Args:
      sizing: what chose the keys that were not written.
    """
    workers = {"": deployment}
    if deployment.prefill.workers:
        workers["a prefill worker:\n"] = deployment_of(deployment, "prefill")
    models = {title: read_model(worker)[0] for title, worker in workers.items()}
    reported = sizing.reported(models[""], deployment) if sizing else {}
    parts = [describe_roles(deployment)]
    for title, worker in workers.items():
        parts.append(title + describe(models[title], worker, memory_of(worker, reported)))
    if sizing and (chosen := sizing.table()):
        parts.append("chosen, as not written:\n" + chosen)
    print(*parts, sep="\n\n")
    try:
        for title, worker in workers.items():
            check_capacity(models[title], worker, memory_of(worker, reported))
    except ConfigError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    return _check_kernels(models, workers)


def _check_kernels(models: dict[str, ModelConfig], workers: dict[str, Deployment]) -> int:
    """Prints what has no kernel on hardware that is named; returns the exit code."""
    code = 0
    for title, worker in workers.items():
        roles: dict[Role, AttentionRole | FFNRole] = {"attention": worker.attention}
        if worker.mode == "afd":
            roles["ffn"] = worker.ffn
        kinds = {role: device_kind(section.hardware) for role, section in roles.items()}
        known: dict[Role, str] = {role: kind for role, kind in kinds.items() if kind}
        if not known:
            continue
        slow, impossible = kernel_gaps(models[title], worker, known)
        names = ", ".join(f"{role} on {kind}" for role, kind in known.items())
        lines = [f"kernels ({names}): {'' if slow or impossible else 'all there'}", *slow]
        print(f"\n{title}" + "\n  ".join(lines))
        refused = impossible + (slow if worker.strict_kernels else [])
        for text in refused:
            print(f"jaxserve: {text}", file=sys.stderr)
        code = code or int(bool(refused))
    return code
