"""From a deployment to an engine that is warm. Called by `llm.py`, `serve.py` and the bench."""

from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.engine.build_runtime import build_runtime
from jaxserve.engine.engine import Engine
from jaxserve.engine.make_engine import warm_engine


def build_engine(deployment: Deployment, **options: Any) -> Engine:
    """A warm engine of a deployment of whichever mode; `options` as of `warm_engine`."""
    return warm_engine(deployment, build_runtime, **options)
