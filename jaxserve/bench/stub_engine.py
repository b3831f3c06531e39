"""Engines without a model, for benches of what stands before one.

Called by `front.py` and `streams.py`.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from jaxserve.engine.interface import EngineLoad
from jaxserve.engine.request import FinishReason, SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.observe.view import PipelineView
from jaxserve.text.tokenizer import Tokenizer

PORTION = 1
"""Tokens that the stub hands out at a time."""


class StubEngine:
    """A `TokenEngine` that has every token at once, `PORTION` a callback."""

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
        for start in range(0, len(script), PORTION):
            token_ids = script[start : start + PORTION]
            last = start + PORTION >= len(script)
            on_output(
                TokenOutput(
                    request_id=request_id,
                    token_ids=token_ids,
                    finish_reason="length" if last else None,
                )
            )
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


class PacedEngine(StubEngine):
    """A `TokenEngine` whose thread gives every request one token per step until it has them all.

    Args:
      tokenizer: of the model that it pretends to be.
      step_seconds: from one step to the next.

    Attributes:
      thread: the step loop's.
      emitting: CPU seconds that handing out the tokens took, of every step.
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
        """Requests that get tokens."""
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
            token_ids = [self._script[len(self.emitting) % len(self._script)]]
            begin = time.thread_time()
            for request_id, on_output in list(self._running.items()):
                last = len(self.emitting) >= self._ends.get(request_id, 0)
                reason: FinishReason | None = "length" if last else None
                output = TokenOutput(
                    request_id=request_id, token_ids=token_ids, finish_reason=reason
                )
                on_output(output)
                if last:
                    self.cancel(request_id)
            self.emitting.append(time.thread_time() - begin)
            next_step += self._step_seconds
            time.sleep(max(0.0, next_step - time.monotonic()))
