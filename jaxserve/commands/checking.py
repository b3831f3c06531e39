"""`serve --check`: what a deployment weighs. No device is touched, and no weight is read."""

import sys

from jaxserve.checkpoint.hf import read_config
from jaxserve.config.deployment import Deployment, deployment_of
from jaxserve.errors import ConfigError
from jaxserve.fleet.membership import describe_roles
from jaxserve.roles.capacity import check_capacity, describe, memory_of


def check(deployment: Deployment) -> int:
    """Prints it; returns the exit code, 1 if it does not fit."""
    config, _ = read_config(deployment.model, deployment.ignored_model_keys, deployment.modules)
    workers = {"": deployment}
    if deployment.prefill.workers:
        workers["a prefill worker:\n"] = deployment_of(deployment, "prefill")
    parts = [describe_roles(deployment)]
    for title, worker in workers.items():
        parts.append(title + describe(config, worker, memory_of(worker)))
    print(*parts, sep="\n\n")
    try:
        for worker in workers.values():
            check_capacity(config, worker, memory_of(worker))
    except ConfigError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    return 0
