"""The engine as a face's process sees it: the other end of a socket pair.

`RemoteEngine` is a `TokenEngine`, so that the faces know nothing of processes. Made and driven by
`child.py`, which hands it every frame that is not its own.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxserve.engine.interface import EngineLoad, TokenEngine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.request_frames import without_grammar
from jaxserve.fleet.worker_frames import AskPipeline, Pipeline, State
from jaxserve.link.session.channel import Channel
from jaxserve.observe.view import PipelineView
from jaxserve.server.processes import frames
from jaxserve.text.generation import Generation
from jaxserve.text.generator import Observer, TextGenerator
from jaxserve.text.tokenizer import Tokenizer

ANSWER_SECONDS = 30.0
"""How long the engine's process may take to admit a request."""


class RemoteEngine:
    """A `TokenEngine` in another process. Any thread may call it; one calls `handle`.

    Args:
      channel: to the engine's process.
      info: the engine's `model_info`.

    Attributes:
      status, failure, last_turn: as the engine's process said last.
    """

    def __init__(self, channel: Channel, info: Mapping[str, Any]):
        self.status = "ready"
        self.failure: EngineFailedError | None = None
        self.last_turn = time.monotonic()
        self._channel = channel
        self._info = info
        self._load = EngineLoad()
        self._view = PipelineView()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Under the lock:
        self._receivers: dict[str, Callable[[TokenOutput], None]] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._on_failure: list[Callable[[EngineFailedError], None]] = []

    def load(self) -> EngineLoad:
        """The engine's load, about half a second old at most."""
        return self._load

    def pipeline(self) -> PipelineView:
        """Asks for a new view; returns the one that the previous call asked for."""
        self._send(AskPipeline())
        return self._view

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        owner: str = "",
    ) -> str:
        """Queues a prompt, and waits until the engine's process has admitted or refused it.

        Raises:
          InvalidRequestError, OverloadedError, DrainingError, EngineFailedError: as the engine's.
        """
        assert request_id is not None
        with self._lock:
            self._receivers[request_id] = on_output
        number, admitted = self._question()
        sent, grammar = without_grammar(params)
        frame = frames.Submit(number, request_id, prompt, sent, owner, deadline, grammar)
        try:
            refusal = self._answer(number, admitted, frame)
        except EngineFailedError:
            self.cancel(request_id)
            self._forget(request_id)
            raise
        if refusal is not None:
            self._forget(request_id)
            raise refusal.error()
        return request_id

    def cancel(self, request_id: str) -> None:
        """Cancels a request; an unknown id or a lost connection is ignored."""
        with contextlib.suppress(EngineFailedError):
            self._send(frames.Cancel(request_id))

    def abort_elsewhere(self, request_id: str, owner: str | None) -> bool:
        """Ends a request of another face's process; returns whether `owner` had such a request."""
        number, found = self._question()
        return bool(self._answer(number, found, frames.AbortElsewhere(number, request_id, owner)))

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Registers a callback for the engine's failure; called once, from any thread."""
        with self._lock:
            self._on_failure.append(callback)

    def model_info(self) -> Mapping[str, Any]:
        """See `TokenEngine`."""
        return self._info

    def handle(self, frame: object) -> None:
        """Takes a frame from the engine's process."""
        match frame:
            case frames.Outputs(outputs=outputs):
                for output in outputs:
                    receiver = self._receivers.get(output.request_id)
                    if output.finish_reason is not None:
                        self._forget(output.request_id)
                    if receiver is not None:
                        receiver(output)
            case frames.Admitted(number=number, refusal=refusal):
                self._answered(number, refusal)
            case frames.Aborted(number=number, found=found):
                self._answered(number, found)
            case State():
                self._note(frame)
            case Pipeline(view=view):
                self._view = view

    def _note(self, state: State) -> None:
        self.status, self._load = state.status, state.load
        self.last_turn = time.monotonic() - state.turn_age
        if state.failure is None or self.failure is not None:
            return
        self.failure = EngineFailedError(state.failure)
        with self._lock:
            callbacks = list(self._on_failure)
        for callback in callbacks:
            callback(self.failure)

    def _send(self, frame: frames.Frame) -> None:
        try:
            self._channel.send(frames.encode(frame))
        except OSError as error:
            raise EngineFailedError(f"the engine's process is gone: {error}") from None

    def _question(self) -> "tuple[int, Future[Any]]":
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            self._answers[number] = future
        return number, future

    def _answer(self, number: int, future: "Future[Any]", frame: frames.Frame) -> Any:
        try:
            self._send(frame)
            return future.result(ANSWER_SECONDS)
        except TimeoutError:
            raise EngineFailedError(
                f"the engine's process did not answer within {ANSWER_SECONDS:g} s"
            ) from None
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def _answered(self, number: int, answer: object) -> None:
        with self._lock:
            future = self._answers.pop(number, None)
        if future is not None:
            future.set_result(answer)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._receivers.pop(request_id, None)


class RemoteGenerator(TextGenerator):
    """A text generator over a `RemoteEngine`."""

    blocks = True

    def __init__(self, engine: TokenEngine, tokenizer: Tokenizer, observe: Observer | None = None):
        assert isinstance(engine, RemoteEngine)
        super().__init__(engine, tokenizer, observe)
        self._remote = engine

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a live request of any face's process; may wait for the engine's process."""
        return super().abort(request_id, owner) or self._remote.abort_elsewhere(request_id, owner)

    def enqueue(self, generation: Generation, params: SamplingParams) -> None:
        """Submits a request; waits for the engine's process."""
        self._remote.submit(
            generation.prompt,
            params,
            generation.receive,
            request_id=generation.request_id,
            deadline=generation.deadline,
            owner=generation.owner,
        )
