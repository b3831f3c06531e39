"""A server on a thread and an event loop of its own: base class of `GrpcServer` and `HttpServer`.

An entry point can bind a port before the model is loaded, open it when the engine is ready and
drain it at the end, all from its own thread. It can also open a server that has not started: what
is called before the start is done before the first connection is accepted.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

START_SECONDS = 10.0
"""Deadline of the start, and of calls from other threads."""

logger = logging.getLogger(__name__)


class LoopThread:
    """Runs `_main`, which sets `_started` to the address, until `_stop` makes it return.

    `_main` awaits `_catch_up` once its handlers exist, before it accepts connections.

    Args:
      name: name of the server in errors.
    """

    def __init__(self, name: str):
        self._name = name
        self._started: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._lock = threading.Lock()
        self._early: list[Coroutine[Any, Any, None]] | None = []
        """Calls that `_catch_up` will run; None once it has begun."""
        self._thread = threading.Thread(
            target=self._run, name=f"{name.lower()}-server", daemon=True
        )

    def start(self) -> str:
        """Binds the port; requests are answered as not ready.

        Returns:
          the address, as "host:port".

        Raises:
          ConfigError: the address cannot be bound.
        """
        self._thread.start()
        return self._started.result(START_SECONDS)

    def stop(self, grace: float) -> None:
        """Waits up to `grace` seconds for pending responses, then closes all connections."""
        started = self._started.done() and self._started.exception() is None
        if started and self._thread.is_alive():
            self._call(self._stop(grace), grace)
            self._thread.join(START_SECONDS)
        for coroutine in self._early or []:
            coroutine.close()

    async def _main(self) -> None:
        """Serves."""
        raise NotImplementedError

    async def _stop(self, grace: float) -> None:
        """Makes `_main` return."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._started.done():
                logger.exception("the %s server died", self._name)
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._main()

    async def _catch_up(self) -> None:
        """Runs what was called before the start, in order."""
        with self._lock:
            early, self._early = self._early or [], None
        for coroutine in early:
            await coroutine

    def _post(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine on the server's loop, soon."""
        self._submit(coroutine)

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None] | None:
        """Runs a coroutine on the server's loop, soon; returns None if the start will run it."""
        with self._lock:
            if self._early is not None:
                self._early.append(coroutine)
                return None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, coroutine: Coroutine[Any, Any, None], seconds: float = 0.0) -> None:
        """Runs a coroutine on the server's loop and waits for it, unless the start will run it."""
        if (future := self._submit(coroutine)) is not None:
            future.result(seconds + START_SECONDS)
