"""Handlers for health probes, the version and the list of models."""

import time

import jaxserve
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import Exchange
from jaxserve.server.http.responses import Model, ModelList, Status, Version
from jaxserve.server.http.service import Service

STUCK_SECONDS = 60.0
"""A step loop without an iteration for this long is not alive; steps have shorter deadlines."""


async def health(service: Service, exchange: Exchange) -> None:
    """Liveness: the process is starting, or its step loop has iterated recently."""
    loop = service.step_loop
    status = "starting" if loop is None else loop.status
    stuck = 0.0
    if loop is not None and status in ("ready", "draining"):
        stuck = time.monotonic() - loop.last_turn
    if status in ("failed", "closed") or stuck > STUCK_SECONDS:
        why = f"the step loop has not moved for {stuck:.0f} s" if stuck > STUCK_SECONDS else status
        raise HttpError(503, f"not alive: {why}", code="not_alive")
    await exchange.reply(Status(status=status))


async def ready(service: Service, exchange: Exchange) -> None:
    """Readiness: the model is loaded and warm, and the server does not drain."""
    status = service.loop_ready().status
    if status != "ready":
        raise HttpError(503, f"not ready: {status}", code="not_ready")
    await exchange.reply(Status(status="ready"))


async def version(service: Service, exchange: Exchange) -> None:
    """The version of jaxserve."""
    await exchange.reply(Version(version=jaxserve.__version__))


async def models(service: Service, exchange: Exchange) -> None:
    """The list of models: the one that is served."""
    await exchange.reply(ModelList(data=[_model(service)]))


async def model(service: Service, exchange: Exchange) -> None:
    """A model by name."""
    service.model(exchange.scope["path_params"]["model"])
    await exchange.reply(_model(service))


def _model(service: Service) -> Model:
    info = service.ready().engine.model_info()
    return Model(id=str(info["model"]), created=service.created, max_model_len=info["max_length"])
