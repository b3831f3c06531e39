"""Outputs of one request on their way to a client; consecutive outputs can be joined.

Made by `generation.py`, read by the faces, by `LLM` and by the metrics.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.engine.request import FinishReason, TokenLogprobs, TokenOutput


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
