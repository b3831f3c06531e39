"""The RPCs of `jaxserve.v1.Inference`: requests to messages and statuses.

`front_end.py` has what both faces share; this module has the messages, the statuses of errors with
details that a client can act on, and ends streams whose client has stopped reading. Any error that
`status_error` does not know is a bug of the server: the client gets INTERNAL and the request id,
the log the rest. Runs on the event loop of the server in `grpc.py`; knows nothing of ports and
threads.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import grpc
import msgspec
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import jaxserve
from jaxserve.engine.request import SamplingParams, TokenLogprobs
from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.fleet.request_frames import has_key
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.access import prefix_salt
from jaxserve.server.front_end import (
    AbortedError,
    DeadlineError,
    FrontEnd,
    Job,
    NotReadyError,
    NoWorkerError,
    SlowReaderError,
    Source,
)
from jaxserve.server.interceptors import Refusals, tenant
from jaxserve.server.structured_outputs import FIELD, form
from jaxserve.text.generation import Generation, checked_request_id, new_request_id
from jaxserve.text.output import GenerationOutput
from jaxserve.text.structured import GrammarCompiler


class StatusError(Exception):
    """A status that ends an RPC, other than for a failure of the server.

    Args:
      code: not OK.
      message: for the client.
      detail: a google.rpc message that goes with it.
      reason: by which it is counted, as HTTP's errors by their code; empty: the status.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        detail: Message | None = None,
        *,
        reason: str = "",
    ):
        super().__init__(message)
        self.reason = reason or code.name.lower()
        self.code = code
        self.message = message
        self.detail = detail

    def rich_status(self) -> grpc.Status:
        """The status with its detail in the trailing metadata, which grpcio-status reads."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.detail is not None:
            packed = any_pb2.Any()
            packed.Pack(self.detail)
            status.details.append(packed)
        return rpc_status.to_status(status)


def status_error(error: Exception, request_id: str) -> StatusError:
    """The status of an RPC that failed.

    The text of a failure of the server, which may name hosts, processes and files, is not in it.

    Args:
      error: why.
      request_id: by which the client can ask about it and the log is searched.
    """
    match error:
        case StatusError():
            return error
        case InvalidRequestError(field=field, message=message):
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=field, description=message
            )
            detail = error_details_pb2.BadRequest(field_violations=[violation])
            return StatusError(
                grpc.StatusCode.INVALID_ARGUMENT, str(error), detail, reason="invalid_value"
            )
        case OverloadedError(retry_after_s=seconds):
            whole = math.floor(seconds)
            delay = duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
            retry = error_details_pb2.RetryInfo(retry_delay=delay)
            return StatusError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry, reason="overloaded"
            )
        case SlowReaderError():
            return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), reason="slow_reader")
        case NotReadyError():
            return StatusError(grpc.StatusCode.UNAVAILABLE, str(error), reason="starting")
        case DrainingError():
            return StatusError(grpc.StatusCode.UNAVAILABLE, str(error))
        case NoWorkerError(lost=lost):
            return StatusError(grpc.StatusCode.UNAVAILABLE, f"{lost}; request {request_id}")
        case EngineFailedError():
            message = f"the engine failed; request {request_id}"
            return StatusError(grpc.StatusCode.UNAVAILABLE, message)
        case AbortedError():
            return StatusError(grpc.StatusCode.CANCELLED, str(error), reason="aborted")
        case DeadlineError():
            return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error), reason="timeout")
        case _:
            return StatusError(grpc.StatusCode.INTERNAL, f"internal error; request {request_id}")


FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
MODEL_INFO = ("model", "vocab_size", "max_length", "dtype", "mode", "attention", "ffn", "lanes")
"""Keys of the engine's `model_info` that clients may see."""

STALL_CHECK_SECONDS = 0.5
ALONE_SECONDS = 0.02
"""How long the prompt info waits for the first token, to share its message."""

Context = grpc.aio.ServicerContext

