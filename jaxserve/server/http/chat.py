"""POST /v1/chat/completions: answers conversations, in one response or as a stream of events."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from jaxserve.errors import InvalidRequestError
from jaxserve.server.front_end import Job, Source
from jaxserve.server.http import responses
from jaxserve.server.http.completions import DONE
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.forms import (
    chosen_tools,
    forced_call,
    grammar,
    kept_tokens,
    of_choice,
    sampling_params,
    with_rules,
)
from jaxserve.server.http.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.http.requests import ChatRequest
from jaxserve.server.http.service import Chunks, Service, UsageCount, stop_reason, together
from jaxserve.text.answer_format import AnswerMarkers
from jaxserve.text.answers import MAX_CALLS, AnswerParser, Piece, joined
from jaxserve.text.call_readers import CallPart
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.generator import TextGenerator
from jaxserve.text.messages import checked_tools
from jaxserve.text.output import GenerationOutput
from jaxserve.text.structured import TokenGrammar
from jaxserve.text.tokenizer import Tokenizer


async def chat_completions(service: Service, exchange: HttpExchange) -> None:
    """Answer a conversation."""
    request = await exchange.read(ChatRequest)
    exchange.rename(request.request_id)
    conversation = await read_conversation(service, request, exchange.tenant)
    jobs, tokenizer = conversation.jobs, service.ready().tokenizer
    count = UsageCount(jobs, len(jobs))
    answer = _Answer(
        request,
        responses.ChatChunk(
            id=f"chatcmpl-{exchange.request_id}",
            created=int(time.time()),
            model=conversation.model,
            choices=[],
        ),
        count,
        conversation.parsers,
        tokenizer,
    )
    chat = None
    async with service.answering(exchange, jobs, stream=bool(request.stream)) as sources:
        if request.stream:
            await _stream(exchange, answer, sources)
        else:
            chat = await answer.gather(service, sources)
    exchange.log |= {"prompt_tokens": count.usage().prompt_tokens}
    exchange.log |= {"completion_tokens": count.usage().completion_tokens}
    if chat is None:
        await exchange.end_events()
    else:
        await exchange.reply(chat)


class Conversation(msgspec.Struct, frozen=True):
    """A conversation as jobs, with the parsers of their answers."""

    model: str
    jobs: list[Job]
    parsers: list[AnswerParser]


async def read_conversation(service: Service, request: ChatRequest, tenant: str) -> Conversation:
    """Makes the prompt of a conversation, and the grammar that its answer must follow, if any.

    Raises:
      InvalidRequestError: names the field that is wrong.
      HttpError, DrainingError, NotReadyError: another model is served, or none.
    """
    prompt = await read_prompt(service, request)
    generator, form, tools = service.ready(), AnswerMarkers.of(prompt.template), prompt.tools
    place = prompt.text, prompt.continued
    constraint = await forced_call(service, request, form, form.before_call(*place).encode())
    if constraint is None:
        constraint = await grammar(service, request, form.before_content(*place).encode())
    constraint = with_rules(service, request, constraint, form.reasoning(*place))
    jobs = _jobs(generator, request, tenant, prompt.text, prompt.token_ids, constraint)
    if mark := form.spelt(tools):
        jobs = [_spelling(job, generator.tokenizer, mark) for job in jobs]
    most = 1 if request.parallel_tool_calls is False else MAX_CALLS
    parsers = [form.parser(prompt.text, tools, most, prompt.continued) for _ in jobs]
    return Conversation(prompt.model, jobs, parsers)


class Prompt(msgspec.Struct, frozen=True):
    """A conversation as the model reads it."""

    model: str
    template: ChatTemplate
    tools: list[dict[str, Any]] | None
    """Tools that the template got."""
    text: str
    token_ids: list[int]
    continued: str
    """The beginning of the answer, where the request asks to continue its last message."""


async def read_prompt(service: Service, request: ChatRequest) -> Prompt:
    """Makes the prompt of a conversation; raises as `read_conversation`."""
    model = service.model(request.model)
    service.note_ignored(request)
    generator = service.ready()
    template = (
        service.chat_template(None)
        if request.chat_template is None
        else (await service.in_thread(service.chat_template, request.chat_template))
    )
    tools = _tools(request)
    text, token_ids = await service.in_thread(_prompt, generator, template, request, tools)
    continued = content_text(request.messages[-1]) if request.continue_final_message else ""
    return Prompt(model, template, tools, text, token_ids, continued)


def _tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Returns the tools that are passed to the template."""
    mode, names = chosen_tools(request)
    tools = request.tools or None
    if tools is None and mode == "required":
        raise InvalidRequestError("tool_choice", "is set, but there are no tools")
    if names is not None and tools is not None:
        known = checked_tools(tools) or []
        tools = [tool for tool in known if (tool.get("function") or {}).get("name") in list(names)]
    return None if mode == "none" else tools


