"""A runtime that has both roles, each on devices of its own."""

from functools import partial
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.engine.open_model import open_model
from jaxserve.engine.runtime import Runtime
from jaxserve.roles.build_cell import build_cell
from jaxserve.roles.capacity import deployment_buckets
from jaxserve.roles.expert_balancer import make_balancer
from jaxserve.roles.worker import Observer


def cell_runtime(
    deployment: Deployment, *, observer: Observer | None = None, **options: Any
) -> Runtime:
    """Loads and compiles this process's part of it; `options` and errors as of `open_model`."""
    config, names, meshes, templates, source = open_model(deployment, **options)
    driver = build_cell(templates, deployment, meshes, source, names, observer)
    balancer = partial(make_balancer, templates, deployment, driver.slots)
    return Runtime(deployment, config, driver, deployment_buckets(deployment), balancer)