logger = logging.getLogger(__name__)


class InferenceService:
    """The RPCs of `jaxserve.v1.Inference`. Lives on the server's event loop.

    Args:
      front_end: of this server.
      refusals: where errors are counted.
    """

    def __init__(self, front_end: FrontEnd, refusals: Refusals):
        self._front_end = front_end
        self._refusals = refusals

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole completion in one message."""
        response = pb.GenerateResponse()
        async with (
            self._answering(request, context),
            self._running_source(request, context, stream=False) as source,
        ):
            output = await source.take()
            response.finish.CopyFrom(_finish_info(output))
            response.request_id = request.request_id
            response.text = output.text
            response.token_ids.extend(output.token_ids)
            response.logprobs.extend(_logprobs(output.logprobs))
            scores = functools.partial(_prompt_logprobs, output, source.job)
            await self._front_end.with_scores(
                output, lambda: response.prompt_logprobs.extend(scores())
            )
        return response

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        """Prompt info, deltas, finish info."""
        async with (
            self._answering(request, context),
            self._running_source(request, context, stream=True) as source,
            _while_read(source.generation),
        ):
            # A message costs as much as many tokens, so prompt info and first tokens share one.
            message = pb.GenerateStreamResponse()
            message.prompt.request_id = request.request_id
            message.prompt.prompt_tokens = len(source.job.token_ids)
            try:
                async with asyncio.timeout(ALONE_SECONDS):
                    output = await source.next_output()
            except TimeoutError:
                await context.write(message)
                message = pb.GenerateStreamResponse()
                output = await source.next_output()
            await self._front_end.with_scores(output, _add_delta, message, output, source.job)
            while output.finish_reason is None:
                if message.ByteSize():
                    await context.write(message)
                source.generation.consumed(len(output.token_ids))
                message = pb.GenerateStreamResponse()
                output = await source.next_output()
                await self._front_end.with_scores(output, _add_delta, message, output, source.job)
            try:
                message.finish.CopyFrom(_finish_info(source.check(output)))
            finally:  # tokens that came before an abnormal end
                if message.ByteSize():
                    await context.write(message)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The token ids of a text."""
        response = pb.TokenizeResponse()
        async with self._answering(request, context):
            encode = self._front_end.ready().encode
            encode = functools.partial(encode, request.text, add_bos=not request.no_bos)
            response.token_ids.extend(await self._front_end.in_thread(encode))
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends a running request of the same tenant."""
        async with self._answering(request, context):
            if not await self._front_end.abort(_name(request.request_id), tenant.get()):
                raise StatusError(
                    grpc.StatusCode.NOT_FOUND, f"no request {request.request_id!r} is running"
                )
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """The served model and its limits."""
        response = pb.GetModelInfoResponse(jaxserve_version=jaxserve.__version__)
        async with self._answering(request, context):
            generator = self._front_end.ready()
            response.eos_token_ids.extend(sorted(generator.tokenizer.eos_token_ids))
            for name, value in generator.engine.model_info().items():
                if name in MODEL_INFO:
                    setattr(response, name, value)
        return response

    @contextlib.asynccontextmanager
    async def _answering(self, request: object, context: Context) -> AsyncIterator[None]:
        """Counts an active RPC and translates its errors to statuses. A request of None stands for
        a body that was no message, which is an error here."""
        with self._front_end.active():
            try:
                if request is None:
                    raise InvalidRequestError("request", "the body is no message of this RPC")
                yield
            except Exception as error:
                request_id = getattr(request, "request_id", "") or new_request_id()
                answer = status_error(error, request_id)
                self._refusals.count(answer.reason)
                if answer.code is grpc.StatusCode.INTERNAL:
                    logger.exception("request %s failed", request_id)
                elif isinstance(error, EngineFailedError):
                    logger.warning("request %s: %s", request_id, error)
                status = answer.rich_status()
                await context.abort(status.code, status.details, status.trailing_metadata)

    @contextlib.asynccontextmanager
    async def _running_source(
        self, request: pb.GenerateRequest, context: Context, *, stream: bool
    ) -> AsyncIterator[Source]:
        """Submits a request; leaving the block, for whatever reason, cancels it."""
        generator = self._front_end.ready()
        request.request_id = checked_request_id(request.request_id or new_request_id())
        params = _sampling_params(request)
        params.validate()
        params = await _constrained(params, request, generator.grammars)
        token_ids = await self._front_end.encode(_prompt(request))
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlineError("the deadline has passed")
        deadline = None if remaining is None else time.monotonic() + remaining
        jobs, names = [Job(0, token_ids, params)], [_name(request.request_id)]
        sent = {name: str(value) for name, value in context.invocation_metadata() or ()}
        running = self._front_end.running(
            *(jobs, names, deadline), stream=stream, owner=tenant.get(), headers=sent
        )
        async with running as (source,):
            yield source


def _name(request_id: str) -> str:
    """The id of a client's request among those of all tenants; never that of one with a key."""
    owner = tenant.get()
    name = f"{owner}.{request_id}" if owner else request_id
    return f"-{name}" if has_key(name) else name


