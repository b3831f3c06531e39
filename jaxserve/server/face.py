"""A face's process: `python -m jaxserve.server.face`, started by `face_processes.py`.

It serves gRPC and HTTP on ports that it shares with its siblings. The engine is in the process that
started it, so a face is a replica of the router with one worker, at a Unix socket. It ends when the
engine's process says so or is gone; signals are the engine's process's to answer. Beside the
messages of routers and workers (`worker_frames.py`) it exchanges these with `face_processes.py`:

    face → engine   Abort
    engine → face   (Admitted | Abort | Aborted)
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from jaxserve import logs
from jaxserve.config.deployment import Deployment
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError, JaxserveError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.coordinator import Coordinator
from jaxserve.fleet.registry import Place
from jaxserve.fleet.request_frames import Frame, Outputs, SentError
from jaxserve.fleet.routed import Routed
from jaxserve.fleet.router import RouterEngine
from jaxserve.fleet.worker_connections import WorkerConnection
from jaxserve.observe.load import EngineLoad
from jaxserve.server.faces import LocalFaces
from jaxserve.text.output import joined

ANSWER_SECONDS = 30.0
"""Longest wait for the engine's process to accept or to abort a request."""
MESSAGES_A_SECOND = 8000
"""Here they take no time from the step loop."""


class Start(msgspec.Struct, frozen=True):
    """First line of a face's standard input, as JSON; the second one ends it and says how many
    seconds it may take. It exits at once where none comes: the engine's process is gone. It
    answers with its addresses, as JSON, and an empty line when it is open.

    Attributes:
      deployment: with the shared ports in `server`, and the engine's socket in `fleet.domains`.
      token: secret of that socket.
      model: digest of the model's config.json.
      metrics_folder: folder for the metrics of all faces.
      successor: whether it replaces a process that died. It then joins the ports only once it can
        answer, because its siblings take all connections until then.
    """

    deployment: Deployment
    token: str
    model: str
    insecure_bind: bool
    log_format: str
    metrics_folder: str
    successor: bool = False


class Admitted(Frame):
    """Tells a face that its request is accepted; the alternative is `Rejected`."""

    request_id: str


class Abort(Frame):
    """Ends a request for a caller other than its client: of another face, answered by `Aborted`; or
    of the face that gets this."""

    request_id: str


class Aborted(Frame):
    """Says whether any face has the request that was to be aborted."""

    request_id: str
    found: bool


class EngineConnection(WorkerConnection):
    """The connection to the engine's process."""

    handlers: ClassVar = WorkerConnection.handlers | dict.fromkeys(
        (Admitted, Abort, Aborted), WorkerConnection.pass_on
    )


class FaceCoordinator(Coordinator):
    """Sends every request to the one worker, so it estimates no pace."""

    def _log(self, request: Routed, output: TokenOutput) -> None:
        request.last_at = 0.0
        request.emitted += output.token_ids


