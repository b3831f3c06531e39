"""The engine's side of the faces' processes: starts and replaces them, passes requests and tokens.

`FaceProcesses` has the life of `faces.Faces`, so `serve.py` treats both alike. A process that dies
has its requests cancelled and a successor on the same ports; its siblings go on.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from jaxserve.config.deployment import Server
from jaxserve.engine.interface import TokenEngine
from jaxserve.engine.request import FinishReason
from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import TOKEN_VARIABLE
from jaxserve.fleet.outbox import Outbox
from jaxserve.fleet.request_frames import KNOWN, Refusal, check_unused
from jaxserve.fleet.worker_frames import AskPipeline, Pipeline, State
from jaxserve.server.access import Access, check_bind
from jaxserve.server.front_end import LiveRequests
from jaxserve.server.listener import reserve
from jaxserve.server.metrics import Metrics
from jaxserve.server.processes import frames
from jaxserve.server.shedding import shedding
from jaxserve.text.structured import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

START_SECONDS = 120.0
"""How long a process may take to load its tokenizer and bind."""
STATE_SECONDS = 0.5
RESTART_SECONDS = 1.0
"""Pause before a process that died is replaced, so that a crash loop is slow."""

logger = logging.getLogger(__name__)


class FaceProcesses:
    """The faces of a deployment in processes of their own.

    Args:
      model: folder of the tokenizer and the chat template.
      server: addresses, keys, certificates, and how many processes.
      insecure_bind: whether to bind to a public address without keys.
      log_format: of the processes, "text" or "json".

    Raises:
      ConfigError: a public address without protection, or an invalid file of keys or certificates.
      CheckpointError: there is no usable tokenizer.
    """

    def __init__(self, model: str, server: Server, insecure_bind: bool, log_format: str):
        if server.http_socket:
            raise ConfigError("server.http_socket: needs server.processes = 0")
        check_bind(server.host, insecure_bind, Access.from_config(server))
        self.requests: LiveRequests
        self.metrics: Metrics
        self._tokenizer = Tokenizer.from_folder(model)
        self._model, self._server = model, server
        self._wait_seconds = server.wait_seconds
        self._insecure_bind, self._log_format = insecure_bind, log_format
        self._metrics_folder = tempfile.TemporaryDirectory(prefix="jaxserve-metrics-")
        self._reserved: list[socket.socket] = []
        self._engine: TokenEngine | None = None
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._refusing = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._ticker = threading.Thread(target=self._tick, name="faces-state", daemon=True)

    # --------------------------------------------------------------------- what serve.py calls

    def start(self) -> dict[str, str]:
        """See `Faces.start`."""
        server = self._server
        self._reserved.append(reserve(server.host, server.grpc_port, "server.grpc_port"))
        ports = {"grpc_port": self._reserved[0].getsockname()[1]}
        if server.http_port >= 0:
            self._reserved.append(reserve(server.host, server.http_port, "server.http_port"))
            ports["http_port"] = self._reserved[1].getsockname()[1]
        # This process refuses for all faces: it knows what waits.
        self._server = msgspec.structs.replace(server, wait_seconds=0.0, **ports)
        with self._lock:
            self._processes = [_Process(self, n) for n in range(server.processes)]
        for process in self._processes:
            process.wait_started()
        return self._processes[0].addresses

    def open(self, engine: TokenEngine) -> None:
        """See `Faces.open`."""
        info = engine.model_info()
        self._compiler = GrammarCompiler(self._tokenizer, info["vocab_size"])
        self.metrics = Metrics(str(info["model"]), Path(self._metrics_folder.name))
        self.metrics.watch(engine)
        self.requests = self
        with self._lock:
            self._engine = shedding(engine, self._wait_seconds)
            processes = list(self._processes)
        for process in processes:
            process.open(engine)
        for process in processes:
            process.wait_opened()
        engine.add_failure_callback(lambda _failure: self._send_state())
        self._ticker.start()

    def refuse(self) -> None:
        """See `Faces.refuse`."""
        with self._lock:
            self._refusing = True
            processes = list(self._processes)
        for process in processes:
            process.post(frames.Refuse())

    def stop(self, grace: float) -> None:
        """See `Faces.stop`; fine in any state."""
        with self._lock:
            self._stopping.set()
            processes = list(self._processes)
        for process in processes:
            process.post(frames.Stop(grace))
        for process in processes:
            process.join(grace)
        for reserved in self._reserved:
            reserved.close()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._metrics_folder.cleanup()

    # -------------------------------------------------------------------- what operators call

    @property
    def engine(self) -> TokenEngine:
        """The engine."""
        assert self._engine is not None
        return self._engine

    def live_ids(self) -> list[str]:
        """Ids of the requests of all processes that have not ended."""
        with self._lock:
            return [request_id for process in self._processes for request_id in process.owners]

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a live request by its id, if it belongs to `owner`; returns whether it was found."""
        with self._lock:
            for process in self._processes:
                if request_id in process.owners and owner in (None, process.owners[request_id]):
                    process.post(frames.Abort(request_id))
                    return True
        return False

    # ------------------------------------------------------------------- what processes call

    def start_frame(self) -> frames.Start:
        """The first frame for a new process."""
        return frames.Start(
            model=self._model,
            server=self._server,
            insecure_bind=self._insecure_bind,
            log_format=self._log_format,
            metrics_folder=self._metrics_folder.name,
        )

    def submit(self, process: "_Process", frame: frames.Submit) -> None:
        """Admits a request of a process, or refuses it; one with a grammar on another thread."""
        if frame.grammar.serialised:
            with contextlib.suppress(RuntimeError):  # the pool is shut down
                self._compiling.submit(self._submit, process, frame)
        else:
            self._submit(process, frame)

    def _submit(self, process: "_Process", frame: frames.Submit) -> None:
        refusal = None
        try:
            self._admit(process, frame)
        except Exception as error:
            refusal = Refusal.of(error)
            if refusal.kind not in KNOWN:
                logger.exception("request %s failed", frame.request_id)
        process.post(frames.Admitted(frame.number, refusal))

    def _admit(self, process: "_Process", frame: frames.Submit) -> None:
        assert self._compiler is not None
        request_id, params = frame.request_id, frame.params
        with self._lock:
            live = [one for other in self._processes for one in other.owners]
            check_unused(request_id, live)
            process.owners[request_id] = frame.owner
        try:
            if frame.grammar.serialised:
                grammar = self._compiler.restored(
                    frame.grammar.serialised, frame.grammar.begins_after
                )
                params = msgspec.structs.replace(params, grammar=grammar)
            self.engine.submit(
                frame.prompt,
                params,
                process.post,
                request_id=request_id,
                deadline=frame.deadline,
            )
        except BaseException:
            self.ended(process, [request_id])
            raise
        if process.lost:
            self.engine.cancel(request_id)

    def ended(self, process: "_Process", request_ids: Iterable[str]) -> None:
        """Forgets requests of a process."""
        with self._lock:
            for request_id in request_ids:
                process.owners.pop(request_id, None)

    def died(self, process: "_Process") -> None:
        """Cancels the requests of a process that died and starts its successor."""
        with self._lock:
            open_requests = list(process.owners)
            process.owners.clear()
        if self._engine is not None:
            for request_id in open_requests:
                self._engine.cancel(request_id)
        if self._stopping.is_set():
            return
        logger.error(
            "face process %d (pid %d) is gone: %s; %d requests are cancelled",
            process.number,
            process.pid,
            process.exit,
            len(open_requests),
        )
        if self._stopping.wait(RESTART_SECONDS):
            return
        with self._lock:
            if self._stopping.is_set():
                return
            successor = self._processes[process.number] = _Process(self, process.number)
            successor.replaces = True
            engine, refusing = self._engine, self._refusing
        if engine is not None:
            successor.open(engine)
        if refusing:
            successor.post(frames.Refuse())

    def _tick(self) -> None:
        while not self._stopping.wait(STATE_SECONDS):
            self._send_state()

    def _send_state(self) -> None:
        state = state_of(self.engine)
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            process.post(state)