def _finish_info(output: GenerationOutput) -> pb.FinishInfo:
    """The last message of a completed request."""
    assert output.finish_reason is not None
    finish = pb.FinishInfo(
        reason=FINISH_REASONS[output.finish_reason],
        usage=pb.Usage(
            prompt_tokens=output.prompt_token_count,
            completion_tokens=output.completion_token_count,
            cached_tokens=output.cached_token_count,
            accepted_prediction_tokens=output.accepted_token_count,
            rejected_prediction_tokens=output.drafted_token_count - output.accepted_token_count,
        ),
    )
    if output.stop_string is not None:
        finish.stop_string = output.stop_string
    elif output.stop_token_id is not None:
        finish.stop_token_id = output.stop_token_id
    return finish


@contextlib.asynccontextmanager
async def _while_read(generation: Generation) -> AsyncIterator[None]:
    """Ends the block when its request was ended because the client does not read."""
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
        raise SlowReaderError("the reader is too slow") from None
    finally:
        timer.cancel()


def _add_delta(message: pb.GenerateStreamResponse, output: GenerationOutput, job: Job) -> None:
    """Puts the new tokens of an output, if any, into a message."""
    if output.text:
        message.delta.text = output.text
    if output.token_ids:
        message.delta.token_ids.extend(output.token_ids)
        message.delta.logprobs.extend(_logprobs(output.logprobs))
    if output.prompt_logprobs is not None:
        message.delta.prompt_logprobs.extend(_prompt_logprobs(output, job))


def _logprobs(found: Iterable[TokenLogprobs]) -> Iterator[pb.TokenLogprobs]:
    for one in found:
        top = [pb.Logprob(token_id=token_id, logprob=logprob) for token_id, logprob in one.top]
        yield pb.TokenLogprobs(token_id=one.token_id, logprob=one.logprob, top=top)


def _prompt_logprobs(output: GenerationOutput, job: Job) -> Iterator[pb.TokenLogprobs]:
    """Log-probabilities of the prompt, if the output has them; the first has an id only."""
    if output.prompt_logprobs is not None:
        yield pb.TokenLogprobs(token_id=job.token_ids[0])
        yield from _logprobs(one for one in output.prompt_logprobs if one is not None)


def _prompt(request: pb.GenerateRequest) -> str | list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("prompt", "neither text nor token_ids is set")
    return request.text if kind == "text" else list(request.token_ids.ids)


def _sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """The request's sampling fields; unset ones have the default of SamplingParams."""
    optional = (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
        *("repetition_penalty", "logprobs", "prompt_logprobs", "skip_special_tokens"),
        "speculative",
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
    params: SamplingParams, request: pb.GenerateRequest, grammars: GrammarCompiler
) -> SamplingParams:
    """Adds the grammar that the request asks for to the parameters."""
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
