"""The RPCs of `jaxserve.v1.Inference`: prompts in, messages and statuses out.

Everything between a prompt and its text is `generation.py`'s; here are messages, statuses and the
life of a stream: a cancelled, late or slow one gives its pages back. Lives on the event loop of
the server in `grpc.py`, and knows nothing of ports and threads.
"""

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec

import jaxserve
from jaxserve.engine.logprobs import TokenLogprobs
from jaxserve.engine.request import SamplingParams
from jaxserve.errors import DrainingError, InvalidRequestError
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server import jaxserve_pb2_grpc
from jaxserve.server.access import prefix_salt
from jaxserve.server.generation import SHORT_PROMPT, Generation, TextGenerator, new_request_id
from jaxserve.server.grammars import FIELD, Grammars, form
from jaxserve.server.interceptors import tenant
from jaxserve.server.output import GenerationOutput
from jaxserve.server.status import StatusError, status_error
from jaxserve.server.stream import StreamBuffer, WholeBuffer

FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
MODEL_INFO = ("model", "vocab_size", "max_length", "dtype", "mode", "attention", "ffn", "lanes")
"""What the engine's `model_info` says and clients may know."""

TOKENISING_THREADS = 2
STALL_CHECK_SECONDS = 0.5
ALONE_SECONDS = 0.02
"""How long the prompt info waits for the first token, to share its message."""

Context = grpc.aio.ServicerContext

logger = logging.getLogger(__name__)


class InferenceService(jaxserve_pb2_grpc.InferenceServicer):
    """The RPCs of `jaxserve.v1.Inference`. Lives on the server's event loop.

    Attributes:
      generator: None until the engine is ready, and where there is none.
      absence: why there is none.
      draining: whether new requests are refused.
    """

    def __init__(self, max_pending_tokens: int):
        self.generator: TextGenerator | None = None
        self.absence = "the server is starting"
        self.draining = False
        self._max_pending_tokens = max_pending_tokens
        self._tokenising = ThreadPoolExecutor(TOKENISING_THREADS, "tokenise")
        self._running: dict[tuple[str, str], Generation] = {}  # by tenant and request id
        self._aborted: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Whether every request has been answered within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stops the threads."""
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole completion in one message."""
        response = pb.GenerateResponse()
        async with self._answering(request, context):
            buffer = WholeBuffer()
            async with self._generation(request, context, buffer) as generation:
                output = await buffer.take()
                response.finish.CopyFrom(self._finish_info(output, generation))
                response.request_id = generation.request_id
                response.text = output.text
                response.token_ids.extend(output.token_ids)
                response.logprobs.extend(_logprobs(output.logprobs))
                response.prompt_logprobs.extend(_prompt_logprobs(output, generation))
        return response

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        """Prompt info, deltas, finish info."""
        async with self._answering(request, context):
            generator = self._ready_generator()
            buffer = StreamBuffer(lambda: generator.live)
            async with (
                self._generation(request, context, buffer, self._max_pending_tokens) as generation,
                _while_read(generation),
            ):
                # A message costs as much as many tokens: what is there together goes together.
                message = pb.GenerateStreamResponse()
                message.prompt.request_id = generation.request_id
                message.prompt.prompt_tokens = len(generation.prompt)
                if not await buffer.ready(ALONE_SECONDS):
                    await context.write(message)
                    message = pb.GenerateStreamResponse()
                while True:
                    output = await buffer.take()
                    _add_delta(message, output, generation)
                    if output.finish_reason is not None:
                        break
                    if message.ByteSize():
                        await context.write(message)
                    generation.consumed(len(output.token_ids))
                    message = pb.GenerateStreamResponse()
                try:
                    message.finish.CopyFrom(self._finish_info(output, generation))
                finally:  # the tokens before an end that is no completion
                    if message.ByteSize():
                        await context.write(message)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The token ids of a text."""
        response = pb.TokenizeResponse()
        async with self._answering(None, context):
            generator = self._ready_generator()
            encode = functools.partial(generator.encode, request.text, add_bos=not request.no_bos)
            loop = asyncio.get_running_loop()
            response.token_ids.extend(await loop.run_in_executor(self._tokenising, encode))
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends a running request of the same tenant."""
        async with self._answering(None, context):
            generation = self._running.get((tenant.get(), request.request_id))
            if generation is None:
                raise StatusError(
                    grpc.StatusCode.NOT_FOUND, f"no request {request.request_id!r} is running"
                )
            self._aborted.add(generation)
            generation.cancel()
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What is served, and with which limits."""
        response = pb.GetModelInfoResponse(jaxserve_version=jaxserve.__version__)
        async with self._answering(None, context):
            generator = self._ready_generator()
            response.eos_token_ids.extend(sorted(generator.tokenizer.eos_token_ids))
            for name, value in generator.engine.model_info().items():
                if name in MODEL_INFO:
                    setattr(response, name, value)
        return response

    @contextlib.asynccontextmanager
    async def _answering(
        self, request: pb.GenerateRequest | None, context: Context
    ) -> AsyncIterator[None]:
        """Counts an RPC, and turns its errors into statuses."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        except Exception as error:
            answer = status_error(error)
            if answer is None:
                request_id = request.request_id if request is not None else ""
                logger.exception("request %s failed", request_id or "without an id")
                answer = StatusError(
                    grpc.StatusCode.INTERNAL, f"internal error; request {request_id or '-'}"
                )
            status = answer.rich_status()
            await context.abort(status.code, status.details, status.trailing_metadata)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def _generation(
        self,
        request: pb.GenerateRequest,
        context: Context,
        buffer: StreamBuffer | WholeBuffer,
        max_pending_tokens: int | None = None,
    ) -> AsyncIterator[Generation]:
        """A submitted request; leaving, for whatever reason, cancels what has not ended."""
        generator = self._ready_generator()
        if not request.request_id:
            request.request_id = new_request_id()
        params = _sampling_params(request)
        params.validate()
        params = await _constrained(params, request, generator.grammars)
        prompt = _prompt(request)
        if len(prompt) <= SHORT_PROMPT:
            token_ids = generator.encode(prompt)
        else:
            loop = asyncio.get_running_loop()
            token_ids = await loop.run_in_executor(self._tokenising, generator.encode, prompt)
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        generation = generator.submit(
            token_ids,
            params,
            buffer.put,
            request_id=request.request_id,
            deadline=None if remaining is None else time.monotonic() + remaining,
            max_pending_tokens=max_pending_tokens,
        )
        name = (tenant.get(), request.request_id)
        self._running[name] = generation
        try:
            yield generation
        finally:
            del self._running[name]
            generation.cancel()

    def _ready_generator(self) -> TextGenerator:
        if self.draining:
            raise DrainingError("the server shuts down and takes no new requests")
        if self.generator is None:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, self.absence)
        return self.generator

    def _finish_info(self, output: GenerationOutput, generation: Generation) -> pb.FinishInfo:
        """The end of a request as a message; an end that is no completion raises its status."""
        if output.finish_reason not in FINISH_REASONS:
            raise self._end_status(output, generation)
        finish = pb.FinishInfo(
            reason=FINISH_REASONS[output.finish_reason],
            usage=pb.Usage(
                prompt_tokens=output.prompt_token_count,
                completion_tokens=output.completion_token_count,
                cached_tokens=output.cached_token_count,
            ),
        )
        if output.stop_string is not None:
            finish.stop_string = output.stop_string
        elif output.stop_token_id is not None:
            finish.stop_token_id = output.stop_token_id
        return finish

    def _end_status(self, output: GenerationOutput, generation: Generation) -> Exception:
        """Why a request ended that neither stopped nor ran to its length."""
        engine = generation.engine
        if generation.overflowed:
            return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, output.error or "too slow")
        if engine.failure is not None:
            return engine.failure
        if generation in self._aborted:
            return StatusError(grpc.StatusCode.CANCELLED, "the request was aborted")
        if generation.deadline is not None and time.monotonic() >= generation.deadline:
            return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        if output.finish_reason == "error" and generation.constrained:
            return InvalidRequestError(FIELD, output.error or "")
        if self.draining or engine.status != "ready":
            return DrainingError("the server shut down before the request was complete")
        return RuntimeError(f"ended as {output.finish_reason}: {output.error}")


