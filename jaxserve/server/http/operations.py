"""The operators' routes: metrics for everybody with a key, and the rest on a port of its own.

The admin port is on loopback only. Web pages can reach loopback too, through a browser, under a
name of their own: so it answers to local names only, and changes nothing by GET.
"""

import asyncio
import logging
from typing import Literal

import msgspec

from jaxserve.server.access import is_loopback
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import Exchange
from jaxserve.server.http.responses import Status
from jaxserve.server.http.service import Service
from jaxserve.server.metrics import CONTENT_TYPE


class LogLevel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /log_level."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    logger: str = "jaxserve"


class Abort(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort."""

    request_id: str


class State(msgspec.Struct, kw_only=True):
    """The answer of /state."""

    status: str
    live: list[str]
    """Requests that have not ended."""
    load: dict[str, int | list[float]]
    """As `EngineLoad` has it."""


async def metrics(service: Service, exchange: Exchange) -> None:
    """Prometheus' exposition."""
    if service.metrics is None:
        raise HttpError(503, "the server is starting", code="starting")
    await exchange.reply(service.metrics.text(), media_type=CONTENT_TYPE)


async def state(service: Service, exchange: Exchange) -> None:
    """What runs, and how much."""
    _check_host(exchange)
    generator = service.ready()
    await exchange.reply(
        State(
            status=generator.engine.status,
            live=generator.live_ids(),
            load=msgspec.structs.asdict(generator.engine.load()),
        )
    )


async def abort(service: Service, exchange: Exchange) -> None:
    """Ends a request, whoever's it is."""
    _check_host(exchange)
    request = await exchange.read(Abort)
    if not service.ready().abort(request.request_id):
        raise HttpError(404, "no such request is running", param="request_id", code="unknown")
    await exchange.reply(Status(status="aborted"))


async def log_level(service: Service, exchange: Exchange) -> None:
    """Says more, or less, from now on."""
    _check_host(exchange)
    request = await exchange.read(LogLevel)
    if request.logger.partition(".")[0] != "jaxserve":
        raise HttpError(400, "logger: only jaxserve's own", param="logger")
    logging.getLogger(request.logger).setLevel(request.level)
    await exchange.reply(Status(status=request.level))


async def drain(service: Service, exchange: Exchange) -> None:
    """Has the process end as SIGTERM does: it finishes what runs."""
    _check_host(exchange)
    if service.on_drain is None:
        raise HttpError(503, "the server is starting", code="starting")
    await exchange.reply(Status(status="draining"))
    asyncio.get_running_loop().call_soon(service.on_drain)


def _check_host(exchange: Exchange) -> None:
    host = exchange.headers.get("host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if not is_loopback(name.strip("[]")):
        raise HttpError(403, f"host: {host[:128]!r} is no name of this machine", code="wrong_host")
