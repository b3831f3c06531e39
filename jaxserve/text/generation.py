"""One request on its way from token ids to text.

A `Generation` detokenises what the engine sends, looks for stop strings and ends the engine's
request when one came. Made by `TextGenerator` (`generator.py`), on whose thread all of that runs;
held by the network faces and `LLM`, which send the text on. Knows no network, no event loop, and
of the engine only what `TokenEngine` says.
"""

import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import InvalidRequestError
from jaxserve.text.output import GenerationOutput, TokenEngine
from jaxserve.text.tokenizer import IncrementalDetokenizer, StopMatcher

if TYPE_CHECKING:
    from jaxserve.text.generator import TextGenerator

MAX_REQUEST_ID_CHARACTERS = 128

logger = logging.getLogger(__name__)


class Generation:
    """One request on its way through a `TextGenerator`; made by `TextGenerator.submit`.

    The consumer may `cancel()` it at any time, and calls `consumed()` if it set a limit.

    Attributes:
      request_id: unique among the live requests.
      owner: the tenant whose request it is.
      prompt: its token ids.
      constrained: whether it has a grammar.
      deadline: seconds of `time.monotonic` after which the engine ends it.
      overflowed: whether it was ended because its consumer was too slow.
      aborted: whether it was ended by `abort`.
      ended_by_engine: whether the engine has sent the request's last output.
      begun: seconds of `time.monotonic` at its submission.
      produced: tokens that the engine has sent.
    """

    def __init__(
        self,
        generator: "TextGenerator",
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        on_text: Callable[[GenerationOutput], None],
        deadline: float | None,
        max_pending_tokens: int | None,
        observe: Callable[[GenerationOutput], None] | None = None,
        owner: str = "",
    ):
        self.request_id = request_id
        self.owner = owner
        self.begun = time.monotonic()
        self.prompt = prompt
        self.constrained = params.grammar is not None
        self.deadline = deadline
        self.overflowed = False
        self.aborted = False
        self._generator = generator
        self._on_text = on_text
        self._observe = observe
        self._limit = max_pending_tokens
        self._consumed = 0  # tokens; written by the consumer alone
        # Written by the engine's thread alone.
        self.produced = 0
        self.ended_by_engine = False
        # The rest belongs to the generator's thread.
        self._min_tokens = params.min_tokens
        self._has_stops = bool(params.stop)
        self._include_stop = params.include_stop
        special = not params.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(generator.tokenizer, special=special)
        self._matcher = StopMatcher(params.stop)
        self._completion_token_count = 0
        self._drafted = self._accepted = 0
        self._finished = False

    @property
    def engine(self) -> TokenEngine:
        """The engine that generates its tokens."""
        return self._generator.engine

    def cancel(self) -> None:
        """Cancels the request; a last output "cancelled" follows, unless it has ended."""
        self._generator.cancel(self)

    def abort(self) -> None:
        """Cancels the request on behalf of someone other than its consumer."""
        self.aborted = True
        self.cancel()

    def consumed(self, tokens: int) -> None:
        """Tells that the consumer has passed on this many more tokens."""
        self._consumed += tokens

    def receive(self, output: TokenOutput) -> None:
        """Takes an output of the engine, on the engine's thread."""
        if self.overflowed:
            return
        self.produced += len(output.token_ids)
        self.ended_by_engine = output.finish_reason is not None
        waiting = self.produced - self._consumed
        if self._limit is not None and waiting > self._limit:
            self.overflowed = True
            output = TokenOutput(
                request_id=self.request_id,
                finish_reason="cancelled",
                error=f"the reader is too slow: more than {self._limit} tokens wait for it",
            )
        self._generator.post(self, output)

    def advance(self, tokens: TokenOutput) -> None:
        """Turns tokens into text and passes it to the consumer, on the generator's thread.

        An error here or in the consumer ends this request and no other.
        """
        if self._finished:
            return
        try:
            output = self._output(tokens)
        except Exception:
            logger.exception("request %s: detokenising failed", self.request_id)
            output = GenerationOutput(
                request_id=self.request_id, finish_reason="error", error="internal error"
            )
        if output.finish_reason is not None:
            self._end()
        try:
            if self._observe is not None:
                self._observe(output)
            self._on_text(output)
        except Exception:
            logger.exception("request %s: its consumer failed", self.request_id)
            self._end()

    def _end(self) -> None:
        self._finished = True
        self._generator.release(self)

    def _output(self, tokens: TokenOutput) -> GenerationOutput:
        text, token_ids, stop = self._text_of(tokens.token_ids)
        self._completion_token_count += len(token_ids)
        self._drafted += tokens.drafted
        self._accepted += tokens.accepted
        if stop is None and tokens.finish_reason is not None:
            rest, stop = self._matcher.push(self._detokenizer.finish())
            text += rest + self._matcher.finish()
        if stop is not None and self._include_stop:
            text += stop
        return GenerationOutput(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=tokens.finish_reason if stop is None else "stop",
            stop_string=stop,
            stop_token_id=tokens.stop_token_id if stop is None else None,
            error=tokens.error if stop is None else None,
            prompt_token_count=len(self.prompt),
            completion_token_count=self._completion_token_count,
            logprobs=tokens.logprobs[: len(token_ids)],
            prompt_logprobs=tokens.prompt_logprobs,
            cached_token_count=tokens.cached_tokens,
            queue_seconds=tokens.queue_seconds,
            drafted_token_count=self._drafted,
            accepted_token_count=self._accepted,
            unavailable=tokens.unavailable and stop is None,
        )

    def _text_of(self, token_ids: list[int]) -> tuple[str, list[int], str | None]:
        """The text of new tokens, the tokens used, and the stop string that ended them."""
        if not self._has_stops:
            return self._detokenizer.push(token_ids), token_ids, None
        # One by one: which tokens belong to the completion must not depend on how they arrived.
        parts = []
        for count, token_id in enumerate(token_ids, start=1):
            text, stop = self._detokenizer.push([token_id]), None
            if self._completion_token_count + count >= self._min_tokens:
                text, stop = self._matcher.push(text)
            parts.append(text)
            if stop is not None:
                return "".join(parts), token_ids[:count], stop
        return "".join(parts), token_ids, None


def new_request_id() -> str:
    """A random id for a request whose client gave none."""
    return uuid.uuid4().hex


def checked_request_id(request_id: str, most: int = MAX_REQUEST_ID_CHARACTERS) -> str:
    """Returns a request id.

    Raises:
      InvalidRequestError: it is not 1 to `most` printable ASCII characters.
    """
    printable = request_id.isascii() and request_id.isprintable()
    if not printable or not 1 <= len(request_id) <= most:
        raise InvalidRequestError("request_id", f"must be 1 to {most} printable ASCII characters")
    return request_id
