"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

The request is converted to a chat and answered as in `chat.py`; `message_input.py` and
`message_output.py` convert between the two. Errors have Anthropic's form, which `routes.py` says.
"""

from collections.abc import AsyncIterator, Iterable

import msgspec

from jaxserve.server.front_end import Source
from jaxserve.server.http.chat import read_conversation, read_prompt
from jaxserve.server.http.event_answer import answer
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.message_input import NAMES, CountTokensRequest, MessagesRequest, as_chat
from jaxserve.server.http.message_output import (
    Message,
    MessageEvent,
    MessageUsage,
    MessageWriter,
    StopReason,
    TokenCount,
)
from jaxserve.server.http.response_input import in_words_of
from jaxserve.server.http.service import Service, UsageCount, stop_reason
from jaxserve.text.answers import AnswerParser
from jaxserve.text.output import GenerationOutput


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
        lambda source: _events(source, writer, parser, count),
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


async def _events(
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
