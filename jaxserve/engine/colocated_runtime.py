"""The runtime of a colocated deployment."""

from functools import partial
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.engine.open_model import open_model
from jaxserve.engine.runtime import Runtime
from jaxserve.roles.capacity import deployment_buckets
from jaxserve.roles.colocated import ColocatedWorker, build_colocated
from jaxserve.roles.expert_balancer import make_balancer
from jaxserve.roles.worker import Observer


def colocated_runtime(
    deployment: Deployment, *, observer: Observer | None = None, **options: Any
) -> Runtime:
    """Loads and compiles it on this process's devices; `options` and errors as of `open_model`."""
    config, names, meshes, templates, source = open_model(deployment, **options)
    built = build_colocated(templates, deployment, meshes.attention, source, names)
    driver = ColocatedWorker(*built)
    driver.observer = observer
    balancer = partial(make_balancer, templates, deployment, driver.slots)
    return Runtime(deployment, config, driver, deployment_buckets(deployment), balancer)
