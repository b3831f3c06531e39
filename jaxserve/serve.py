"""`python -m jaxserve.serve --config F`: a deployment on the network, until a signal ends it.

`--model DIR` serves a bare model folder, or replaces the model of the deployment file. `--check`
only says how large the model is and what every device would hold; it needs config.json alone, and
none of the devices. It exits 0 if that fits, 1 if not.

The life of the process: bind the port (health says NOT_SERVING), load and compile, print one line
that starts with `ready`, serve; on SIGTERM or SIGINT finish what runs and exit 0. Exit codes: 1
the engine failed, 2 the configuration or the checkpoint is wrong, 128 + n a signal before ready
or a second one.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from jaxserve.capacity import check_capacity, describe, memory_of
from jaxserve.checkpoint.hf import read_config
from jaxserve.cluster import bootstrap, roles
from jaxserve.cluster.follower import Follower
from jaxserve.cluster.leader import Leader
from jaxserve.config.deployment import Deployment
from jaxserve.engine.engine import Engine
from jaxserve.errors import CheckpointError, ConfigError, EngineFailedError
from jaxserve.llm import open_engine, read_deployment
from jaxserve.pipeline import timeline_view
from jaxserve.pipeline.timeline import Recorder, merge
from jaxserve.server import logs
from jaxserve.server.access import Access
from jaxserve.server.chat import ChatTemplate
from jaxserve.server.generation import TextGenerator
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.routes import ADMIN_ENDPOINTS, PROBES
from jaxserve.server.http.server import HttpServer
from jaxserve.server.metrics import Metrics
from jaxserve.server.token_engine import TokenEngine
from jaxserve.server.tokenizer import Tokenizer

LOOK_SECONDS = 0.1
"""How often the main thread wakes up on its own. Only this thread runs the handlers of signals, and
one that comes just before it goes to sleep does not wake it."""
LAST_ANSWERS_SECONDS = 5.0
"""For answers on their way to clients, after the engine has ended."""

logger = logging.getLogger("jaxserve.serve")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    options = _parse(arguments)
    logs.configure(options.log_format)
    try:
        deployment = read_deployment(options.config, options.model, options.set)
        if options.check:
            return _check(deployment)
        if options.timeline and deployment.mode == "colocated":
            raise ConfigError("--timeline: shows the stages of mode afd, and this one is colocated")
        process = bootstrap.from_arguments(options)
        if process.is_leader:
            return _Serving(deployment, options, process).run()
        return _follow(deployment, options, process)
    except (ConfigError, CheckpointError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 2
    except EngineFailedError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1


def _check(deployment: Deployment) -> int:
    """Prints what the deployment weighs. No device is touched, nothing of the model is loaded."""
    config, _ = read_config(deployment.model, deployment.ignored_model_keys)
    memory = memory_of(deployment)
    print(describe(config, deployment, memory))
    try:
        check_capacity(config, deployment, memory)
    except ConfigError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    return 0


class _Serving:
    """One run of `serve`: the pieces and the order in which they start and end."""

    def __init__(
        self,
        deployment: Deployment,
        options: argparse.Namespace,
        arguments: bootstrap.ProcessArguments,
    ):
        self._deployment = deployment
        self._arguments = arguments
        self._leader: Leader | None = None
        self._engine: Engine | None = None
        self._timeline: Path | None = options.timeline
        self._recorder = Recorder() if options.timeline else None
        self._faces = _faces(deployment, options.insecure_bind)
        self._failure: EngineFailedError | None = None
        self._signal: int | None = None
        self._ready = False

    def run(self) -> int:
        """The whole life; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        tokenizer = Tokenizer.from_folder(self._deployment.model)
        template = _chat_template(self._deployment.model)
        try:
            addresses = {name: face.start() for name, face in self._faces.items()}
            engine = self._engine = self._open_engine()
            engine.add_failure_callback(self._on_failure)
            metrics = Metrics(str(engine.model_info()["model"]))
            metrics.watch(engine)
            generator = TextGenerator(engine, tokenizer, metrics.started)
            for face in self._faces.values():
                if isinstance(face, GrpcServer):
                    face.open(generator)
                else:
                    face.open(generator, template, metrics=metrics, on_drain=_terminate)
            self._ready = True
            print(_ready_line(addresses, engine), flush=True)
            while self._signal is None and self._failure is None:
                time.sleep(LOOK_SECONDS)
            if self._failure is None:
                self._drain(engine)
            generator.close()
        finally:
            for face in self._faces.values():
                face.stop(LAST_ANSWERS_SECONDS)
        if self._failure is not None:
            # Not an orderly exit: it would wait for device calls that may never return.
            bootstrap.abandon(f"the engine failed: {self._failure}", peers=self._leader)
        self._write_timeline()
        if self._leader is not None:
            bootstrap.leave(self._leader)
        return 0

    def _open_engine(self) -> Engine:
        """The engine, warm; before it no JAX backend has been started."""
        if self._arguments.processes == 1:
            return open_engine(self._deployment, observer=self._recorder)
        peers = bootstrap.join(self._arguments, self._deployment, self._on_peer_failure)
        assert isinstance(peers, Leader)
        self._leader = peers
        return roles.lead(self._deployment, peers, observer=self._recorder)

    def _on_peer_failure(self, failure: EngineFailedError) -> None:
        """A follower is gone or stuck: every client hears it, then this process ends."""
        if self._engine is None:
            bootstrap.abandon(f"during start-up: {failure}")
        self._engine.fail(failure)

    def _drain(self, engine: Any) -> None:
        """Takes nothing new and finishes what runs, within `server.drain_seconds`."""
        seconds = self._deployment.server.drain_seconds
        logger.info("%s: draining for up to %g s", signal.Signals(self._signal or 0).name, seconds)
        for face in self._faces.values():
            face.refuse()
        deadline = time.monotonic() + seconds
        while not (idle := engine.drain(LOOK_SECONDS)) and time.monotonic() < deadline:
            pass
        if not idle:
            logger.warning("requests were still running after %g s and are cut", seconds)
        if self._failure is None:
            engine.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = number
        if not self._ready:
            raise SystemExit(128 + number)

    def _on_failure(self, failure: EngineFailedError) -> None:
        self._failure = failure

    def _write_timeline(self) -> None:
        if self._recorder is None or self._timeline is None:
            return
        self._recorder.flush(LAST_ANSWERS_SECONDS)
        self._recorder.close()
        spans = [self._recorder.spans()]
        if self._leader is not None:
            spans += roles.collect_spans(self._leader, LAST_ANSWERS_SECONDS)
        summary = timeline_view.write(self._timeline, merge(spans))
        logger.info("timeline in %s: %s", self._timeline, timeline_view.describe(summary))


