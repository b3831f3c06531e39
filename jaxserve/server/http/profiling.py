"""POST /profile of the admin port: a trace of JAX's profiler, of some seconds of this process."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.service import Service

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
    """Records on the calling thread, which a client that goes away does not end.

    Raises:
      HttpError: another profile is being recorded, or the directory cannot be written.
    """
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