def _prompt(
    generator: TextGenerator,
    template: ChatTemplate,
    request: ChatRequest,
    tools: list[dict[str, Any]] | None,
) -> tuple[str, list[int]]:
    """The prompt of a conversation and its token ids."""
    switches = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        switches.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents is not None:
        switches.setdefault("documents", request.documents)
    continues = request.continue_final_message is True
    if continues and request.add_generation_prompt:
        raise InvalidRequestError("add_generation_prompt", "and continue_final_message: set one")
    prompt = template.render(
        request.messages,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt is not False and not continues,
        chat_template_kwargs=switches,
        continue_final_message=continues,
    )
    return prompt, generator.encode(
        prompt,
        add_bos=request.add_special_tokens is True,
        field="messages",
        keep=kept_tokens(request),
        keep_first=request.truncation_side == "right",
    )


def _jobs(
    generator: TextGenerator,
    request: ChatRequest,
    tenant: str,
    prompt: str,
    token_ids: list[int],
    constraint: TokenGrammar | None,
) -> list[Job]:
    """The jobs of a request: n answers."""
    if request.max_tokens == 0 or request.max_completion_tokens == 0:
        raise InvalidRequestError("max_tokens", "0 is not in [1, 2147483647]")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs = true")
    room = int(generator.engine.model_info()["max_length"]) - len(token_ids)
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    params = sampling_params(
        request,
        room,
        tenant,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        grammar=constraint,
    )
    return [
        Job(choice, token_ids, of_choice(params, choice), prompt)
        for choice in range(request.n or 1)
    ]


def _spelling(job: Job, tokenizer: Tokenizer, mark: str) -> Job:
    """The job with special tokens as text, if the mark would be lost without."""
    ids = tokenizer.encode(mark, add_bos=False)
    if tokenizer.special_ids.isdisjoint(ids):
        return job
    params = msgspec.structs.replace(job.params, skip_special_tokens=False)
    return msgspec.structs.replace(job, params=params)