@contextlib.asynccontextmanager
async def _while_read(generation: Generation) -> AsyncIterator[None]:
    """Ends what happens inside when the reader stalls so long that its request was ended."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if generation.overflowed:
            reading.reschedule(loop.time())
        else:
            timer = loop.call_later(STALL_CHECK_SECONDS, look)

    timer = loop.call_later(STALL_CHECK_SECONDS, look)
    try:
        async with asyncio.timeout(None) as reading:
            yield
    except TimeoutError:
        raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the reader is too slow") from None
    finally:
        timer.cancel()


def _add_delta(
    message: pb.GenerateStreamResponse, output: GenerationOutput, generation: Generation
) -> None:
    """Puts an output's news into a message, if it has any."""
    if output.text:
        message.delta.text = output.text
    if output.token_ids:
        message.delta.token_ids.extend(output.token_ids)
        message.delta.logprobs.extend(_logprobs(output.logprobs))
    if output.prompt_logprobs is not None:
        message.delta.prompt_logprobs.extend(_prompt_logprobs(output, generation))


def _logprobs(found: Iterable[TokenLogprobs]) -> Iterator[pb.TokenLogprobs]:
    for one in found:
        top = [pb.Logprob(token_id=token_id, logprob=logprob) for token_id, logprob in one.top]
        yield pb.TokenLogprobs(token_id=one.token_id, logprob=one.logprob, top=top)


def _prompt_logprobs(
    output: GenerationOutput, generation: Generation
) -> Iterator[pb.TokenLogprobs]:
    """Of a prompt's tokens, where they came; the first has an id alone."""
    if output.prompt_logprobs is not None:
        yield pb.TokenLogprobs(token_id=generation.prompt[0])
        yield from _logprobs(one for one in output.prompt_logprobs if one is not None)


def _prompt(request: pb.GenerateRequest) -> str | list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("prompt", "neither text nor token_ids is set")
    return request.text if kind == "text" else list(request.token_ids.ids)


def _sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """The request's sampling fields; what it does not set has SamplingParams' default."""
    optional = (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
        *("repetition_penalty", "logprobs", "prompt_logprobs", "skip_special_tokens"),
    )
    return SamplingParams(
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=dict(request.logit_bias),
        priority=request.priority,
        cache_salt=prefix_salt(tenant.get(), request.cache_salt),
        **{name: getattr(request, name) for name in optional if request.HasField(name)},
    )


async def _constrained(
    params: SamplingParams, request: pb.GenerateRequest, grammars: Grammars
) -> SamplingParams:
    """The parameters with the grammar that the request asks for."""
    if not request.HasField(FIELD):
        return params
    asked = request.structured_outputs
    given = asked.WhichOneof("form")
    values = dict.fromkeys(descriptor.name for descriptor in asked.DESCRIPTOR.fields)
    if given is not None:
        value = getattr(asked, given)
        values[given] = list(value.texts) if given == "choice" else value
    grammar = await grammars.compiled(*form(values))
    return msgspec.structs.replace(params, grammar=grammar)
