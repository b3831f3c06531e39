"""The runtime of a deployment that is one JAX runtime, of whichever mode.

Every process of it makes one, whether it leads an engine or follows, and imports what its mode
runs.
"""

from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.engine.runtime import BuildRuntime, Runtime


def builder_of(deployment: Deployment) -> BuildRuntime:
    """What makes the runtime."""
    if deployment.topology.has("colocated"):
        from jaxserve.engine.colocated_runtime import colocated_runtime

        return colocated_runtime
    from jaxserve.engine.cell_runtime import cell_runtime

    return cell_runtime


def build_runtime(deployment: Deployment, **options: Any) -> Runtime:
    """Loads and compiles a deployment on this process's devices; `options` are an `observer`, and
    those of `open_model`.

    Raises:
      ConfigError, CheckpointError: before anything large is allocated.
    """
    return builder_of(deployment)(deployment, **options)
