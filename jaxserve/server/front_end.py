"""Shared by the gRPC and the HTTP server: requests on their way to the text generator and back.

A `FrontEnd` admits requests, tokenises, submits, waits until all are answered, and says why a
request ended that did not complete. `inference.py` and `http/service.py` each have one, on the
event loop of their server. It knows no protocol: statuses, headers and messages are theirs.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from jaxserve.engine.request import SamplingParams
from jaxserve.errors import (
    DrainingError,
    EngineFailedError,
    InvalidRequestError,
    JaxserveError,
    OverloadedError,
)
from jaxserve.server.access import without_addresses
from jaxserve.server.stream import MESSAGES_A_SECOND, StreamBuffer, pause
from jaxserve.server.structured_outputs import FIELD
from jaxserve.server.tracing import Tracing
from jaxserve.text.generation import Generation
from jaxserve.text.generator import SHORT_PROMPT, TextGenerator
from jaxserve.text.output import GenerationOutput, StepLoop, TokenEngine

TOKENISING_THREADS = 2
SUBMITTING_THREADS = 16
"""Most requests that wait concurrently for an engine in another process to admit them."""
MAX_PENDING_TOKENS = 4096
"""Tokens that may wait for a slow reader before its request is ended."""

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class NotReadyError(JaxserveError):
    """The server has no engine, or none yet."""


class NoWorkerError(EngineFailedError):
    """No worker of a fleet is left to run the request; another try may find one.

    Args:
      lost: message for the client; names no host.
      why: message for the log.
    """

    def __init__(self, lost: str, why: str):
        super().__init__(why)
        self.lost = lost


class SlowReaderError(JaxserveError):
    """The request was ended because its client read too slowly."""


class AbortedError(JaxserveError):
    """The request was ended by an abort."""


class DeadlineError(JaxserveError):
    """The request was not complete at its deadline."""


class GrammarFailedError(InvalidRequestError):
    """The request's grammar could not be followed to its end."""


