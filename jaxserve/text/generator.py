"""Prompts in, text out: what stands between the engine, which knows token ids, and the faces.

`TextGenerator` checks and tokenises prompts and submits them; each request is a `Generation`
(`generation.py`). The engine's callbacks must return at once, so what they bring is turned into
text on one thread of the generator's own. Called by the network faces and by `LLM`; sending,
coalescing and protocols are theirs. Knows no network, no event loop, and of the engine only what
`TokenEngine` says.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import SupportsIndex

from jaxserve.engine.request import FinishReason, SamplingParams, TokenOutput, checked_ids
from jaxserve.errors import DrainingError, InvalidRequestError
from jaxserve.text.generation import (
    MAX_REQUEST_ID_CHARACTERS,
    Generation,
    checked_request_id,
    new_request_id,
)
from jaxserve.text.output import GenerationOutput, TokenEngine, joined
from jaxserve.text.structured import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import MISSING

Prompt = str | Sequence[SupportsIndex]
"""Text, or token ids (Python's ints or NumPy's)."""

CLOSE_SECONDS = 5.0
SHORT_PROMPT = 512
"""Characters, or ids, of a prompt that is tokenised faster than it is handed to another thread."""
MAX_BATCH = 4096
"""Most outputs that the generator's thread takes in one batch."""

Observer = Callable[[SamplingParams], Callable[[GenerationOutput], None]]
"""Called when a request is submitted; the function it returns gets every output of the request."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an output."""


