"""Interfaces of an engine that faces, health probes and routers' ports use.

Protocols, so that fleet/, text/ and server/ depend on nothing else of the engine.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.observe.load import EngineLoad
from jaxserve.observe.view import PipelineView


class StepLoop(Protocol):
    """Loop that health probes ask about: an engine, or a process that follows one."""

    @property
    def status(self) -> str:
        """ "starting", "ready", "draining", "failed" or "closed"."""

    @property
    def last_turn(self) -> float:
        """Seconds of `time.monotonic` of the step loop's last iteration, idle or not."""


@runtime_checkable
class TokenEngine(StepLoop, Protocol):
    """Interface of an engine for the faces; implemented by `jaxserve.engine.engine.Engine`."""

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the status is "failed"."""

    def load(self) -> EngineLoad:
        """The engine's current load; from any thread."""

    def pipeline(self) -> PipelineView:
        """Returns a view of the last measured steps, and asks for more measurements."""

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
        """Cancels a request, from any thread; an unknown id is ignored."""

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Registers a callback for the engine's failure; called once, from any thread."""

    def model_info(self) -> Mapping[str, Any]:
        """Describes the served model: `model` (a name), `vocab_size`, `max_length` (prompt and
        output, in tokens), `dtype`, `mode`, `attention` and `ffn` (their axes), `lanes`."""
