"""What the faces need of an engine, and probes of anything that runs steps.

Written down as protocols, so that what stands before the engine knows nothing else of it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxserve.engine.load import EngineLoad
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.engine.view import PipelineView
from jaxserve.errors import EngineFailedError


class StepLoop(Protocol):
    """What probes ask: an engine, or a process that follows one."""

    @property
    def status(self) -> str:
        """ "starting", "ready", "draining", "failed" or "closed"."""

    @property
    def last_turn(self) -> float:
        """Seconds of `time.monotonic` at which the step loop last went round, idle or not."""


class TokenEngine(StepLoop, Protocol):
    """What the faces need of an engine; `jaxserve.engine.engine.Engine` is one."""

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the status is "failed"."""

    def load(self) -> EngineLoad:
        """How much there is to do; from any thread."""

    def pipeline(self) -> PipelineView:
        """What the steps measured last looked like; asking has more of them measured."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        """Queues a prompt; `on_output` is called on the engine's thread."""

    def cancel(self, request_id: str) -> None:
        """Ends a request, from any thread; an unknown one is fine."""

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Calls back once, from any thread, when the engine fails."""

    def model_info(self) -> Mapping[str, Any]:
        """What is served: `model` (a name), `vocab_size`, `max_length` (prompt and output, in
        tokens), `dtype`, `mode`, `attention` and `ffn` (their axes), `lanes`."""
