"""What all handlers share: the text generator behind them, and requests on their way through it.

Made by `server.py`, used by the handlers. Knows no routes and no bodies.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from jaxserve.engine.request import SamplingParams
from jaxserve.errors import DrainingError, InvalidRequestError, OverloadedError
from jaxserve.server.chat import ChatTemplate
from jaxserve.server.generation import SHORT_PROMPT, Generation, TextGenerator, new_request_id
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import ClientGone, Exchange
from jaxserve.server.http.requests import MAX_CHOICES
from jaxserve.server.http.responses import PromptTokensDetails, Usage
from jaxserve.server.metrics import Metrics
from jaxserve.server.output import GenerationOutput
from jaxserve.server.stream import StreamBuffer, WholeBuffer
from jaxserve.server.token_engine import StepLoop

TOKENISING_THREADS = 2
MAX_PENDING_TOKENS = 4096
"""Tokens that may wait for a slow reader before its request is ended."""
MAX_ACTIVE = 2048
"""Requests that are read, run or answered at a time; more are refused before they are read."""

Result = TypeVar("Result")


class Job(msgspec.Struct, frozen=True):
    """One choice that is to be generated."""

    index: int
    """Of the choice in the answer."""
    token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    """The prompt's text, where it was one."""


class Source:
    """One choice that is being generated."""

    def __init__(self, job: Job, buffer: StreamBuffer | WholeBuffer, generation: Generation):
        self.job = job
        self.generation = generation
        self._buffer = buffer

    async def take(self) -> GenerationOutput:
        """The next output, or the whole where nothing is streamed.

        Raises:
          HttpError, DrainingError, EngineFailedError, ClientGone: it ended, and is not complete.
        """
        output = await self._buffer.take()
        if output.finish_reason in ("cancelled", "error"):
            raise _why(output, self.generation)
        return output

    async def outputs(self) -> AsyncIterator[GenerationOutput]:
        """Every output up to the end; what was yielded counts as read when the next is asked."""
        while True:
            output = await self.take()
            yield output
            if output.finish_reason is not None:
                return
            self.generation.consumed(len(output.token_ids))


class Service:
    """The state behind the handlers. Lives on the server's event loop.

    Args:
      request_seconds: the longest that a request may run.
      max_pending_tokens: tokens that may wait for a slow reader.

    Attributes:
      generator: None until the engine is ready, and where there is none.
      step_loop: what probes ask; None until then.
      template: of chats; None where the model has none.
      metrics: what is measured; None until the engine is ready.
      on_drain: has the process end in good order.
      draining: whether new requests are refused.
      created: seconds of the epoch at which the model was there.
    """

    def __init__(self, request_seconds: float, max_pending_tokens: int):
        self.generator: TextGenerator | None = None
        self.step_loop: StepLoop | None = None
        self.template: ChatTemplate | None = None
        self.metrics: Metrics | None = None
        self.on_drain: Callable[[], None] | None = None
        self.draining = False
        self.created = int(time.time())
        self._request_seconds = request_seconds
        self._max_pending_tokens = max_pending_tokens
        self._tokenising = ThreadPoolExecutor(TOKENISING_THREADS, "http-tokenise")
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """Stops the threads."""
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Counts a request; raises OverloadedError if there are too many."""
        if self._active >= MAX_ACTIVE:
            raise OverloadedError(f"{self._active} requests are being served")
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Whether every request has been answered within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def ready(self) -> TextGenerator:
        """The generator.

        Raises:
          DrainingError, HttpError: there is none yet, or no longer.
        """
        self.check_ready()
        assert self.generator is not None
        return self.generator

    def check_ready(self) -> StepLoop:
        """What runs the steps.

        Raises:
          DrainingError, HttpError: it does not yet, or no longer.
        """
        if self.draining:
            raise DrainingError("the server shuts down and takes no new requests")
        if self.step_loop is None:
            raise HttpError(503, "the server is starting", code="starting")
        return self.step_loop

    def model(self, asked: str | None) -> str:
        """The served model's name; raises HttpError if another one is asked for."""
        name = str(self.ready().engine.model_info()["model"])
        if asked is not None and asked != name:
            raise HttpError(
                404,
                f"model: {asked[:128]!r} is not served here; {name!r} is",
                param="model",
                code="model_not_found",
            )
        return name

    async def encode(self, prompt: str | list[int]) -> list[int]:
        """The token ids of a prompt, checked; a long one on another thread.

        Raises:
          InvalidRequestError: as `TextGenerator.encode`.
        """
        encode = self.ready().encode
        if len(prompt) <= SHORT_PROMPT:
            return encode(prompt)
        return await self.in_thread(encode, prompt)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs what takes long off the event loop, on one of a few threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenising, function, *arguments)

    @contextlib.asynccontextmanager
    async def running(
        self, exchange: Exchange, jobs: Sequence[Job], *, stream: bool
    ) -> AsyncIterator[list[Source]]:
        """Submitted jobs; leaving, for whatever reason, cancels those that have not ended."""
        if len(jobs) > MAX_CHOICES:
            raise InvalidRequestError("n", f"{len(jobs)} choices, at most {MAX_CHOICES}")
        generator = self.ready()
        # Unique whatever the client calls its request, and found in the log by that name.
        name = f"{exchange.request_id[:80]}.{new_request_id()[:12]}"
        deadline = time.monotonic() + self._request_seconds
        sources: list[Source] = []
        try:
            for job in jobs:
                buffer = StreamBuffer(lambda: generator.live) if stream else WholeBuffer()
                generation = generator.submit(
                    job.token_ids,
                    job.params,
                    buffer.put,
                    request_id=f"{name}.{job.index}",
                    deadline=deadline,
                    max_pending_tokens=self._max_pending_tokens if stream else None,
                )
                sources.append(Source(job, buffer, generation))
            async with exchange.while_connected():
                yield sources
        finally:
            for source in sources:
                source.generation.cancel()


class UsageCount:
    """What the choices of a request took so far."""

    def __init__(self, jobs: Sequence[Job], choices_a_prompt: int):
        self._choices = choices_a_prompt
        self._prompt = sum(len(job.token_ids) for job in jobs) // choices_a_prompt
        self._completion = 0
        self._cached: dict[int, int] = {}  # of each prompt, what its first choice found

    def add(self, source: Source, output: GenerationOutput) -> None:
        """Counts the tokens of an output."""
        self._completion += len(output.token_ids)
        prompt, choice = divmod(source.job.index, self._choices)
        if choice == 0:
            self._cached[prompt] = output.cached_token_count

    def usage(self) -> Usage:
        """As clients get it."""
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


def stop_reason(source: Source, output: GenerationOutput) -> str | int | None:
    """What the client asked to stop at, and was met; the model's own end is no news."""
    if output.stop_token_id in source.job.params.stop_token_ids:
        return output.stop_token_id
    return output.stop_string


def _why(output: GenerationOutput, generation: Generation) -> Exception:
    """Why a request ended that neither stopped nor ran to its length."""
    engine = generation.engine
    if generation.overflowed:
        return ClientGone(output.error or "too slow")
    if engine.failure is not None:
        return engine.failure
    if output.finish_reason == "error" and generation.constrained:
        return HttpError(400, f"structured output: {output.error}", code="grammar_failed")
    if generation.deadline is not None and time.monotonic() >= generation.deadline:
        return HttpError(504, "the request ran for too long", code="timeout")
    if engine.status != "ready":
        return DrainingError("the server shut down before the request was complete")
    return RuntimeError(f"ended as {output.finish_reason}: {output.error}")


async def together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them at the same time; the first error ends the others and is raised."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
