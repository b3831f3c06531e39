"""POST /v1/completions: completes prompts, in one response or as a stream of events."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from jaxserve.errors import InvalidRequestError
from jaxserve.server.front_end import Job, Source
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.forms import grammar, kept_tokens, of_choice, sampling_params, with_rules
from jaxserve.server.http.logprobs import CompletionLogprobsWriter, concatenated, prompt_logprobs
from jaxserve.server.http.requests import MAX_CHOICES, CompletionRequest
from jaxserve.server.http.responses import Completion, CompletionChoice, CompletionLogprobs
from jaxserve.server.http.service import Chunks, Service, UsageCount, stop_reason, together
from jaxserve.text.output import GenerationOutput
from jaxserve.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
DONE = b"[DONE]"


async def completions(service: Service, exchange: HttpExchange) -> None:
    """Complete prompts."""
    request = await exchange.read(CompletionRequest)
    exchange.rename(request.request_id)
    completion = Completion(
        id=f"cmpl-{exchange.request_id}",
        created=int(time.time()),
        model=service.model(request.model),
        choices=[],
    )
    choices_a_prompt = request.n or 1
    jobs = await _jobs(service, request, choices_a_prompt, exchange.tenant)
    count = UsageCount(jobs, choices_a_prompt)
    answer = _Answer(request, completion, count, service.ready().tokenizer)
    async with service.answering(exchange, jobs, stream=bool(request.stream)) as sources:
        if request.stream:
            await _stream(service, exchange, answer, sources)
        else:
            await answer.gather(service, sources)
    exchange.log |= {"prompt_tokens": count.usage().prompt_tokens}
    exchange.log |= {"completion_tokens": count.usage().completion_tokens}
    if request.stream:
        await exchange.end_events()
    else:
        await exchange.reply(completion)


async def _jobs(service: Service, request: CompletionRequest, n: int, tenant: str) -> list[Job]:
    """The jobs of a request: n choices of the first prompt, then of the next."""
    service.note_ignored(request)
    if request.best_of is not None and request.best_of != n:
        raise InvalidRequestError("best_of", f"{request.best_of} is not n = {n}")
    if request.suffix:
        raise InvalidRequestError("suffix", "is not supported")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError("max_tokens", "0 needs echo = true")
    if request.max_tokens == 0:
        request = msgspec.structs.replace(request, max_tokens=1)  # the answer leaves it out
    params = sampling_params(
        request,
        DEFAULT_MAX_TOKENS,
        tenant,
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        grammar=with_rules(service, request, await grammar(service, request)),
    )
    prompts = _prompts(request.prompt)
    if len(prompts) * n > MAX_CHOICES:
        field = "prompt" if n == 1 else "n"
        raise InvalidRequestError(
            field, f"{len(prompts)} prompts and n = {n}: at most {MAX_CHOICES} choices"
        )
    generator = service.ready()
    jobs = []
    for number, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        token_ids = await service.encode(
            prompt,
            field,
            add_bos=request.add_special_tokens is not False,
            keep=kept_tokens(request),
            keep_first=request.truncation_side == "right",
        )
        text = prompt if isinstance(prompt, str) else None
        if request.echo and text is None:
            special = not params.skip_special_tokens
            decode = functools.partial(generator.tokenizer.decode, special=special)
            text = await service.in_thread(decode, token_ids)
        for choice in range(n):
            jobs.append(Job(number * n + choice, token_ids, of_choice(params, choice), text))
    return jobs


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """The `prompt_logprobs` to ask for; an echoed prompt has as many as the completion."""
    echoed = request.logprobs if request.echo else None
    wanted = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


def _prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if kinds in ({str}, {list}):
        return prompt  # type: ignore[return-value]
    if not kinds:
        raise InvalidRequestError("prompt", "is empty")
    raise InvalidRequestError("prompt", "mixes texts, token ids and lists")


class _Answer(Chunks[Completion]):
    """Outputs of the engine as OpenAI's objects."""

    def __init__(
        self,
        request: CompletionRequest,
        completion: Completion,
        count: UsageCount,
        tokenizer: Tokenizer,
    ):
        super().__init__(request.stream_options, completion, count)
        self._request = request
        self._tokenizer = tokenizer
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    async def gather(self, service: Service, sources: Sequence[Source]) -> None:
        """Waits for every choice and puts it into the completion."""
        for source in sources:
            output = await source.take()
            self.add(source, output)
            choice = await service.with_scores(output, self._choice, source, output, True)
            self._chunk.choices.append(choice)
        self._chunk.usage = self._count.usage()

    def add(self, source: Source, output: GenerationOutput) -> None:
        if self._request.max_tokens == 0:
            output = msgspec.structs.replace(output, token_ids=[])
        self._count.add(source, output)

    def chunk(self, source: Source, output: GenerationOutput, first: bool) -> bytes:
        """A chunk with the new tokens of a choice, which `add` has counted; from any thread."""
        return self._encode([self._choice(source, output, first)])

    def _choice(self, source: Source, output: GenerationOutput, first: bool) -> CompletionChoice:
        if self._request.max_tokens == 0:
            reason: Any = output.finish_reason and "length"
            output = msgspec.structs.replace(
                output, text="", token_ids=[], logprobs=[], finish_reason=reason
            )
        job, ids_wanted = source.job, self._request.return_token_ids
        text = (job.prompt or "") + output.text if first and self._request.echo else output.text
        return CompletionChoice(
            index=job.index,
            text=text,
            logprobs=self._logprobs(source, output, first),
            finish_reason=output.finish_reason,  # type: ignore[arg-type]
            stop_reason=stop_reason(source, output),
            token_ids=output.token_ids if ids_wanted else UNSET,
            prompt_token_ids=job.token_ids if ids_wanted and first else UNSET,
            prompt_logprobs=self._prompt_logprobs(output),
        )

    def _logprobs(
        self, source: Source, output: GenerationOutput, first: bool
    ) -> CompletionLogprobs | None:
        """Log-probabilities of the new tokens, preceded by those of an echoed prompt."""
        if self._request.logprobs is None:
            return None
        index = source.job.index
        if index not in self._writers:
            self._writers[index] = CompletionLogprobsWriter(
                self._tokenizer,
                bool(self._request.return_tokens_as_token_ids),
                special=not source.job.params.skip_special_tokens,
            )
        writer = self._writers[index]
        if self._request.echo and output.prompt_logprobs is not None:
            prompt = writer.prompt(source.job.token_ids, output.prompt_logprobs)
            return concatenated(prompt, writer.tokens(output.logprobs))
        return writer.tokens(output.logprobs)

    def _prompt_logprobs(self, output: GenerationOutput) -> Any:
        if self._request.prompt_logprobs is None or output.prompt_logprobs is None:
            return UNSET if self._request.stream else None
        return prompt_logprobs(self._tokenizer, output.prompt_logprobs)


async def _stream(
    service: Service, exchange: HttpExchange, answer: _Answer, sources: Sequence[Source]
) -> None:
    """Streams the outputs of all choices."""
    await exchange.start_events()

    async def one(source: Source) -> None:
        first = True
        async for output in source.outputs():
            if first or output.text or output.token_ids or output.finish_reason is not None:
                answer.add(source, output)
                chunk = answer.chunk, source, output, first
                await exchange.event(await service.with_scores(output, *chunk))
            first = False

    await together([one(source) for source in sources])
    if (chunk := answer.last_chunk()) is not None:
        await exchange.event(chunk)
    await exchange.event(DONE)
