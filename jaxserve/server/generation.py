"""Between the engine, which knows token ids, and the faces, which want text.

`TextGenerator` submits prompts to the engine and hands back text deltas: it detokenises, looks for
stop strings and ends the engine's request when one came. All of that happens on one thread of its
own, because the engine's callbacks have to return at once. Called by the gRPC service and by
`LLM`; sending, coalescing and protocols are theirs.
Knows no network, no event loop, and of the engine only what `TokenEngine` says.
"""

import logging
import operator
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import SupportsIndex, cast

from jaxserve.engine.request import FinishReason, SamplingParams, TokenOutput
from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError
from jaxserve.server.grammars import Grammars
from jaxserve.server.output import GenerationOutput, joined
from jaxserve.server.token_engine import TokenEngine
from jaxserve.server.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer

Prompt = str | Sequence[SupportsIndex]
"""Text, or token ids (Python's ints or NumPy's)."""

MAX_REQUEST_ID_CHARACTERS = 128
CLOSE_SECONDS = 5.0
SHORT_PROMPT = 512
"""Characters, or ids, that are tokenised sooner than another thread begins to."""
MAX_PORTION = 4096
"""News that the generator's thread takes at a time."""

logger = logging.getLogger(__name__)


class Generation:
    """One request on its way through a `TextGenerator`; made by `TextGenerator.submit`.

    The consumer may `cancel()` it at any time, and calls `consumed()` if it set a limit.

    Attributes:
      request_id: unique among the live requests.
      prompt: its token ids.
      constrained: whether it has a grammar.
      deadline: seconds of `time.monotonic` after which the engine ends it.
      overflowed: whether it was ended because its consumer was too slow.
      ended_by_engine: whether the engine has said its last about it.
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
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.constrained = params.grammar is not None
        self.deadline = deadline
        self.overflowed = False
        self._generator = generator
        self._on_text = on_text
        self._observe = observe
        self._limit = max_pending_tokens
        self._consumed = 0  # tokens; written by the consumer alone
        # Written by the engine's thread alone.
        self._produced = 0  # tokens
        self.ended_by_engine = False
        # The rest belongs to the generator's thread.
        self._min_tokens = params.min_tokens
        self._has_stops = bool(params.stop)
        special = not params.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(generator.tokenizer, special=special)
        self._matcher = StopMatcher(params.stop)
        self._completion_token_count = 0
        self._finished = False

    @property
    def engine(self) -> TokenEngine:
        """Who generates its tokens."""
        return self._generator.engine

    def cancel(self) -> None:
        """Gives the request up; a last output "cancelled" follows if none came yet."""
        self._generator.cancel(self)

    def consumed(self, tokens: int) -> None:
        """Says that the consumer has passed on so many more tokens."""
        self._consumed += tokens

    def receive(self, output: TokenOutput) -> None:
        """Takes the engine's news, on the engine's thread."""
        if self.overflowed:
            return
        self._produced += len(output.token_ids)
        self.ended_by_engine = output.finish_reason is not None
        waiting = self._produced - self._consumed
        if self._limit is not None and waiting > self._limit:
            self.overflowed = True
            output = TokenOutput(
                request_id=self.request_id,
                finish_reason="cancelled",
                error=f"the reader is too slow: more than {self._limit} tokens wait for it",
            )
        self._generator.post(self, output)

    def advance(self, news: TokenOutput) -> None:
        """Turns tokens into text and hands it on, on the generator's thread.

        Whatever goes wrong here or in the consumer ends this request and no other.
        """
        if self._finished:
            return
        try:
            output = self._output(news)
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

    def _output(self, news: TokenOutput) -> GenerationOutput:
        text, token_ids, stop = self._text_of(news.token_ids)
        self._completion_token_count += len(token_ids)
        if stop is None and news.finish_reason is not None:
            rest, stop = self._matcher.push(self._detokenizer.finish())
            text += rest + self._matcher.finish()
        return GenerationOutput(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=news.finish_reason if stop is None else "stop",
            stop_string=stop,
            stop_token_id=news.stop_token_id if stop is None else None,
            error=news.error if stop is None else None,
            prompt_token_count=len(self.prompt),
            completion_token_count=self._completion_token_count,
            logprobs=news.logprobs[: len(token_ids)],
            prompt_logprobs=news.prompt_logprobs,
            cached_token_count=news.cached_tokens,
            queue_seconds=news.queue_seconds,
        )

    def _text_of(self, token_ids: list[int]) -> tuple[str, list[int], str | None]:
        """Text of new tokens, the tokens it took, and the stop string that cut them."""
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


Observer = Callable[[], Callable[[GenerationOutput], None]]
"""Called when a request is submitted; what it returns is told of every output."""


class TextGenerator:
    """Prompts in, text deltas out. One an engine; any thread may submit.

    Args:
      engine, tokenizer: see below.
      observe: called for every request; a request that the engine refuses has no outputs.

    Attributes:
      engine: where tokens come from.
      tokenizer: of the engine's model.
      grammars: likewise; compiles those that requests ask for.
    """

    def __init__(self, engine: TokenEngine, tokenizer: Tokenizer, observe: Observer | None = None):
        self.engine = engine
        self.tokenizer = tokenizer
        info = engine.model_info()
        self._vocab_size: int = info["vocab_size"]
        self._max_length: int = info["max_length"]
        self.grammars = Grammars(tokenizer, self._vocab_size)
        self._observe = observe
        self._closed = False
        self._live: dict[str, Generation] = {}
        self._lock = threading.Lock()
        # Unbounded itself: each request has its own limit, and what overflows is not posted.
        self._mailbox: queue.SimpleQueue[tuple[Generation, TokenOutput] | None]
        self._mailbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="text-generator", daemon=True)
        self._thread.start()
        engine.add_failure_callback(self._engine_failed)

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def live_ids(self) -> list[str]:
        """Their ids."""
        with self._lock:
            return list(self._live)

    def abort(self, request_id: str) -> bool:
        """Ends a live request by its id; whether there was one."""
        with self._lock:
            generation = self._live.get(request_id)
        if generation is not None:
            generation.cancel()
        return generation is not None

    def encode(self, prompt: Prompt, *, add_bos: bool = True) -> list[int]:
        """The prompt's token ids, checked. Takes long for long texts: not for an event loop.

        Args:
          prompt: text, or token ids.
          add_bos: False for the text of a chat template, which writes bos itself if it wants it.

        Raises:
          InvalidRequestError: the prompt is empty or too long, or has an id out of range.
        """
        if isinstance(prompt, str):
            longest = self._max_length * self.tokenizer.longest_token
            if len(prompt) > longest:
                raise InvalidRequestError(
                    "prompt",
                    f"{len(prompt)} characters are more than {self._max_length} tokens hold",
                )
            if not prompt:
                raise InvalidRequestError("prompt", "is empty")
            try:
                token_ids = self.tokenizer.encode(prompt, add_bos=add_bos)
            except ValueError as error:
                raise InvalidRequestError("prompt", str(error)) from None
        else:
            token_ids = _checked_ids(prompt, self._vocab_size)
        if not token_ids:
            raise InvalidRequestError("prompt", "is empty")
        if len(token_ids) >= self._max_length:
            raise InvalidRequestError(
                "prompt",
                f"{len(token_ids)} tokens leave no room for an output: prompt and output together "
                f"have at most {self._max_length} tokens",
            )
        return token_ids

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[GenerationOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        max_pending_tokens: int | None = None,
    ) -> Generation:
        """Starts a request.

        Args:
          prompt: text, or token ids (`encode` gives them; checking them again is cheap).
          params: how to generate; validated here.
          on_text: gets every output in order, on the generator's thread; must return at once.
            May be called before `submit` returns.
          request_id: at most 128 printable ASCII characters, unique among the live; None: made up.
          deadline: seconds of `time.monotonic` at which the engine gives the request up.
          max_pending_tokens: end the request ("cancelled") when so many tokens were generated and
            not yet `consumed()`. None: no limit.

        Raises:
          InvalidRequestError: names the field.
          OverloadedError, DrainingError, EngineFailedError: from the engine.
        """
        params.validate()
        token_ids = self.encode(prompt)
        request_id = new_request_id() if request_id is None else checked_request_id(request_id)
        generation = Generation(
            self,
            request_id,
            token_ids,
            params,
            on_text,
            deadline,
            max_pending_tokens,
            None if self._observe is None else self._observe(),
        )
        with self._lock:
            if self._closed:
                raise DrainingError("closed")
            if request_id in self._live:
                raise InvalidRequestError("request_id", f"{request_id!r} is already running")
            self._live[request_id] = generation
        try:
            self.engine.submit(
                token_ids, params, generation.receive, request_id=request_id, deadline=deadline
            )
        except BaseException:
            self._forget(generation)
            raise
        return generation

    def close(self) -> None:
        """Ends what is live as "cancelled" and stops the threads. The engine stays as it is."""
        with self._lock:
            self._closed = True
        self._end_all("cancelled", "the server shuts down")
        self._mailbox.put(None)
        self._thread.join(CLOSE_SECONDS)
        self.grammars.close()

    def post(self, generation: Generation, output: TokenOutput) -> None:
        """Leaves news of a request for the generator's thread."""
        self._mailbox.put((generation, output))

    def cancel(self, generation: Generation) -> None:
        """Has the engine end a request, unless it ended already (its id may be another's now)."""
        with self._lock:
            live = self._live.get(generation.request_id) is generation
        if live:
            self.engine.cancel(generation.request_id)

    def release(self, generation: Generation) -> None:
        """Frees the id of an ended request, and its place in the engine if it still has one."""
        if not generation.ended_by_engine:
            self.cancel(generation)
        self._forget(generation)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            # What came meanwhile goes through together: the busier, the larger the portions.
            items = [self._mailbox.get()]
            while len(items) < MAX_PORTION and not self._mailbox.empty():
                items.append(self._mailbox.get())
            news: dict[Generation, list[TokenOutput]] = {}
            for item in items:
                if item is None:
                    goes_on = False
                    break
                news.setdefault(item[0], []).append(item[1])
            for generation, outputs in news.items():
                generation.advance(joined(outputs))

    def _forget(self, generation: Generation) -> None:
        with self._lock:
            if self._live.get(generation.request_id) is generation:
                del self._live[generation.request_id]

    def _engine_failed(self, failure: EngineFailedError) -> None:
        """Ends every live request: the engine may no longer be able to."""
        self._end_all("error", str(failure))

    def _end_all(self, reason: FinishReason, error: str) -> None:
        with self._lock:
            live = list(self._live.values())
        for generation in live:
            self.post(
                generation,
                TokenOutput(request_id=generation.request_id, finish_reason=reason, error=error),
            )


def _checked_ids(prompt: Sequence[SupportsIndex], vocab_size: int) -> list[int]:
    """The prompt as a list of ints in [0, vocab_size)."""
    token_ids = cast(list[int], list(prompt))
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return token_ids
    for index, value in enumerate(prompt):  # NumPy's ints, or something wrong
        field = f"prompt[{index}]"
        try:
            if isinstance(value, bool):
                raise TypeError
            token_ids[index] = operator.index(value)
        except TypeError:
            raise InvalidRequestError(field, f"{value!r} is no token id") from None
        if not 0 <= token_ids[index] < vocab_size:
            raise InvalidRequestError(field, f"token id {value} is not in [0, {vocab_size - 1}]")
    return token_ids


def new_request_id() -> str:
    """An id for a request whose client gave none."""
    return uuid.uuid4().hex


def checked_request_id(request_id: str) -> str:
    """Returns it.

    Raises:
      InvalidRequestError: it has other than 1 to 128 printable ASCII characters.
    """
    printable = request_id.isascii() and request_id.isprintable()
    if not printable or not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            "request_id", f"must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters"
        )
    return request_id
