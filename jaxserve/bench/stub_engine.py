"""An engine without a model, for the benchmark of the faces. Used by `front.py`."""

import time
from collections.abc import Callable
from typing import Any

from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.request import FinishReason, SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.observe.load import EngineLoad
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
