"""/v1/responses and /v1/messages: a conversation in one answer or as a stream of events of several
types.

A request is converted to a chat and answered as in `chat.py`; `response_input.py` and
`response_output.py`, or `message_input.py` and `message_output.py`, convert between the two. A
writer tells every change of the answer as events; a client that does not stream gets the whole
answer. `response_store.py` keeps responses, by which later requests go on. Errors of /v1/messages
have Anthropic's form, which `routes.py` says.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.front_end import Source
from jaxserve.server.http import response_input, response_output
from jaxserve.server.http.chat import Conversation, read_conversation, read_prompt
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.logprobs import MessageLogprobs
from jaxserve.server.http.message_input import NAMES, CountTokensRequest, MessagesRequest, as_chat
from jaxserve.server.http.message_output import (
    Message,
    MessageEvent,
    MessageUsage,
    MessageWriter,
    StopReason,
    TokenCount,
)
from jaxserve.server.http.requests import ChatRequest, JsonObject
from jaxserve.server.http.response_input import in_words_of
from jaxserve.server.http.response_store import LIFETIME_SECONDS, KeptResponse
from jaxserve.server.http.service import Service, UsageCount, stop_reason
from jaxserve.text.answers import AnswerParser
from jaxserve.text.generator import PromptTooLongError
from jaxserve.text.output import GenerationOutput
from jaxserve.text.tokenizer import Tokenizer


class Event(Protocol):
    """One event of a stream."""

    @property
    def type(self) -> str: ...


async def answer(
    service: Service,
    exchange: HttpExchange,
    conversation: Conversation,
    count: UsageCount,
    begin: Callable[[], Iterable[Event]],
    events: Callable[[Source], AsyncIterator[Iterable[Event]]],
    written: Any,
    *,
    stream: bool,
) -> None:
    """Runs the conversation's one choice and answers.

    Args:
      count: its tokens, which `events` counts.
      begin: the events before the first token.
      events: those of the answer, as the model generates it.
      written: the answer, which is whole when `events` has ended.
    """
    async with service.answering(exchange, conversation.jobs, stream=stream) as (source,):
        if stream:
            await exchange.start_events()
            await _send(exchange, begin())
        async for told in events(source):
            if stream:
                await _send(exchange, told)
            else:
                for _ in told:  # the writer writes as it tells
                    pass
    usage = count.usage()
    exchange.log |= {"prompt_tokens": usage.prompt_tokens}
    exchange.log |= {"completion_tokens": usage.completion_tokens}
    if stream:
        await exchange.end_events()
    else:
        await exchange.reply(written)


async def _send(exchange: HttpExchange, events: Iterable[Event]) -> None:
    for event in events:
        await exchange.event(msgspec.json.encode(event), event.type)


async def create_response(service: Service, exchange: HttpExchange) -> None:
    """Answer a conversation, item by item."""
    request = await exchange.read(response_input.ResponseRequest)
    exchange.rename(request.request_id)
    response_input.check_supported(request)
    earlier: list[JsonObject] = []
    if before := request.previous_response_id:
        earlier = msgspec.json.decode(_kept(service, exchange, before).items)
    chat, origins = response_input.as_chat(request, earlier, exchange.left_out)
    if request.truncation == "auto":
        await _shorten(service, chat, origins)
    with response_input.in_words_of(
        response_input.NAMES, origins, items="input", system="instructions"
    ):
        conversation = await read_conversation(service, chat, exchange.tenant)
    tokenizer = service.ready().tokenizer
    count = UsageCount(conversation.jobs, 1)

    def keep(response: response_output.Response) -> None:
        if response.store and service.stored is not None:
            items = [*earlier, *response_input.items_of(request), *response.output]
            whole = msgspec.json.encode(response), msgspec.json.encode(items)
            service.stored.put(exchange.tenant, response.id, *whole)

    response = _response(request, exchange.request_id, conversation.model)
    response.store = request.store is not False and service.stored is not None
    writer = response_output.ResponseWriter(response, keep)
    (parser,) = conversation.parsers
    await answer(
        service,
        exchange,
        conversation,
        count,
        writer.begin,
        lambda source: _response_events(source, writer, parser, count, tokenizer),
        writer.response,
        stream=bool(request.stream),
    )


async def get_response(service: Service, exchange: HttpExchange) -> None:
    """A response that is kept."""
    await exchange.reply(_kept(service, exchange, exchange.scope["path_params"]["response"]).body)


async def delete_response(service: Service, exchange: HttpExchange) -> None:
    """Forget a response."""
    response_id = exchange.scope["path_params"]["response"]
    _kept(service, exchange, response_id)
    assert service.stored is not None
    service.stored.remove(exchange.tenant, response_id)
    await exchange.reply(response_output.DeletedResponse(id=response_id))


async def cancel_response(service: Service, exchange: HttpExchange) -> None:
    """Refuse to cancel a response: those that are kept are complete."""
    _kept(service, exchange, exchange.scope["path_params"]["response"])
    raise HttpError(400, "Cannot cancel a synchronous response.", code="response_not_cancellable")


def _kept(service: Service, exchange: HttpExchange, response_id: str) -> KeptResponse:
    """Returns a response that is kept; raises HttpError (404) if it is not."""
    service.ready()
    wrong = f"Response with id {response_id[:128]!r} not found"
    if service.stored is None:
        wrong += ": with server.processes above 1 none are kept, as each process would have its own"
    elif (kept := service.stored.get(exchange.tenant, response_id)) is not None:
        return kept
    else:
        wrong += f": this process keeps each for {LIFETIME_SECONDS:g} s, or until newer ones fill "
        wrong += "the memory, unless store is false"
    raise HttpError(404, wrong, param="previous_response_id", code="response_not_found")


async def _response_events(
    source: Source,
    writer: response_output.ResponseWriter,
    parser: AnswerParser,
    count: UsageCount,
    tokenizer: Tokenizer,
) -> AsyncIterator[Iterable[response_output.ResponseEvent]]:
    """The events of a response, as the model generates it."""
    special = not source.job.params.skip_special_tokens
    located = MessageLogprobs(parser, tokenizer, special=special)
    async for output in source.outputs():
        count.add(source, output)
        yield writer.add(located.push(output.text, output.logprobs))
        if output.finish_reason is not None:
            yield writer.add(located.finish(cut=output.finish_reason == "length"))
            usage = _usage(count, writer.response, tokenizer)
            yield writer.end(usage, complete=output.finish_reason == "stop")


async def _shorten(service: Service, chat: ChatRequest, origins: list[int]) -> None:
    """Leaves out as few of the conversation's first messages as make it fit.

    System messages at the beginning and the last message stay; if these alone are too long, nothing
    is changed, and the conversation is refused as it is.
    """
    messages = chat.messages
    kept = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))

    async def fits(dropped: int) -> bool | None:
        """Whether the rest is short enough; None: it is no conversation, such as a call's answer
        without the call, so that its length is not known."""
        less = [*messages[:kept], *messages[kept + dropped :]]
        try:
            await read_prompt(service, msgspec.structs.replace(chat, messages=less))
        except PromptTooLongError:
            return False
        except InvalidRequestError:
            return True if dropped == 0 else None
        return True

    if await fits(0):
        return
    most = len(messages) - kept - 1
    low, high = 1, most + 1
    while low < high:  # fewer than `low` are too few
        middle = (low + high) // 2
        if await fits(middle) is False:
            low = middle + 1
        else:
            high = middle
    while low <= most and not await fits(low):
        low += 1
    if low <= most:
        del messages[kept : kept + low], origins[kept : kept + low]


def _response(
    request: response_input.ResponseRequest, request_id: str, model: str
) -> response_output.Response:
    """A response without items."""
    return response_output.Response(
        id=f"resp_{request_id}",
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        tools=[msgspec.to_builtins(tool) for tool in request.tools or []],
        tool_choice=msgspec.to_builtins(request.tool_choice or "auto"),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=msgspec.to_builtins(
            request.text or response_input.TextOptions(format=response_input.TextFormat())
        ),
        reasoning=msgspec.to_builtins(request.reasoning or response_input.ReasoningOptions()),
        metadata=request.metadata or {},
        user=request.user,
        previous_response_id=request.previous_response_id,
        truncation=request.truncation or "disabled",
        top_logprobs=request.top_logprobs or 0,
    )


def _usage(
    count: UsageCount, response: response_output.Response, tokenizer: Tokenizer
) -> response_output.ResponseUsage:
    usage = count.usage()
    details = usage.prompt_tokens_details
    thoughts = [
        part.text
        for item in response.output
        if isinstance(item, response_output.ReasoningItem)
        for part in item.content
    ]
    return response_output.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=response_output.InputTokensDetails(
            cached_tokens=0 if details is None else details.cached_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=response_output.OutputTokensDetails(
            reasoning_tokens=sum(len(tokenizer.encode(text, add_bos=False)) for text in thoughts)
        ),
        total_tokens=usage.total_tokens,
    )


async def create_message(service: Service, exchange: HttpExchange) -> None:
    """Answer a conversation, in Anthropic's API."""
    request = await exchange.read(MessagesRequest)
    chat, origins = as_chat(request)
    with in_words_of(NAMES, origins, items="messages", system="system"):
        conversation = await read_conversation(service, chat, exchange.tenant)
    count = UsageCount(conversation.jobs, 1)
    message = Message(
        id=f"msg_{exchange.request_id}",
        model=conversation.model,
        usage=MessageUsage.of(count.usage()),
    )
    shown = request.thinking is None or request.thinking.display != "omitted"
    writer = MessageWriter(message, shown)
    (parser,) = conversation.parsers
    await answer(
        service,
        exchange,
        conversation,
        count,
        lambda: (),
        lambda source: _message_events(source, writer, parser, count),
        message,
        stream=bool(request.stream),
    )


