"""Engines without a model, for benchmarks of the faces. Used by `front.py` and `streams.py`."""

import threading
import time
from collections.abc import Callable
from typing import Any

from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.interface import EngineLoad
from jaxserve.engine.request import FinishReason, SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.observe.view import PipelineView
from jaxserve.text.tokenizer import Tokenizer

FOLDER = CONFIGS / "demo"
"""Model that the stubs pretend to be."""
PROMPT = [5, 6, 7]


class StubEngine:
    """A `TokenEngine` that has every token at once, one a callback."""

    status = "ready"
    failure: EngineFailedError | None = None

    def __init__(self, tokenizer: Tokenizer):
        self._info = {"model": "stub", "vocab_size": tokenizer.vocab_size, "max_length": 2**20}
        self._info |= {"dtype": "", "mode": "", "attention": "", "ffn": "", "lanes": 1}
        text = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)\n" * 200
        self._script = tokenizer.encode(text)[1:]

    @property
    def last_turn(self) -> float:
        return time.monotonic()

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        assert request_id is not None
        script = (self._script * (params.max_tokens // len(self._script) + 1))[: params.max_tokens]
        for number, token_id in enumerate(script, 1):
            on_output(_output(request_id, token_id, number == len(script)))
        return request_id

    def cancel(self, request_id: str) -> None:
        return

    def load(self) -> EngineLoad:
        return EngineLoad()

    def pipeline(self) -> PipelineView:
        return PipelineView()

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        return

    def model_info(self) -> dict[str, Any]:
        return self._info


def _output(request_id: str, token_id: int, last: bool) -> TokenOutput:
    reason: FinishReason | None = "length" if last else None
    return TokenOutput(request_id=request_id, token_ids=[token_id], finish_reason=reason)


class PacedEngine(StubEngine):
    """A `TokenEngine` whose thread gives every request one token per step until it has them all.

    Args:
      tokenizer: tokenizer of the model that it pretends to be.
      step_seconds: seconds from one step to the next.

    Attributes:
      thread: thread of the step loop.
      emitting: for each step, the CPU seconds of handing out its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, step_seconds: float):
        super().__init__(tokenizer)
        self.emitting: list[float] = []
        self._step_seconds = step_seconds
        self._running: dict[str, Callable[[TokenOutput], None]] = {}
        self._ends: dict[str, int] = {}  # step after which a request ends
        self.thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self.thread.start()

    @property
    def running(self) -> int:
        """Number of requests that get tokens."""
        return len(self._running)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        assert request_id is not None
        self._ends[request_id] = len(self.emitting) + params.max_tokens
        self._running[request_id] = on_output
        return request_id

    def cancel(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._ends.pop(request_id, None)

    def _run(self) -> None:
        next_step = time.monotonic()
        while True:
            token_id = self._script[len(self.emitting) % len(self._script)]
            begin = time.thread_time()
            for request_id, on_output in list(self._running.items()):
                last = len(self.emitting) >= self._ends.get(request_id, 0)
                on_output(_output(request_id, token_id, last))
                if last:
                    self.cancel(request_id)
            self.emitting.append(time.thread_time() - begin)
            next_step += self._step_seconds
            time.sleep(max(0.0, next_step - time.monotonic()))
