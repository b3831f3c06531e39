"""The network faces in processes of their own, beside the one that runs the engine.

A face's work (tokenising, detokenising, stop strings, templates, messages) then costs the engine's
step loop nothing but one message a step and process: xDeepServe's output short-circuit (§4.2). Each
process (`face.py`) is a router whose one worker is the engine, at a Unix socket (`FacePort`).
Beyond what a router needs, faces share one set of request ids, hear which requests are admitted,
and abort each other's. `FaceProcesses` has the life of `faces.Faces`, so `serve.py` treats both
alike. A process that dies has its requests cancelled and a successor on the same ports; its
siblings go on.
"""

import contextlib
import functools
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from jaxserve.checkpoint.fingerprint import model_digest
from jaxserve.config.deployment import Deployment
from jaxserve.config.fleet_sections import Fleet, Prefill
from jaxserve.errors import ConfigError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.arguments import TOKEN_VARIABLE
from jaxserve.fleet.request_frames import GrammarOf, check_unused
from jaxserve.fleet.worker_frames import WorkerFacts, hello_of
from jaxserve.fleet.worker_port import DEADLINES, RouterConnection, WorkerPort
from jaxserve.link.session.channel import Channel
from jaxserve.server.access import Access, check_bind
from jaxserve.server.face import Abort, Aborted, Admitted, Start
from jaxserve.server.front_end import LiveRequests
from jaxserve.server.listener import reserve
from jaxserve.server.metrics import Metrics
from jaxserve.server.shedding import shedding
from jaxserve.server.tracing import Tracing
from jaxserve.storage.mirror import local_folder
from jaxserve.text.output import TokenEngine
from jaxserve.text.structured import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


class FacePort(WorkerPort):
    """Listens for faces.

    Attributes:
      live: which face has a request, by the id that the request's client knows.
    """

    live: "dict[str, FaceConnection]"

    def start(self) -> dict[str, str]:
        """See `WorkerPort`."""
        self.live = {}
        return super().start()

    def connected(self, pid: int) -> bool:
        """Whether the face in a process is connected."""
        return any(face.name.endswith(f"pid {pid})") for face in list(self._routers))

    def abort(self, request_id: str) -> bool:
        """Has a face end its request; returns whether one has it."""
        face = self.live.get(request_id)
        if face is not None:
            face.post(Abort(request_id))
        return face is not None

    def _connection(self, channel: Channel) -> "FaceConnection":
        return FaceConnection(self, channel)


class FaceConnection(RouterConnection):
    """One face's requests, and the way of their outputs to it."""

    _port: FacePort

    def _run(self, deadline: float | None, frame: frames.Submit) -> None:
        check_unused(name := _name(frame.request_id), self._port.live)
        self._port.live[name] = self
        super()._run(deadline, frame)
        self.post(Admitted(frame.request_id))

    def _adopt(self, frame: frames.Adopt) -> None:
        self._port.live[_name(frame.request_id)] = self
        super()._adopt(frame)
        self.post(Admitted(frame.request_id))

    def _ended(self, attempt: str) -> None:
        super()._ended(attempt)
        if self._port.live.get(_name(attempt)) is self:
            del self._port.live[_name(attempt)]

    def _abort(self, frame: Abort) -> None:
        self.post(Aborted(frame.request_id, self._port.abort(frame.request_id)))

    handlers: ClassVar = RouterConnection.handlers | {frames.Adopt: _adopt, Abort: _abort}


def _name(attempt: str) -> str:
    """The id that a request's client knows."""
    return attempt.rpartition("@")[0]


START_SECONDS = 120.0
"""How long a process may take to load its tokenizer and bind, and to open."""
LOOK_SECONDS = 0.1
LOST_SECONDS = 30.0
"""A process that is open and not connected for this long is stuck, and replaced."""
RESTART_SECONDS = 1.0
"""Pause before a process that died is replaced, so that a crash loop is slow."""
FLUSH_SECONDS = 1.0
END_SECONDS = 10.0
MOST_WAITING = 2**20
STEP_SECONDS = 86400.0
"""A face leaves the engine's deadlines to the engine."""