class FaceEngine(RouterEngine):
    """The engine of another process, which decides over every request: it alone refuses and drains.

    Args:
      faces: the servers of this process, which drain and abort as the engine's process says.
    """

    connection, coordinator = EngineConnection, FaceCoordinator

    def __init__(self, start: Start, faces: LocalFaces):
        super().__init__(start.deployment, start.token, start.model)
        self._faces = faces
        self._worker = frames.State("starting", 0.0, EngineLoad())
        self._heard = time.monotonic()
        self._answers: dict[str, Future[Any]] = {}
        """Request id → answer of the engine's process that is waited for."""
        self._on_failure: list[Callable[[EngineFailedError], None]] = []

    @property
    def status(self) -> str:
        """The engine's status."""
        return self._worker.status

    @property
    def last_turn(self) -> float:
        """See `TokenEngine`."""
        return self._heard - self._worker.turn_age

    def load(self) -> EngineLoad:
        """The engine's load, about half a second old at most."""
        return self._worker.load

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """See `TokenEngine`."""
        self._on_failure.append(callback)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        **more: Any,
    ) -> str:
        """Takes a request, and waits until the engine's process has accepted or refused it.

        Raises:
          InvalidRequestError, OverloadedError, DrainingError, EngineFailedError: as the engine's.
        """
        assert request_id is not None
        if self.failure is not None:
            raise self.failure
        with self._answer(request_id) as answer:
            submit = super().submit
            submit(prompt, params, on_output, request_id=request_id, deadline=deadline)
            try:
                refusal: SentError | None = answer.result(ANSWER_SECONDS)
            except TimeoutError:
                self.cancel(request_id)
                raise self.failure or EngineFailedError(
                    f"the engine's process did not answer within {ANSWER_SECONDS:g} s"
                ) from None
        if refusal is not None:
            raise refusal.error()
        return request_id

    def abort_elsewhere(self, request_id: str) -> bool:
        """Ends a request of another face; returns whether one has it."""
        with self._answer(request_id) as answer:
            for worker in self._workers():
                self.connections.send(worker, Abort(request_id))
                with contextlib.suppress(TimeoutError):
                    return bool(answer.result(ANSWER_SECONDS))
        return False

    def received(self, place: Place, frame: Any) -> None:
        """See `RouterEngine.received`."""
        match frame:
            case frames.State():
                self._note(frame)
                # The engine refuses, finishes and hands over nothing by this router's rules.
                frame = frames.State("ready", 0.0, frame.load, orphans=frame.orphans)
            case Outputs(outputs=outputs):  # the engine's failure follows, and says it better
                frame.outputs = _merged([one for one in outputs if not one.engine_failed])
            case frames.Rejected(request_id=attempt, refusal=refusal):
                request_id = attempt.rpartition("@")[0]
                if request_id in self._answers:
                    with self._lock:  # its caller gets the refusal instead of a last output
                        self._send(self._coordinator.cancel(request_id))
                    self._answered(request_id, refusal)
                    return
            case Admitted(request_id=attempt):
                self._answered(attempt.rpartition("@")[0], None)
            case Aborted(request_id=request_id, found=found):
                self._answered(request_id, found)
            case Abort(request_id=request_id):
                self._faces.requests.abort(request_id)
        super().received(place, frame)

    def _note(self, state: frames.State) -> None:
        drains = state.drain and not self._worker.drain
        self._worker, self._heard = state, time.monotonic()
        if drains:
            self._faces.refuse()
        if state.failure is not None and self.failure is None:
            self.failure = EngineFailedError(state.failure)
            for callback in self._on_failure:
                callback(self.failure)

    @contextlib.contextmanager
    def _answer(self, request_id: str) -> Any:
        answer = self._answers[request_id] = Future()
        try:
            yield answer
        finally:
            self._answers.pop(request_id, None)

    def _answered(self, request_id: str, answer: object) -> None:
        if (future := self._answers.pop(request_id, None)) is not None:
            future.set_result(answer)


def _merged(outputs: list[TokenOutput]) -> list[TokenOutput]:
    """Outputs of several steps that came together, one a request."""
    batch: dict[str, list[TokenOutput]] = {}
    for output in outputs:
        batch.setdefault(output.request_id, []).append(output)
    if len(batch) == len(outputs):
        return outputs
    return [msgspec.structs.replace(joined(own), offset=own[0].offset) for own in batch.values()]


def _join_ports(faces: LocalFaces) -> None:
    """Begins to listen, and tells the engine's process where."""
    print(msgspec.json.encode(faces.start()).decode(), flush=True)


def main() -> int:
    """Serves until the engine's process says that it is over; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    logs.configure(start.log_format)
    deployment = start.deployment
    try:
        faces = LocalFaces(
            deployment.model,
            deployment.server,
            start.insecure_bind,
            share_ports=True,
            messages_a_second=MESSAGES_A_SECOND,
        )
        if not start.successor:
            _join_ports(faces)
    except JaxserveError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    engine = FaceEngine(start, faces)
    engine.start()

    def open_faces() -> None:
        while not engine.wait(1.0):
            pass
        faces.open(engine, Path(start.metrics_folder), engine.abort_elsewhere)
        try:
            if start.successor:
                _join_ports(faces)
        except JaxserveError as error:
            print(f"jaxserve: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        print(flush=True)

    threading.Thread(target=open_faces, daemon=True).start()
    grace = sys.stdin.buffer.readline()
    if not grace:
        os._exit(1)  # without the engine's process no request can be completed
    engine.abort_elsewhere("")  # its answer comes behind the news of a failure
    faces.stop(float(grace))
    return 0


if __name__ == "__main__":
    sys.exit(main())
