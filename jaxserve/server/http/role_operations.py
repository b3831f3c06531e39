"""Handlers of `/roles` on a router's admin port: workers drain, come and go while it serves."""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.fleet.rolling import WorkerStatus
from jaxserve.fleet.worker_frames import DrainMode, WorkerRole
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.service import Service


class Roles(msgspec.Struct, kw_only=True):
    """The answer of /roles."""

    workers: list[WorkerStatus]


class DrainWorker(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /roles/drain."""

    worker: str
    """The worker's address."""
    mode: Literal["finish", "move"] = "finish"
    """Whether its requests finish there, or move to others that have room."""


class ResumeWorker(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /roles/resume."""

    worker: str


class AddWorker(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /roles/add."""

    worker: str
    role: WorkerRole
    long: bool = False
    """Whether a prefill worker takes long prompts only."""


class RemoveWorker(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /roles/remove."""

    worker: str
    force: bool = False
    """Removes a worker that is not drained, too; its requests go on elsewhere."""


class RoleControl(Protocol):
    """Changes the fleet (`fleet.rolling`)."""

    def workers(self) -> list[WorkerStatus]: ...
    def drain(self, address: str, mode: DrainMode) -> WorkerStatus: ...
    def add(self, address: str, role: WorkerRole, long: bool) -> WorkerStatus: ...
    def remove(self, address: str, force: bool) -> WorkerStatus: ...


async def roles(service: Service, exchange: HttpExchange) -> None:
    """The workers of a fleet."""
    await exchange.reply(Roles(workers=_control(service).workers()))


async def drain_worker(service: Service, exchange: HttpExchange) -> None:
    """Have a worker of a fleet take nothing new."""
    order = await exchange.read(DrainWorker)
    await _answer(exchange, lambda: _control(service).drain(order.worker, order.mode))


async def resume_worker(service: Service, exchange: HttpExchange) -> None:
    """Have it take requests again."""
    order = await exchange.read(ResumeWorker)
    await _answer(exchange, lambda: _control(service).drain(order.worker, ""))


async def add_worker(service: Service, exchange: HttpExchange) -> None:
    """Look for a worker at one more address."""
    order = await exchange.read(AddWorker)
    await _answer(exchange, lambda: _control(service).add(order.worker, order.role, order.long))


async def remove_worker(service: Service, exchange: HttpExchange) -> None:
    """Look for none there any more."""
    order = await exchange.read(RemoveWorker)
    await _answer(exchange, lambda: _control(service).remove(order.worker, order.force))


async def _answer(exchange: HttpExchange, change: Callable[[], WorkerStatus]) -> None:
    try:
        status = change()
    except ConfigError as error:
        raise HttpError(409, str(error), param="worker", code="no_such_change") from None
    await exchange.reply(status)


def _control(service: Service) -> RoleControl:
    control: RoleControl | None = getattr(service.live_requests().engine, "rolling", None)
    if control is None:
        raise HttpError(404, "this process routes to no workers", code="no_fleet")
    return control