logger = logging.getLogger(__name__)


class FaceProcesses:
    """The faces of a deployment in processes of their own.

    Args:
      deployment: the model's folder; addresses, keys, certificates, and how many processes.
      insecure_bind: whether to bind to a public address without keys.
      log_format: of the processes, "text" or "json".

    Raises:
      ConfigError: a public address without protection, or an invalid file of keys or certificates.
      CheckpointError: there is no usable tokenizer.
    """

    def __init__(self, deployment: Deployment, insecure_bind: bool, log_format: str):
        server = deployment.server
        if server.http_socket:
            raise ConfigError("server.http_socket: needs server.processes = 0")
        check_bind(server.host, insecure_bind, Access.from_config(server))
        self.requests: LiveRequests
        self.metrics: Metrics
        self._tokenizer = Tokenizer.from_folder(deployment.model)
        self._deployment = deployment
        self._insecure_bind, self._log_format = insecure_bind, log_format
        self._folder = tempfile.TemporaryDirectory(prefix="jaxserve-faces-")
        self._token = secrets.token_hex(16)
        self._model = model_digest(local_folder(deployment.model))
        self._port = FacePort(
            f"{self._folder.name}/engine",
            self._token,
            hello_of("engine", self._model),
            _facts,
            self._restore,
            deployment.fleet.resume_seconds,
            tracing=Tracing(server.traces, "engine") if server.traces else None,
        )
        self._reserved: list[socket.socket] = []
        self._processes: list[_Process] = []

    # --------------------------------------------------------------------- what serve.py calls

    def start(self) -> dict[str, str]:
        """See `Faces.start`."""
        server = self._deployment.server
        self._port.start()
        self._reserved.append(reserve(server.host, server.grpc_port, "server.grpc_port"))
        ports = {"grpc_port": self._reserved[0].getsockname()[1]}
        if server.http_port >= 0:
            self._reserved.append(reserve(server.host, server.http_port, "server.http_port"))
            ports["http_port"] = self._reserved[1].getsockname()[1]
        replace, cluster = msgspec.structs.replace, self._deployment.cluster
        deployment = replace(
            self._deployment,
            # The engine's process refuses for all faces: it knows what waits.
            server=replace(server, wait_seconds=0.0, **ports),
            fleet=Fleet(domains=[self._port.address], domain_waiting=MOST_WAITING),
            prefill=Prefill(),
            cluster=replace(cluster, step_seconds=STEP_SECONDS, heartbeat_seconds=DEADLINES.down),
        )
        start = Start(
            deployment,
            self._token,
            self._model,
            self._insecure_bind,
            self._log_format,
            self._folder.name,
        )
        self._processes = [_Process(n, start, self._port) for n in range(server.processes)]
        for process in self._processes:
            process.wait(process.started, "did not start")
        return self._processes[0].addresses

    def open(self, engine: TokenEngine) -> None:
        """See `Faces.open`."""
        self.metrics = Metrics(str(engine.model_info()["model"]), Path(self._folder.name))
        self.metrics.watch(engine)
        self.requests, self.engine = self, engine
        shed = shedding(engine, self._deployment.server.wait_seconds)
        self._port.open(cast("Engine", shed))
        for process in self._processes:
            process.wait(process.opened, "did not open")

    def refuse(self) -> None:
        """See `Faces.refuse`."""
        self._port.refuse()

    def stop(self, grace: float) -> None:
        """See `Faces.stop`; fine in any state."""
        self._port.flush(FLUSH_SECONDS)  # so that faces hear of a failure first
        for process in self._processes:
            process.stop(grace)
        for process in self._processes:
            process.join(grace)
        self._port.stop(0)
        for reserved in self._reserved:
            reserved.close()
        self._folder.cleanup()

    # -------------------------------------------------------------------- what operators call

    def live_ids(self) -> list[str]:
        """Ids of the requests of all processes that have not ended."""
        return list(self._port.live)

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a live request by its id; returns whether it was found."""
        return self._port.abort(request_id)

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self.engine.model_info()["vocab_size"])

    def _restore(self, grammar: GrammarOf, vocab: int) -> Any:
        return self._compiler.restored(grammar.serialised, grammar.begins_after)


def _facts(engine: "Engine") -> WorkerFacts:
    """Describes an engine to faces, which leave all checks but that of the length to it."""
    info = dict(engine.model_info())
    length = info["max_length"]
    return WorkerFacts(
        role="domain",
        slots=max(1, engine.load().slots),
        groups=1,
        pages=length,
        page_size=1,
        max_length=length,
        vocab=info["vocab_size"],
        eos_token_ids=[],
        info=info,
    )


class _Process:
    """A face's process and, where it dies, its successors.

    Args:
      number: its place among its siblings.
      start: what the process is told first.
      port: to which it connects.

    Attributes:
      addresses: where it listens, once it started.
      started, opened: set when it listens, and while it accepts requests; or when there is none.
    """

    def __init__(self, number: int, start: Start, port: FacePort):
        self._number, self._start, self._port = number, start, port
        self.addresses: dict[str, str] = {}
        self.started, self.opened = threading.Event(), threading.Event()
        self._stopping, self._over = threading.Event(), False
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"face-{number}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return -1 if self._child is None else self._child.pid

    def wait(self, event: threading.Event, what: str) -> None:
        """Waits for `started` or `opened`.

        Raises:
          ConfigError: there is no process any more, or it takes too long.
        """
        if not event.wait(START_SECONDS) or self._over:
            raise ConfigError(f"server.processes: process {self._number} {what}")

    def stop(self, grace: float) -> None:
        """Tells the process to end its requests, wait `grace` seconds for answers, and exit."""
        self._stopping.set()
        if self._child is None or self._child.stdin is None:
            return
        if not self.opened.is_set():
            self._child.kill()
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._child.stdin.write(f"{grace}\n".encode())
            self._child.stdin.flush()

    def join(self, grace: float) -> None:
        """Waits until a process that was told to stop has ended; kills it after a deadline."""
        self._thread.join(grace + END_SECONDS)
        if self._thread.is_alive() and self._child is not None:
            logger.warning("face process %d (pid %d) is killed", self._number, self.pid)
            self._child.kill()
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        # Without the secret that workers show each other.
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environment["PROMETHEUS_MULTIPROC_DIR"] = os.path.dirname(self._port.address)
        while not self._stopping.is_set():
            self.opened.clear()
            with subprocess.Popen(
                [sys.executable, "-m", "jaxserve.server.face"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as child:
                self._child = child
                with contextlib.suppress(OSError, msgspec.DecodeError):  # it has ended
                    self._follow(child)
            if not self.started.is_set() or self._stopping.is_set():
                break
            logger.error(
                "face process %d (pid %d) is gone: ended with %s",
                *(self._number, child.pid, child.returncode),
            )
            self._stopping.wait(RESTART_SECONDS)
        self._over = True
        for event in (self.started, self.opened):
            event.set()

    def _follow(self, child: subprocess.Popen[bytes]) -> None:
        """Tells a process what to serve and stays until it has ended; kills it when it is stuck."""
        assert child.stdin is not None
        assert child.stdout is not None
        start = msgspec.structs.replace(self._start, successor=self.started.is_set())
        child.stdin.write(msgspec.json.encode(start) + b"\n")
        child.stdin.flush()
        self.addresses = msgspec.json.decode(child.stdout.readline(), type=dict[str, str])
        self.started.set()
        if child.stdout.readline():
            self.opened.set()
        there = time.monotonic()
        while child.poll() is None:
            now = time.monotonic()
            if self._port.connected(child.pid):
                there = now
            if now - there > LOST_SECONDS:
                child.kill()
            time.sleep(LOOK_SECONDS)