class _Answer(Chunks[responses.ChatChunk]):
    """Outputs of the engine as OpenAI's objects."""

    def __init__(
        self,
        request: ChatRequest,
        chunk: responses.ChatChunk,
        count: UsageCount,
        parsers: Sequence[AnswerParser],
        tokenizer: Tokenizer,
    ):
        super().__init__(request.stream_options, chunk, count)
        self._request = request
        self._parsers = parsers
        self._thoughts = dict[AnswerParser, list[str]]()  # reasoning of each answer so far
        self._tokenizer = tokenizer
        last = request.messages[-1]
        echoed = request.echo and last.get("role") == "assistant"
        self._echo = content_text(last) if echoed else ""

    async def gather(self, service: Service, sources: Sequence[Source]) -> responses.Chat:
        """Waits for every answer."""
        choices, scores = [], None
        for source in sources:
            output = await source.take()
            self._count.add(source, output)
            choices.append(self._choice(source, output))
            if self._request.prompt_logprobs is not None and scores is None:
                scores = await service.with_scores(
                    output, prompt_logprobs, self._tokenizer, output.prompt_logprobs
                )
        return responses.Chat(
            id=self._chunk.id,
            created=self._chunk.created,
            model=self._chunk.model,
            choices=choices,
            usage=self._count.usage(),
            prompt_token_ids=self._prompt_ids(sources),
            prompt_logprobs=scores,
        )

    def first_chunks(self, sources: Sequence[Source]) -> list[bytes]:
        """The chunks that begin the answers."""
        self._chunk.prompt_token_ids = self._prompt_ids(sources)
        chunks = []
        for source in sources:
            delta = responses.ChatDelta(role="assistant", content=self._echo)
            chunks.append(
                self._encode([responses.ChatChunkChoice(index=source.job.index, delta=delta)])
            )
            self._chunk.prompt_token_ids = UNSET
        return chunks

    def chunks(self, source: Source, output: GenerationOutput) -> list[bytes]:
        """Chunks with the new parts of an answer; none while their meaning is uncertain."""
        self._count.add(source, output)
        index = source.job.index
        parser = self._parsers[index]
        pieces = self._pieces(parser, output)
        ended = output.finish_reason is not None
        choices = [
            responses.ChatChunkChoice(index=index, delta=delta)
            for piece in pieces
            if (delta := self._delta(piece)) is not None
        ]
        told = self._request.return_token_ids or self._request.logprobs
        if ended or (not choices and told and output.token_ids):
            choices.append(responses.ChatChunkChoice(index=index, delta=responses.ChatDelta()))
        if self._request.logprobs and output.logprobs and choices:
            choices[0].logprobs = self._logprobs(output)
        if self._request.return_token_ids and choices:
            choices[0].token_ids = output.token_ids
        if ended:
            choices[-1].finish_reason = _finish_reason(output, parser)
            choices[-1].stop_reason = stop_reason(source, output)
        return [self._encode([choice]) for choice in choices]

    def _logprobs(self, output: GenerationOutput) -> responses.ChatLogprobs:
        ids = bool(self._request.return_tokens_as_token_ids)
        own = self._request.logprob_token_ids is not None
        return chat_logprobs(self._tokenizer, output.logprobs, ids=ids, own=own)

    def _prompt_ids(self, sources: Sequence[Source]) -> Any:
        return sources[0].job.token_ids if self._request.return_token_ids else UNSET

    def _pieces(self, parser: AnswerParser, output: GenerationOutput) -> list[Piece]:
        """The pieces of an output; at the answer's end, counts the tokens of its reasoning."""
        pieces = parser.push(output.text)
        ended = output.finish_reason is not None
        if ended:
            pieces += parser.finish(cut=output.finish_reason == "length")
        thoughts = self._thoughts.setdefault(parser, [])
        thoughts += [piece.reasoning for piece in pieces]
        if ended and (thought := "".join(thoughts)):
            self._count.reasoning += len(self._tokenizer.encode(thought, add_bos=False))
        return pieces

    def _delta(self, piece: Piece) -> responses.ChatDelta | None:
        if piece.call is not None:
            return responses.ChatDelta(tool_calls=[_call_delta(piece.call)])
        if not piece.reasoning:
            return responses.ChatDelta(content=piece.content)
        if self._request.include_reasoning is False:
            return None
        return responses.ChatDelta(reasoning_content=piece.reasoning, reasoning=piece.reasoning)

    def _choice(self, source: Source, output: GenerationOutput) -> responses.ChatChoice:
        parser = self._parsers[source.job.index]
        pieces = self._pieces(parser, output)
        calls = [
            msgspec.structs.replace(_call_delta(piece.call), index=UNSET)
            for piece in joined(pieces)
            if piece.call is not None
        ]
        reasoning = "".join(piece.reasoning for piece in pieces)
        content = self._echo + "".join(piece.content for piece in pieces)
        shown = reasoning and self._request.include_reasoning is not False
        return responses.ChatChoice(
            index=source.job.index,
            message=responses.ChatMessage(
                content=content or (None if calls else ""),
                reasoning_content=reasoning if shown else UNSET,
                reasoning=reasoning if shown else UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=(self._logprobs(output) if self._request.logprobs else None),
            finish_reason=_finish_reason(output, parser),
            stop_reason=stop_reason(source, output),
            token_ids=output.token_ids if self._request.return_token_ids else UNSET,
        )


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message whose content is a text or parts of type "text"."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _finish_reason(output: GenerationOutput, parser: AnswerParser) -> Any:
    """The finish reason in OpenAI's API."""
    if output.finish_reason == "stop" and parser.called:
        return "tool_calls"
    return output.finish_reason


def _call_delta(part: CallPart) -> responses.ToolCall:
    """Something new of a tool call."""
    if not part.id:
        return responses.ToolCall(
            index=part.number, function=responses.FunctionCall(arguments=part.arguments)
        )
    return responses.ToolCall(
        index=part.number,
        id=part.id,
        type="function",
        function=responses.FunctionCall(name=part.name, arguments=part.arguments),
    )


async def _stream(exchange: HttpExchange, answer: _Answer, sources: Sequence[Source]) -> None:
    """Streams the outputs of all answers."""
    await exchange.start_events()
    for chunk in answer.first_chunks(sources):
        await exchange.event(chunk)

    async def one(source: Source) -> None:
        async for output in source.outputs():
            for chunk in answer.chunks(source, output):
                await exchange.event(chunk)

    await together([one(source) for source in sources])
    if (last := answer.last_chunk()) is not None:
        await exchange.event(last)
    await exchange.event(DONE)