async def count_tokens(service: Service, exchange: HttpExchange) -> None:
    """How many tokens a conversation has, in Anthropic's API."""
    request = await exchange.read(CountTokensRequest)
    chat, origins = as_chat(request)
    with in_words_of(NAMES, origins, items="messages", system="system"):
        prompt = await read_prompt(service, chat)
    await exchange.reply(TokenCount(input_tokens=len(prompt.token_ids)))


async def _message_events(
    source: Source, writer: MessageWriter, parser: AnswerParser, count: UsageCount
) -> AsyncIterator[Iterable[MessageEvent]]:
    """The events of a message, as the model generates it."""
    begun = False
    async for output in source.outputs():
        count.add(source, output)
        if not begun:  # now the cached tokens of the prompt are known
            usage = MessageUsage.of(count.usage())
            writer.message.usage = msgspec.structs.replace(usage, output_tokens=0)
            yield writer.begin()
            begun = True
        yield writer.add(parser.push(output.text))
        if output.finish_reason is not None:
            yield writer.add(parser.finish(cut=output.finish_reason == "length"))
            stopped = stop_reason(source, output)
            sequence = stopped if isinstance(stopped, str) else None
            reason = _stop_reason(output, sequence, parser)
            yield writer.end(reason, sequence, MessageUsage.of(count.usage()))


def _stop_reason(
    output: GenerationOutput, sequence: str | None, parser: AnswerParser
) -> StopReason:
    if output.finish_reason == "length":
        return "max_tokens"
    if sequence is not None:
        return "stop_sequence"
    return "tool_use" if parser.called else "end_turn"
