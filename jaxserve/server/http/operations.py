"""Handlers for operators: metrics on both ports, everything else on the admin port. `/roles` is on
a router's: workers drain, come and go while it serves.

The admin port is on loopback only. Web pages reach loopback through a browser: by its address, or
by a host name of their own (DNS rebinding). So it accepts local names only, changes nothing by GET,
and takes calls that change something only as JSON, which no page of another origin may send.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from jaxserve.errors import ConfigError
from jaxserve.fleet.rolling import FleetProposal, WorkerStatus
from jaxserve.fleet.worker_frames import DrainMode, WorkerRole
from jaxserve.observe.load import EngineLoad
from jaxserve.roles.worker import Proposal
from jaxserve.server.access import is_loopback
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.responses import Status
from jaxserve.server.http.service import Service
from jaxserve.server.metrics import CONTENT_TYPE

LONGEST_SECONDS = 60.0
"""A trace holds every operation of every device: longer ones fill memory and disk."""


class Profile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /profile."""

    directory: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Where the trace goes, an absolute path on the server; created if it is missing."""
    seconds: Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)] = 5.0


class Profiled(msgspec.Struct, kw_only=True):
    """The answer of /profile."""

    directory: str
    files: list[str]
    """Files of the trace, relative to the directory; TensorBoard and ui.perfetto.dev read them."""


_running = threading.Lock()


async def profile(service: Service, exchange: HttpExchange) -> None:
    """Record some seconds with JAX's profiler."""
    request = await exchange.read(Profile)
    service.live_requests()
    if "jax" not in sys.modules:
        raise HttpError(404, "this process runs no devices: ask its workers", code="no_devices")
    await exchange.reply(await asyncio.to_thread(_recorded, request))


def _recorded(request: Profile) -> Profiled:
    """Records on the calling thread, which a client that goes away does not end. Raises HttpError
    if another profile is being recorded, or the directory cannot be written."""
    directory = Path(request.directory)
    if not directory.is_absolute():
        raise HttpError(400, "directory: is no absolute path", param="directory")
    if not _running.acquire(blocking=False):
        raise HttpError(409, "a profile is being recorded", code="profiling")
    profiler = sys.modules["jax"].profiler
    try:
        directory.mkdir(parents=True, exist_ok=True)
        before = set(directory.rglob("*"))
        profiler.start_trace(str(directory))
        time.sleep(request.seconds)
        profiler.stop_trace()
    except (OSError, RuntimeError, ValueError) as error:
        raise HttpError(400, f"directory: {error}", param="directory") from None
    finally:
        _running.release()
    files = sorted(set(directory.rglob("*")) - before)
    names = [str(file.relative_to(directory)) for file in files if file.is_file()]
    return Profiled(directory=str(directory), files=names)


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