class LiveRequests(Protocol):
    """The requests that operators see and end; a `TextGenerator`, or several in other processes."""

    @property
    def engine(self) -> TokenEngine:
        """Where tokens come from."""

    def live_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a request, see `TextGenerator.abort`."""


class Job(msgspec.Struct, frozen=True):
    """One choice to generate.

    Attributes:
      index: index of the choice in the response.
      token_ids: token ids of the prompt.
      params: how to generate.
      prompt: the prompt's text, if it was given as text.
    """

    index: int
    token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None


class Source:
    """One choice that is being generated; made by `FrontEnd.running`.

    Attributes:
      job: the requested choice.
      generation: the submitted request.
    """

    def __init__(
        self,
        front_end: "FrontEnd",
        job: Job,
        buffer: StreamBuffer,
        generation: Generation,
    ):
        self.job = job
        self.generation = generation
        self._front_end = front_end
        self._buffer = buffer

    async def next_output(self) -> GenerationOutput:
        """The next output, whether or not the request ended well; see `StreamBuffer.take`."""
        return await self._buffer.take()

    def check(self, output: GenerationOutput) -> GenerationOutput:
        """Returns an output unless it says that the request ended before it was complete.

        Raises:
          SlowReaderError, AbortedError, DeadlineError, GrammarFailedError, DrainingError,
          EngineFailedError: why it ended.
        """
        if output.finish_reason in ("cancelled", "error"):
            raise self._end_error(output)
        return output

    async def take(self) -> GenerationOutput:
        """`next_output`, checked."""
        return self.check(await self.next_output())

    async def outputs(self) -> AsyncIterator[GenerationOutput]:
        """All outputs up to the end; each counts as read when the next is asked for.

        Raises:
          As `check`.
        """
        while True:  # the buffer itself: every coroutine between costs each token
            output = await self._buffer.take()
            yield self.check(output)
            if output.finish_reason is not None:
                return
            self.generation.consumed(len(output.token_ids))

    def _end_error(self, output: GenerationOutput) -> Exception:
        generation, engine = self.generation, self.generation.engine
        if generation.overflowed:
            return SlowReaderError(output.error or "the reader is too slow")
        if engine.failure is not None:
            return engine.failure
        if output.unavailable:
            tokens = output.completion_token_count
            why = output.error or "none was there"
            lost = f"{tokens} tokens of its answer are lost" if tokens else "it had no token yet"
            return NoWorkerError(f"no worker is left ({without_addresses(why)}); {lost}", why)
        if generation.aborted:
            return AbortedError("the request was aborted")
        if output.finish_reason == "error" and generation.constrained:
            return GrammarFailedError(FIELD, output.error or "")
        if generation.deadline is not None and time.monotonic() >= generation.deadline:
            return DeadlineError("the deadline has passed")
        if self._front_end.draining or engine.status != "ready":
            return DrainingError("the server shut down before the request was complete")
        return RuntimeError(f"ended as {output.finish_reason}: {output.error}")


class FrontEnd:
    """The requests of one server. Lives on the server's event loop.

    Args:
      max_active: limit of requests that are read, run or answered at the same time.
      max_pending_tokens: tokens that may wait for the reader of a stream.
      messages_a_second: of the streams beyond the first few, see `stream.py`.

    Attributes:
      generator: None until the engine is ready, and in a process without an engine.
      step_loop: what health probes ask about; None until it runs.
      absence: the message to clients while there is no generator.
      max_active: the argument of this name.
      draining: whether new requests are refused.
    """

    def __init__(
        self,
        max_active: float = math.inf,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        messages_a_second: float = MESSAGES_A_SECOND,
    ):
        self.generator: TextGenerator | None = None
        self.step_loop: StepLoop | None = None
        self.absence = "the server is starting"
        self.draining = False
        self.max_active = max_active
        self._max_pending_tokens = max_pending_tokens
        self._messages_a_second = messages_a_second
        self._tokenising = ThreadPoolExecutor(TOKENISING_THREADS, "tokenise")
        self._submitting = ThreadPoolExecutor(SUBMITTING_THREADS, "submit")
        self._tracing: Tracing | None = None
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, generator: TextGenerator, tracing: Tracing | None = None) -> None:
        """Accepts requests from now on. `tracing`: None traces none of them."""
        self.generator, self.step_loop = generator, generator.engine
        self._tracing = tracing

    def watch(self, step_loop: StepLoop) -> None:
        """Answers probes about a step loop; another process takes its requests."""
        self.step_loop = step_loop
        self.absence = "this process takes no requests; the first one does"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Counts a request while it is read, run and answered.

        Raises:
          OverloadedError: too many requests are being served.
        """
        if self._active >= self.max_active:
            raise OverloadedError(f"{self._active} requests are being served")
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    @property
    def active_requests(self) -> int:
        """Requests that are read, run or answered."""
        return self._active

    async def drain(self, seconds: float) -> None:
        """Refuses new requests and waits up to `seconds` until the others are answered."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests were cut off after %g s", self._active, seconds)

    def close(self) -> None:
        """Stops the threads."""
        self._tokenising.shutdown(wait=False, cancel_futures=True)
        self._submitting.shutdown(wait=False, cancel_futures=True)

    def check_draining(self) -> None:
        """Raises DrainingError if the server takes no new requests."""
        if self.draining:
            raise DrainingError("the server shuts down and takes no new requests")

    def ready(self) -> TextGenerator:
        """The generator.

        Raises:
          DrainingError, NotReadyError: the server drains, or is not ready.
        """
        self.check_draining()
        if self.generator is None:
            raise NotReadyError(self.absence)
        return self.generator

    def loop_ready(self) -> StepLoop:
        """The step loop; raises as `ready`."""
        self.check_draining()
        if self.step_loop is None:
            raise NotReadyError(self.absence)
        return self.step_loop

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs a slow function on one of a few threads instead of the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenising, function, *arguments)

    async def with_scores(
        self, output: GenerationOutput, write: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Writes an answer; on another thread if it has a long prompt's log-probabilities."""
        if len(output.prompt_logprobs or ()) < SHORT_PROMPT:
            return write(*arguments)
        return await self.in_thread(write, *arguments)

    async def encode(
        self, prompt: str | list[int], field: str = "prompt", **options: Any
    ) -> list[int]:
        """Tokenises and checks a prompt; a long prompt on another thread.

        Args:
          prompt, field, options: see `TextGenerator.encode`.

        Raises:
          InvalidRequestError: as `TextGenerator.encode`.
        """
        encode = functools.partial(self.ready().encode, prompt, field=field, **options)
        return encode() if len(prompt) <= SHORT_PROMPT else await self.in_thread(encode)

    @contextlib.asynccontextmanager
    async def running(
        self,
        jobs: Sequence[Job],
        request_ids: Sequence[str],
        deadline: float | None,
        *,
        stream: bool,
        owner: str,
        headers: Mapping[str, str],
        operation: str = "text_completion",
    ) -> AsyncIterator[list[Source]]:
        """Submits jobs; leaving the block, for whatever reason, cancels those that still run.

        Args:
          jobs: if one is refused, all are cancelled.
          request_ids: of each job, unique among the live requests.
          deadline: seconds of `time.monotonic`; None: none.
          stream: whether to return outputs as they come rather than all at the end.
          owner: the tenant whose requests they are.
          headers, operation: for `Tracing.answering`.

        Raises:
          As `TextGenerator.submit`.
        """
        generator = self.ready()
        sources: list[Source] = []

        def between() -> float:
            return pause(generator.live, self._messages_a_second)

        stack = contextlib.ExitStack()
        if self._tracing is not None:
            model = str(generator.engine.model_info()["model"])
            traced = self._tracing.answering(
                *(jobs[0].params, len(jobs), headers, operation, model)
            )
            trace, replace = stack.enter_context(traced), msgspec.structs.replace
            jobs = [replace(job, params=replace(job.params, trace=trace)) for job in jobs]
        with stack:
            try:
                for job, request_id in zip(jobs, request_ids, strict=True):
                    buffer = StreamBuffer(between if stream else None)
                    submit = functools.partial(
                        generator.submit,
                        job.token_ids,
                        job.params,
                        buffer.put,
                        request_id=request_id,
                        deadline=deadline,
                        max_pending_tokens=self._max_pending_tokens if stream else None,
                        owner=owner,
                    )
                    generation = await self._waited(submit) if generator.elsewhere else submit()
                    sources.append(Source(self, job, buffer, generation))
                yield sources
            finally:
                for source in sources:
                    source.generation.cancel()

    async def abort(self, request_id: str, owner: str) -> bool:
        """Ends a request by its id, if it belongs to `owner`; returns whether it was found."""
        generator = self.ready()
        if generator.abort(request_id, owner):
            return True
        # Ids begin with the names of their owners.
        elsewhere = generator.elsewhere
        return elsewhere is not None and await self.in_thread(elsewhere, request_id)

    async def _waited(self, submit: Callable[[], Generation]) -> Generation:
        """Submits on another thread; if the caller is cancelled meanwhile, so is the request."""
        future = asyncio.get_running_loop().run_in_executor(self._submitting, submit)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_cancel)
            raise


def _cancel(submitted: "asyncio.Future[Generation]") -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()
