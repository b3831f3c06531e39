"""Interfaces of an engine for text and faces, and outputs of a request on their way to a client.

The protocols keep text/ and server/ from depending on anything else of the engine. Outputs are made
by `generation.py`, and read by the faces, by `LLM` and by the metrics; consecutive ones can be
joined.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from jaxserve.engine.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
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


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of one request. The outputs of a request join to its completion.

    Attributes:
      request_id: id of the request.
      text: the new text; may lag behind the tokens, and never includes the stop string.
      token_ids: the new tokens, including the one that completed a stop string, without EOS.
      finish_reason: set in the last output, which comes exactly once.
      stop_string, stop_token_id: the cause, if `finish_reason` is "stop".
      error: message, if `finish_reason` is "error" or "cancelled".
      prompt_token_count: tokens of the prompt, bos included.
      completion_token_count: all tokens generated so far.
      logprobs: log-probabilities of `token_ids`, if requested.
      prompt_logprobs: the same for the prompt's tokens (None for the first), in a single output.
      cached_token_count: tokens of the prompt that were found in the prefix cache.
      queue_seconds: how long the request waited before the engine admitted it.
      drafted_token_count: drafts that were verified so far.
      accepted_token_count: verified drafts that held.
      unavailable: whether a request that ended in an error may succeed later.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    prompt_token_count: int = 0
    completion_token_count: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_token_count: int = 0
    queue_seconds: float = 0.0
    drafted_token_count: int = 0
    accepted_token_count: int = 0
    unavailable: bool = False


def merge(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Joins consecutive outputs of one request, at least one, into one."""
    if len(outputs) == 1:
        return outputs[0]
    text = "".join(output.text for output in outputs)
    return msgspec.structs.replace(outputs[-1], text=text, **_joined_tokens(outputs))


def joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """Joins consecutive engine outputs of one request, at least one; drops those after its end."""
    if len(outputs) == 1:
        return outputs[0]
    ended = next(
        (n for n, one in enumerate(outputs, 1) if one.finish_reason is not None), len(outputs)
    )
    outputs = outputs[:ended]
    return msgspec.structs.replace(
        outputs[-1],
        drafted=sum(one.drafted for one in outputs),
        accepted=sum(one.accepted for one in outputs),
        **_joined_tokens(outputs),
    )


def _joined_tokens(outputs: Sequence[GenerationOutput] | Sequence[TokenOutput]) -> dict[str, Any]:
    """Tokens and log-probabilities of all outputs."""
    scores = (one.prompt_logprobs for one in outputs if one.prompt_logprobs is not None)
    return {
        "token_ids": [token_id for one in outputs for token_id in one.token_ids],
        "logprobs": [logprobs for one in outputs for logprobs in one.logprobs],
        "prompt_logprobs": next(scores, None),
    }
