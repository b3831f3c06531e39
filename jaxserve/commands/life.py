"""The life of a process that takes requests: bind, be ready, drain on a signal, end.

`serving.py` puts an engine into it, `routing.py` a router.
"""

import logging
import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.signals import on_signals, tell_ready
from jaxserve.logs import announce
from jaxserve.server.faces import Port
from jaxserve.server.http.server import HttpServer

LOOK_SECONDS = 0.1
"""How often the main thread wakes up on its own. Only this thread runs the handlers of signals, and
one that comes just before it goes to sleep does not wake it."""
DESCRIPTORS = 65_536
"""A process takes as many where its hard limit allows it: a connection has two."""
LAST_ANSWERS_SECONDS = 5.0
"""Wait for answers on their way to clients, after the engine has ended."""

logger = logging.getLogger("jaxserve.serve")


class Life:
    """Starts and ends the parts of a run in order.

    Args:
      deployment: gives deadlines and the operators' port.
      port: port for requests, not started.
      admin: server for operators, not started; None: the process has none.
    """

    def __init__(self, deployment: Deployment, port: Port, admin: HttpServer | None = None):
        self._deployment = deployment
        self._port = port
        self._admin = admin
        self._failure: EngineFailedError | None = None
        self._stopped = False
        """True once the port is stopped."""
        self._signals: list[int] = []
        self._drain_reason = ""
        """Why this deployment finishes its requests and ends: a signal, here or to a follower."""
        self._ready = False

    def run(self) -> int:
        """The whole life; returns the exit code."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
        self._signals = on_signals(self._drain_for)
        try:
            addresses = self._port.start()
            if self._admin is not None:
                addresses["admin"] = self._admin.start()
            self._live(addresses)
        finally:
            self._stop_port()
        return 0

    def _live(self, addresses: Mapping[str, str]) -> None:
        """From the bound ports to the end."""
        raise NotImplementedError

    def _serve(self, engine: Any, addresses: Mapping[str, str]) -> None:
        """Serves until a signal or a failure, and drains."""
        engine.add_failure_callback(self._on_failure)
        self._port.open(engine)
        if self._admin is not None:
            faces: Any = self._port
            self._admin.operate(faces.requests, faces.metrics, _terminate)
        self._ready = True
        info = engine.model_info()
        told = {key: info[key] for key in ("model", "mode", "lanes") if key in info}
        announce("ready", {**addresses, **told})
        tell_ready()
        while not self._drain_reason and self._failure is None:
            time.sleep(LOOK_SECONDS)
        if self._failure is None:
            self._drain(engine)
        self._stop_port()

    def _stop_port(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._port.stop(LAST_ANSWERS_SECONDS)
        if self._admin is not None:
            self._admin.stop(0)

    def _drain(self, engine: Any) -> None:
        """Takes nothing new and finishes what runs, within `server.drain_seconds`."""
        seconds = self._deployment.server.drain_seconds
        logger.info("%s: draining for up to %g s", self._drain_reason, seconds)
        self._port.refuse()
        deadline = time.monotonic() + seconds
        while not (idle := engine.drain(LOOK_SECONDS)) and time.monotonic() < deadline:
            pass
        if not idle:
            logger.warning("requests were still running after %g s and are cut", seconds)
        if self._failure is None:
            engine.close()

    def _drain_for(self, reason: str) -> bool:
        """Has the deployment drain, if it is ready."""
        if self._ready:
            self._drain_reason = self._drain_reason or reason
        return self._ready

    def _on_failure(self, failure: EngineFailedError) -> None:
        self._failure = failure


def _terminate() -> None:
    """Sends this process a SIGTERM: the main thread drains and ends."""
    os.kill(os.getpid(), signal.SIGTERM)