class TextGenerator:
    """Prompts in, text deltas out. One per engine; any thread may submit.

    Args:
      engine, tokenizer: see below.
      observe: called for every request; a request that the engine refuses has no outputs.

    Attributes:
      engine: generates the tokens.
      tokenizer: of the engine's model.
      grammars: compiles the grammars that requests ask for.
      elsewhere: ends a request of another process with the same engine, and returns whether it was
        found. Then `submit` waits for the engine's process, as this does: not for an event loop.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        observe: Observer | None = None,
        elsewhere: Callable[[str], bool] | None = None,
    ):
        self.engine, self.elsewhere = engine, elsewhere
        self.tokenizer = tokenizer
        info = engine.model_info()
        self._vocab_size: int = info["vocab_size"]
        self._max_length: int = info["max_length"]
        self.grammars = GrammarCompiler(tokenizer, self._vocab_size)
        self._observe = observe
        self._closed = False
        self._live: dict[str, Generation] = {}
        self._lock = threading.Lock()
        # Without a bound of its own: each request has a limit, beyond which nothing is posted.
        self._mailbox: queue.SimpleQueue[tuple[Generation, TokenOutput] | None]
        self._mailbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="text-generator", daemon=True)
        self._thread.start()
        # The engine may not be able to end them any more.
        engine.add_failure_callback(lambda failure: self._end_all("error", str(failure)))

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def live_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [generation.request_id for generation in self.live_requests()]

    def live_requests(self) -> list[Generation]:
        """The requests that have not ended, the oldest first."""
        with self._lock:
            return list(self._live.values())

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a live request by its id, if it belongs to `owner` (None: any owner).

        Returns:
          Whether such a request was found.
        """
        with self._lock:
            generation = self._live.get(request_id)
        if generation is None or owner not in (None, generation.owner):
            return False
        generation.abort()
        return True

    def encode(
        self,
        prompt: Prompt,
        *,
        add_bos: bool = True,
        field: str = "prompt",
        keep: int | None = None,
        keep_first: bool = False,
    ) -> list[int]:
        """Tokenises and checks a prompt. Slow for long texts: do not call it on an event loop.

        Args:
          prompt: text, or token ids.
          add_bos: False for the text of a chat template, which writes bos itself if it wants it.
          field: name of the prompt in errors.
          keep: keep only this many last tokens; -1: as many as leave room for one more; None: all.
          keep_first: keep this many first tokens instead.

        Raises:
          InvalidRequestError: the prompt is empty, or has an id out of range.
          PromptTooLongError: it leaves no room for an output.
        """
        if isinstance(prompt, str):
            longest = self._max_length * self.tokenizer.longest_token
            if len(prompt) > longest:
                raise PromptTooLongError(
                    field, f"{len(prompt)} characters are more than {self._max_length} tokens hold"
                )
            if not prompt:
                raise InvalidRequestError(field, "is empty")
            try:
                token_ids = self.tokenizer.encode(prompt, add_bos=add_bos)
            except ValueError as error:
                raise InvalidRequestError(field, str(error)) from None
        else:
            token_ids = checked_ids(prompt, self._vocab_size, field)
        if keep is not None:
            most = keep if keep > 0 else self._max_length - 1
            token_ids = token_ids[:most] if keep_first else token_ids[-most:]
        if not token_ids:
            raise InvalidRequestError(field, "is empty")
        if len(token_ids) >= self._max_length:
            raise PromptTooLongError(
                field,
                f"{len(token_ids)} tokens leave no room for an output: prompt and output together "
                f"have at most {self._max_length} tokens",
            )
        return token_ids

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError for parameters that `submit` would refuse."""
        params.validate()
        if params.stop and not self.tokenizer.knows_text:
            raise InvalidRequestError("stop", f"{MISSING}, and stop_token_ids to end at")

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[GenerationOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        max_pending_tokens: int | None = None,
        owner: str = "",
    ) -> Generation:
        """Starts a request.

        Args:
          prompt: text, or token ids (`encode` gives them; checking them again is cheap).
          params: how to generate; validated here.
          on_text: called with every output in order, on the generator's thread; must return at
            once. May be called before `submit` returns.
          request_id: at most 256 printable ASCII characters, unique among the live requests; None:
            a random one.
          deadline: seconds of `time.monotonic` at which the engine cancels the request.
          max_pending_tokens: end the request ("cancelled") when this many tokens were generated and
            not yet `consumed()`. None: no limit.
          owner: the tenant whose request it is.

        Raises:
          InvalidRequestError: names the field.
          OverloadedError, DrainingError, EngineFailedError: from the engine.
        """
        self.check(params)
        token_ids = self.encode(prompt)
        # A face may have put its tenant's name before the client's id.
        most = 2 * MAX_REQUEST_ID_CHARACTERS
        request_id = checked_request_id(
            new_request_id() if request_id is None else request_id, most
        )
        generation = Generation(
            self,
            request_id,
            token_ids,
            params,
            on_text,
            deadline,
            max_pending_tokens,
            None if self._observe is None else self._observe(params),
            owner,
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
        """Ends the live requests as "cancelled" and stops the threads. The engine runs on."""
        with self._lock:
            self._closed = True
        self._end_all("cancelled", "the server shuts down")
        self._mailbox.put(None)
        self._thread.join(CLOSE_SECONDS)
        self.grammars.close()

    def post(self, generation: Generation, output: TokenOutput) -> None:
        """Queues an output of the engine for the generator's thread."""
        self._mailbox.put((generation, output))

    def cancel(self, generation: Generation) -> None:
        """Has the engine end a request, unless it has ended (its id may be another's by now)."""
        with self._lock:
            live = self._live.get(generation.request_id) is generation
        if live:
            self.engine.cancel(generation.request_id)

    def release(self, generation: Generation) -> None:
        """Frees the id of an ended request, and cancels it in the engine if it still runs there."""
        if not generation.ended_by_engine:
            self.cancel(generation)
        self._forget(generation)

    def _run(self) -> None:
        closed = False
        while not closed:
            # Outputs that queued up meanwhile are handled together, the more the busier it is.
            items = [self._mailbox.get()]
            while len(items) < MAX_BATCH and not self._mailbox.empty():
                items.append(self._mailbox.get())
            batch: dict[Generation, list[TokenOutput]] = {}
            for item in items:
                if item is None:
                    closed = True
                    break
                batch.setdefault(item[0], []).append(item[1])
            for generation, outputs in batch.items():
                generation.advance(joined(outputs))

    def _forget(self, generation: Generation) -> None:
        with self._lock:
            if self._live.get(generation.request_id) is generation:
                del self._live[generation.request_id]

    def _end_all(self, reason: FinishReason, error: str) -> None:
        with self._lock:
            live = list(self._live.values())
        for generation in live:
            self.post(
                generation,
                TokenOutput(request_id=generation.request_id, finish_reason=reason, error=error),
            )
