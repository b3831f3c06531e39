"""A running engine on this process's own devices. Called by `llm.py` and the bench.

Importing this module starts no JAX backend.
"""

from typing import TYPE_CHECKING, Any

from jaxserve.config.deployment import Deployment

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


def open_engine(deployment: Deployment, **options: Any) -> "Engine":
    """A running engine on the devices of this process; `options` as `build_engine` takes them.

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
    """
    # Only now: these imports load JAX.
    from jaxserve.engine.build import build_engine
    from jaxserve.fleet.arguments import ProcessArguments
    from jaxserve.fleet.bootstrap import initialise

    initialise(ProcessArguments(), deployment)
    engine = build_engine(deployment, **options)
    if engine.status == "starting":
        engine.start()
    return engine