class WantDomains(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /roles/domains."""

    domains: Annotated[int, msgspec.Meta(ge=1)]
    """Workers that are to be domains. The others compute prompts."""


class RoleControl(Protocol):
    """Changes the fleet (`fleet.rolling`)."""

    def workers(self) -> list[WorkerStatus]: ...
    def drain(self, address: str, mode: DrainMode) -> WorkerStatus: ...
    def add(self, address: str, role: WorkerRole, long: bool) -> WorkerStatus: ...
    def remove(self, address: str, force: bool) -> WorkerStatus: ...
    def want(self, domains: int) -> list[WorkerStatus]: ...


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


async def want_domains(service: Service, exchange: HttpExchange) -> None:
    """Have workers of a fleet change their role (`fleet.rebalance_roles`)."""
    order = await exchange.read(WantDomains)
    control = _control(service)
    await _answer(exchange, lambda: Roles(workers=control.want(order.domains)), "domains")


async def _answer(
    exchange: HttpExchange, change: Callable[[], WorkerStatus | Roles], param: str = "worker"
) -> None:
    try:
        status = change()
    except ConfigError as error:
        raise HttpError(409, str(error), param=param, code="no_such_change") from None
    await exchange.reply(status)


def _control(service: Service) -> RoleControl:
    control: RoleControl | None = getattr(service.live_requests().engine, "rolling", None)
    if control is None:
        raise HttpError(404, "this process routes to no workers", code="no_fleet")
    return control


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
    load: EngineLoad


async def metrics(service: Service, exchange: HttpExchange) -> None:
    """Prometheus metrics."""
    if service.metrics is None:
        raise HttpError(503, "the server is starting", code="starting")
    await exchange.reply(service.metrics.text(), media_type=CONTENT_TYPE)


async def state(service: Service, exchange: HttpExchange) -> None:
    """Running requests and the load."""
    requests = service.live_requests()
    await exchange.reply(
        State(
            status=requests.engine.status,
            live=requests.live_ids(),
            load=requests.engine.load(),
        )
    )


async def abort(service: Service, exchange: HttpExchange) -> None:
    """End a request."""
    request = await exchange.read(Abort)
    if not service.live_requests().abort(request.request_id):
        raise HttpError(404, "no such request is running", param="request_id", code="unknown")
    await exchange.reply(Status(status="aborted"))


class Rebalance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /experts/rebalance."""

    dry_run: bool = False
    """Only report which experts would move, and the gain."""


class PrefixCacheReset(msgspec.Struct, kw_only=True):
    """The answer of /reset_prefix_cache."""

    freed_pages: int | None
    """Pages that are free by it; those that running requests use are freed by these. A router tells
    its workers and does not wait for them: null."""


class ExpertMover(Protocol):
    """Moves the experts of the engine's runtime (`roles.expert_balancer`), or has all domains of a
    fleet move theirs (`fleet.rolling`)."""

    def rebalance(self, *, dry_run: bool) -> Proposal | FleetProposal:
        """Proposes, and unless it is a dry run begins to move."""


async def rebalance(service: Service, exchange: HttpExchange) -> None:
    """Move experts to less busy ranks, or tell the gain that this would bring."""
    request = await exchange.read(Rebalance)
    engine = service.live_requests().engine
    mover: ExpertMover | None = getattr(engine, "experts", None) or getattr(engine, "rolling", None)
    if mover is None:
        raise HttpError(404, "no experts are moved from here", code="no_experts")
    try:
        proposal = await asyncio.to_thread(mover.rebalance, dry_run=request.dry_run)
    except ValueError as error:
        raise HttpError(409, str(error), code="moving") from None
    await exchange.reply(proposal)


async def reset_prefix_cache(service: Service, exchange: HttpExchange) -> None:
    """Forget the KV pages of earlier prompts."""
    reset = getattr(service.live_requests().engine, "reset_prefix_cache", None)
    if reset is None:
        raise HttpError(404, "this process has no prefix cache", code="no_prefix_cache")
    await exchange.reply(PrefixCacheReset(freed_pages=await asyncio.to_thread(reset)))


async def log_level(service: Service, exchange: HttpExchange) -> None:
    """Log more or less."""
    request = await exchange.read(LogLevel)
    if request.logger.partition(".")[0] != "jaxserve":
        raise HttpError(400, "logger: only jaxserve's own", param="logger")
    logging.getLogger(request.logger).setLevel(request.level)
    await exchange.reply(Status(status=request.level))


async def drain(service: Service, exchange: HttpExchange) -> None:
    """Finish what runs and end the process."""
    if service.on_drain is None:
        raise HttpError(503, "the server is starting", code="starting")
    await exchange.reply(Status(status="draining"))
    asyncio.get_running_loop().call_soon(service.on_drain)


def check_caller(exchange: HttpExchange) -> None:
    """Refuses calls that a web page of another origin may have made.

    Raises:
      HttpError: the host is no name of this machine (403), or a call that changes something comes
        from a page of another origin (403) or is not sent as JSON (415).
    """
    host = exchange.headers.get("host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if not is_loopback(name.strip("[]")):
        raise HttpError(403, f"host: {host[:128]!r} is no name of this machine", code="wrong_host")
    if exchange.scope["method"] == "GET":
        return
    origin = exchange.headers.get("origin", "")
    if origin and origin not in (f"http://{host}", f"https://{host}"):
        raise HttpError(403, f"origin: {origin[:128]!r} is another one", code="wrong_origin")
    exchange.check_json()
