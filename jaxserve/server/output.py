"""News of one request on its way to a client, and how consecutive ones become one.

Made by `generation.py`, read by the faces and by what measures them.
"""

from collections.abc import Sequence

import msgspec

from jaxserve.engine.logprobs import TokenLogprobs
from jaxserve.engine.request import FinishReason, TokenOutput


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one request. Texts and token ids of all outputs join to the whole.

    Attributes:
      request_id: whose news.
      text: the new text; may lag behind the tokens, and comes without the stop string.
      token_ids: the new tokens, the one that completed a stop string included, an end id not.
      finish_reason: set in the last output, which comes exactly once.
      stop_string, stop_token_id: what ended it, where `finish_reason` is "stop".
      error: what went wrong, where `finish_reason` is "error" or "cancelled".
      prompt_token_count: tokens of the prompt, bos included.
      completion_token_count: all tokens handed out so far.
      logprobs: of `token_ids`, where the request asked for them.
      prompt_logprobs: of the prompt's tokens, the first of which has none; once, likewise.
      cached_token_count: tokens of the prompt that the engine did not have to compute.
      queue_seconds: how long the request waited before the engine let it in.
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


def merge(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Joins consecutive outputs of one request, at least one, into one."""
    if len(outputs) == 1:
        return outputs[0]
    return msgspec.structs.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[logprobs for output in outputs for logprobs in output.logprobs],
        prompt_logprobs=next(
            (output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None),
            None,
        ),
    )


def joined(news: Sequence[TokenOutput]) -> TokenOutput:
    """Consecutive news of one request, at least one, as one; what follows its end is dropped."""
    if len(news) == 1:
        return news[0]
    ended = next((n for n, one in enumerate(news, 1) if one.finish_reason is not None), len(news))
    news = news[:ended]
    scores = (one.prompt_logprobs for one in news if one.prompt_logprobs is not None)
    return msgspec.structs.replace(
        news[-1],
        token_ids=[token_id for one in news for token_id in one.token_ids],
        logprobs=[logprobs for one in news for logprobs in one.logprobs],
        prompt_logprobs=next(scores, None),
    )
