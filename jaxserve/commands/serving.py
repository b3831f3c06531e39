"""One run of `serve` in the process that leads an engine: its start, its links and its end."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jaxserve.commands.life import LAST_ANSWERS_SECONDS, Life
from jaxserve.commands.worker_part import WorkerPart, add_pages_end, worker_port
from jaxserve.config.deployment import Deployment
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineFailedError
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import STAND_IN, ProcessArguments
from jaxserve.fleet.assembly import Options, open_engine
from jaxserve.fleet.leader import Leader
from jaxserve.fleet.leading import collect_spans
from jaxserve.fleet.worker_frames import Become
from jaxserve.observe import timeline_view
from jaxserve.observe.merging import merge
from jaxserve.observe.recorder import Recorder
from jaxserve.roles.weights import serve_weights
from jaxserve.server.choice import ProbedPort, admin_face, network_faces

if TYPE_CHECKING:
    from jaxserve.fleet.prepared import Prepared
    from jaxserve.link.weights.server import WeightsServer

HURRY_SECONDS = 2.0
"""Seconds in which a prefill worker finishes its prompts before it stands in for a lost domain."""

logger = logging.getLogger("jaxserve.serve")


class Serving(Life):
    """An engine behind the network faces, or as a worker of a fleet behind a port for routers.

    Args:
      part: which worker this is; None: it serves clients itself.
      prepared: work that this process did as a spare; None: it was none.
    """

    def __init__(
        self,
        deployment: Deployment,
        options: argparse.Namespace,
        process: ProcessArguments,
        part: WorkerPart | None = None,
        prepared: "Prepared | None" = None,
    ):
        if part is None:
            faces = network_faces(deployment, options.insecure_bind, options.log_format)
            super().__init__(deployment, faces, admin_face(deployment))
        else:
            may = part.role == "prefill" or part.stands_in or part.fleet.fleet.rebalance_roles
            on_become = self._become if may and process.processes == 1 else None
            port = worker_port(deployment, part, process.token, on_become)
            super().__init__(deployment, ProbedPort(port, deployment, options.insecure_bind))
        self._process = process
        self._part, self._prepared = part, prepared
        self._successor: list[str] = []
        """The command that this process goes on as, once it has ended."""
        self._engine: Engine | None = None
        self._weights: WeightsServer | None = None
        self._timeline: Path | None = options.timeline
        self._recorder = Recorder() if options.timeline else None

    def _live(self, addresses: Mapping[str, str]) -> None:
        """With several processes it ends the process."""
        with bootstrap.joined(
            self._process,
            self._deployment,
            on_failure=self._on_peer_failure,
            on_drain=self._on_peer_drain,
        ) as leader:
            assert leader is None or isinstance(leader, Leader)
            options = Options(
                token=self._process.token,
                recorder=self._recorder,
                prepare=self._prepare,
                prepared=self._prepared,
            )
            engine = self._engine = open_engine(self._deployment, options, leader)
            self._serve(engine, addresses)
            if self._failure is not None:
                # Not an orderly exit: it would wait for device calls that may never return.
                bootstrap.abandon(f"the engine failed: {self._failure}", peers=leader)
            self._write_timeline(leader)
            if self._weights is not None:
                self._weights.close()
            if self._successor and not self._signals:
                os.execv(sys.executable, self._successor)

    def _become(self, order: Become) -> None:
        """Ends as on a signal, and goes on in the other role."""
        assert self._part is not None
        if order.domain == (self._part.role == "domain"):
            return
        own = [word for word in sys.orig_argv[1:] if word != STAND_IN]
        self._successor = [sys.executable, *own, *[STAND_IN] * (not self._part.stands_in)]
        if order.hurry:
            server = msgspec.structs.replace(self._deployment.server, drain_seconds=HURRY_SECONDS)
            self._deployment = msgspec.structs.replace(self._deployment, server=server)
        self._drain_reason = self._drain_reason or f"to become another role: {order.why}"

    def _prepare(self, engine: Engine) -> None:
        """Gives an engine that is not started yet its ends of links to other workers."""
        token = self._process.token
        if self._part is not None:
            add_pages_end(engine, self._part, token)
        driver = engine.driver
        self._weights = serve_weights(self._deployment, driver.held, driver.slots, token)

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

    def _write_timeline(self, leader: Leader | None) -> None:
        if self._recorder is None or self._timeline is None:
            return
        spans = [self._recorder.ended(LAST_ANSWERS_SECONDS)]
        if leader is not None:
            spans += collect_spans(leader, LAST_ANSWERS_SECONDS)
        summary = timeline_view.write(self._timeline, merge(spans))
        logger.info("timeline in %s: %s", self._timeline, timeline_view.describe(summary))
