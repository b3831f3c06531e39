"""One run of `serve` in the process that clients talk to: what it starts, and how it ends."""

import argparse
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineFailedError
from jaxserve.fleet import attention_runtime, bootstrap, worker
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.leader import Leader
from jaxserve.fleet.open import open_engine
from jaxserve.link.pull import PullClient
from jaxserve.observe import timeline_view
from jaxserve.observe.timeline import Recorder, merge
from jaxserve.server.access import Access
from jaxserve.server.faces import Faces, LocalFaces
from jaxserve.server.http.routes import ADMIN_ENDPOINTS
from jaxserve.server.http.server import HttpServer
from jaxserve.server.processes.host import FaceProcesses
from jaxserve.text.token_engine import TokenEngine

LOOK_SECONDS = 0.1
"""How often the main thread wakes up on its own. Only this thread runs the handlers of signals, and
one that comes just before it goes to sleep does not wake it."""
LAST_ANSWERS_SECONDS = 5.0
"""For answers on their way to clients, after the engine has ended."""

logger = logging.getLogger("jaxserve.serve")


class Serving:
    """The pieces of a run, and the order in which they start and end."""

    def __init__(
        self,
        deployment: Deployment,
        options: argparse.Namespace,
        process: ProcessArguments,
    ):
        self._deployment = deployment
        self._process = process
        self._engine: Engine | None = None
        self._link: PullClient | None = None
        self._timeline: Path | None = options.timeline
        self._recorder = Recorder() if options.timeline else None
        self._faces = _faces(deployment, options)
        self._admin = _admin_face(deployment)
        self._failure: EngineFailedError | None = None
        self._stopped = False
        """Whether the faces are."""
        self._signalled = False
        self._drain_reason = ""
        """Why this deployment is to finish what runs and end: a signal, here or to a follower."""
        self._ready = False

    def run(self) -> int:
        """The whole life; returns the exit code. With several processes it ends the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            addresses = self._faces.start()
            if self._admin is not None:
                addresses = {
                    "grpc": addresses.pop("grpc"),
                    "admin": self._admin.start(),
                    **addresses,
                }
            with bootstrap.joined(
                self._process,
                self._deployment,
                on_failure=self._on_peer_failure,
                on_drain=self._on_peer_drain,
            ) as leader:
                assert leader is None or isinstance(leader, Leader)
                self._serve(leader, addresses)
        finally:
            self._stop_faces()
        return 0

    def _serve(self, leader: Leader | None, addresses: Mapping[str, str]) -> None:
        engine = self._engine = self._open_engine(leader)
        engine.add_failure_callback(self._on_failure)
        self._faces.open(engine)
        if self._admin is not None:
            self._admin.operate(self._faces.requests, self._faces.metrics, _terminate)
        self._ready = True
        print(_ready_line(addresses, engine), flush=True)
        while not self._drain_reason and self._failure is None:
            time.sleep(LOOK_SECONDS)
        if self._failure is None:
            self._drain(engine)
        self._stop_faces()
        if self._failure is not None:
            # Not an orderly exit: it would wait for device calls that may never return.
            bootstrap.abandon(f"the engine failed: {self._failure}", peers=leader)
        self._write_timeline(leader)
        if self._link is not None:
            self._link.close()

    def _open_engine(self, leader: Leader | None) -> Engine:
        """The engine, warm; before it no JAX backend has been started."""
        if self._deployment.link.transport == "pull":
            engine, self._link = attention_runtime.open_attention(
                self._deployment, self._process.token, observer=self._recorder
            )
            return engine
        if leader is None:
            return open_engine(self._deployment, observer=self._recorder)
        return worker.lead(self._deployment, leader, observer=self._recorder)

    def _stop_faces(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._faces.stop(LAST_ANSWERS_SECONDS)
        if self._admin is not None:
            self._admin.stop(0)

    def _on_peer_failure(self, failure: EngineFailedError, leader: bootstrap.Peers) -> None:
        """A follower is gone or stuck: every client is told, then this process ends."""
        if self._engine is None:
            bootstrap.abandon(f"during start-up: {failure}", peers=leader)
        self._engine.fail(failure)

    def _on_peer_drain(self, reason: str, leader: Leader) -> None:
        """A follower was asked to end: this is a signal to the whole deployment."""
        if not self._ready:
            bootstrap.abandon(f"during start-up: {reason}", 128 + signal.SIGTERM, peers=leader)
        self._drain_reason = self._drain_reason or reason

    def _drain(self, engine: Any) -> None:
        """Takes nothing new and finishes what runs, within `server.drain_seconds`."""
        seconds = self._deployment.server.drain_seconds
        logger.info("%s: draining for up to %g s", self._drain_reason, seconds)
        self._faces.refuse()
        deadline = time.monotonic() + seconds
        while not (idle := engine.drain(LOOK_SECONDS)) and time.monotonic() < deadline:
            pass
        if not idle:
            logger.warning("requests were still running after %g s and are cut", seconds)
        if self._failure is None:
            engine.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(128 + number)
        self._signalled = True
        if not self._ready:
            raise SystemExit(128 + number)
        self._drain_reason = self._drain_reason or signal.Signals(number).name

    def _on_failure(self, failure: EngineFailedError) -> None:
        self._failure = failure

    def _write_timeline(self, leader: Leader | None) -> None:
        if self._recorder is None or self._timeline is None:
            return
        self._recorder.flush(LAST_ANSWERS_SECONDS)
        self._recorder.close()
        spans = [self._recorder.spans()]
        if leader is not None:
            spans += worker.collect_spans(leader, LAST_ANSWERS_SECONDS)
        summary = timeline_view.write(self._timeline, merge(spans))
        logger.info("timeline in %s: %s", self._timeline, timeline_view.describe(summary))


def _faces(deployment: Deployment, options: argparse.Namespace) -> Faces:
    """What clients talk to, not started; raises as `LocalFaces`."""
    model, server = deployment.model, deployment.server
    if server.processes:
        return FaceProcesses(model, server, options.insecure_bind, options.log_format)
    return LocalFaces(model, server, options.insecure_bind)


def _admin_face(deployment: Deployment) -> HttpServer | None:
    """What operators talk to, where the deployment has it, not started."""
    server = deployment.server
    if server.admin_port < 0:
        return None
    return HttpServer(
        "127.0.0.1",
        server.admin_port,
        access=Access(Access.from_config(server).keys),
        endpoints=ADMIN_ENDPOINTS,
        name="server.admin_port",
    )


def _terminate() -> None:
    """As if from outside: the main thread drains and ends."""
    os.kill(os.getpid(), signal.SIGTERM)


def _ready_line(addresses: Mapping[str, str], engine: TokenEngine) -> str:
    info = engine.model_info()
    words = [f"{name}={address}" for name, address in addresses.items()]
    words += [f"{key}={info[key]}" for key in ("model", "mode", "lanes") if key in info]
    return "  ".join(["ready", *words])