def _follow(
    deployment: Deployment, options: argparse.Namespace, arguments: bootstrap.ProcessArguments
) -> int:
    """The life of every process but 0: follows the leader's plans and ends when it says so.

    A signal that reaches the whole deployment is the leader's to answer: it drains, and these
    processes run its last steps. The second signal ends this process.
    """
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        logger.info("%s: waiting for the leader to end", signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    recorder = Recorder(process=arguments.process_id) if options.timeline else None
    faces = _probe_faces(deployment, options.insecure_bind)
    for name, face in faces.items():
        logger.info("process %d answers %s probes on %s", arguments.process_id, name, face.start())
    peers = bootstrap.join(arguments, deployment, lambda error: bootstrap.abandon(str(error)))
    assert isinstance(peers, Follower)

    def on_ready() -> None:
        for face in faces.values():
            if isinstance(face, GrpcServer):
                face.watch()
            else:
                face.watch(peers)

    try:
        roles.follow(deployment, peers, recorder=recorder, on_ready=on_ready)
    except EngineFailedError as error:
        bootstrap.abandon(str(error))
    finally:
        for face in faces.values():
            face.stop(LAST_ANSWERS_SECONDS)
    bootstrap.leave(peers)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxserve.serve", description="Serve a model.")
    parser.add_argument("--config", metavar="FILE", help="deployment file")
    parser.add_argument(
        "--model", metavar="DIR", help="model folder, alone or instead of the deployment file's"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the deployment, as in attention.dp=3; may be repeated",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print parameters and bytes a device, and whether they fit, and exit",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="DIR",
        help="measure the stages, and write a Perfetto trace and an SVG there at the end",
    )
    parser.add_argument(
        "--insecure-bind",
        action="store_true",
        help="allow a server.host that is not loopback, although there is neither TLS nor a key",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines for people, or JSON objects for machines",
    )
    bootstrap.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.config is None and options.model is None:
        parser.error("one of the arguments --config --model is required")
    return options


def _faces(deployment: Deployment, insecure_bind: bool) -> dict[str, GrpcServer | HttpServer]:
    """The servers of a deployment by the name of their protocol, not started.

    Raises:
      ConfigError: an address is open to strangers, or a file of keys or certificates is wrong.
    """
    server = deployment.server
    access = Access.from_config(server)
    faces: dict[str, GrpcServer | HttpServer] = {
        "grpc": GrpcServer(
            server.host, server.grpc_port, access=access, insecure_bind=insecure_bind
        )
    }
    if server.admin_port >= 0:
        faces["admin"] = HttpServer(
            "127.0.0.1",
            server.admin_port,
            access=Access(access.keys),
            endpoints=ADMIN_ENDPOINTS,
            name="server.admin_port",
        )
    if server.http_port >= 0:
        faces["http"] = HttpServer(
            server.host,
            server.http_port,
            access=access,
            insecure_bind=insecure_bind,
            request_seconds=server.request_seconds,
        )
    return faces


def _probe_faces(deployment: Deployment, insecure_bind: bool) -> dict[str, GrpcServer | HttpServer]:
    """The servers of a process that follows, not started; raises as `_faces`."""
    server = deployment.server
    faces: dict[str, GrpcServer | HttpServer] = {}
    if max(server.follower_grpc_port, server.follower_http_port) < 0:
        return faces
    access = Access.from_config(server)
    if server.follower_grpc_port >= 0:
        faces["grpc"] = GrpcServer(
            server.host, server.follower_grpc_port, access=access, insecure_bind=insecure_bind
        )
    if server.follower_http_port >= 0:
        faces["http"] = HttpServer(
            server.host,
            server.follower_http_port,
            access=access,
            insecure_bind=insecure_bind,
            endpoints=PROBES,
            name="server.follower_http_port",
        )
    return faces


def _terminate() -> None:
    """As if from outside: the main thread drains and ends."""
    os.kill(os.getpid(), signal.SIGTERM)


def _chat_template(model: str) -> ChatTemplate | None:
    """The model's; without a readable one, chats are refused and all else is served."""
    try:
        return ChatTemplate.from_folder(model)
    except CheckpointError as error:
        logger.warning("no chats will be served: %s", error)
        return None


def _ready_line(addresses: Mapping[str, str], engine: TokenEngine) -> str:
    info = engine.model_info()
    words = [f"{name}={address}" for name, address in addresses.items()]
    words += [f"{key}={info[key]}" for key in ("model", "mode", "lanes") if key in info]
    return "  ".join(["ready", *words])


if __name__ == "__main__":
    sys.exit(main())