def state_of(engine: TokenEngine) -> State:
    """Returns the current state of an engine."""
    failure = None if engine.failure is None else str(engine.failure)
    return State(engine.status, time.monotonic() - engine.last_turn, engine.load(), failure)


def _environment(metrics_folder: str) -> dict[str, str]:
    """The environment of a face's process, without the secret that workers show each other."""
    kept = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return kept | {"PROMETHEUS_MULTIPROC_DIR": metrics_folder}


class _Process:
    """One face's process, with a thread that reads from it and one that writes to it.

    Attributes:
      number: its place among its siblings.
      owners: request id → owner of its open requests; under the lock of `FaceProcesses`.
      addresses: where it listens, once it started.
      lost: whether it is gone.
      replaces: whether it is the successor of another, whose start nothing waits for.
    """

    def __init__(self, host: FaceProcesses, number: int):
        self.number = number
        self.owners: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        self.lost = self.replaces = False
        self._host = host
        self._problem: Exception | None = None
        self._started, self._opened = threading.Event(), threading.Event()
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "jaxserve.server.processes.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(host.start_frame().metrics_folder),
                stdin=subprocess.DEVNULL,
            )
        self._channel = frames.channel_over(ours)
        self._outbox = Outbox(f"face-{number}-writer", self._send, self._ended, self._kill)
        self.post = self._outbox.post
        """Queues something for the process; from any thread, including the engine's."""
        self.post(host.start_frame())
        self._reader = threading.Thread(
            target=self._read, name=f"face-{number}-reader", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._popen.pid

    @property
    def exit(self) -> str:
        """Describes how the process ended."""
        code = self._popen.poll()
        return f"ended with {code}" if code is not None else "its connection ended"

    def open(self, engine: TokenEngine) -> None:
        """Makes the process accept requests."""
        self.post(frames.Open(dict(engine.model_info())))
        self.post(state_of(engine))

    def wait_started(self) -> None:
        """Waits until the process listens.

        Raises:
          ConfigError, CheckpointError: the process cannot start.
        """
        self._wait(self._started, "did not start")

    def wait_opened(self) -> None:
        """Waits until the process accepts requests; raises as `wait_started`."""
        self._wait(self._opened, "did not open")

    def join(self, grace: float) -> None:
        """Waits until the process has ended; kills it after a deadline."""
        try:
            self._popen.wait(grace + frames.SEND_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("face process %d (pid %d) is killed", self.number, self.pid)
            self._popen.kill()
            self._popen.wait()
        self._reader.join(frames.SEND_SECONDS)

    def _wait(self, event: threading.Event, what: str) -> None:
        if not event.wait(START_SECONDS) or (self.lost and self._problem is None):
            raise ConfigError(f"server.processes: process {self.number} {what}: {self.exit}")
        if self._problem is not None:
            raise self._problem

    def _read(self) -> None:
        try:
            while True:
                self._handle(frames.decode_to_engine(self._channel.receive()))
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("face process %d: reading from it", self.number)
        self.lost = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        self._channel.close()
        started = self._started.is_set()
        self._outbox.close()
        for event in (self._started, self._opened):
            event.set()
        if started or self.replaces:
            self._host.died(self)

    def _handle(self, frame: object) -> None:
        match frame:
            case frames.Submit():
                self._host.submit(self, frame)
            case frames.Cancel(request_id=request_id):
                if request_id in self.owners:
                    self._host.engine.cancel(request_id)
            case frames.AbortElsewhere(number=number, request_id=request_id, owner=owner):
                self.post(frames.Aborted(number, self._host.abort(request_id, owner)))
            case AskPipeline():
                self.post(Pipeline(self._host.engine.pipeline()))
            case frames.Started(addresses=addresses):
                self.addresses = addresses
                self._started.set()
            case frames.Opened():
                self._opened.set()
            case frames.Failed(refusal=refusal):
                self._problem = refusal.error()

    def _ended(self, reasons: Mapping[str, FinishReason]) -> list[frames.Frame]:
        """Forgets requests that ended; what the process has to know before."""
        self._host.ended(self, reasons)
        if {"error", "cancelled"}.isdisjoint(reasons.values()):
            return []
        # The face derives from the engine's state why a request ended: send that first.
        return [state_of(self._host.engine)]

    def _send(self, found: Sequence[frames.Frame]) -> None:
        for frame in found:
            self._channel.send(frames.encode(frame))

    def _kill(self) -> None:
        logger.error("face process %d takes nothing and is killed", self.number)
        self._popen.kill()
