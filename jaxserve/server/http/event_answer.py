"""A chat's answer in an API whose streams are events of several types.

/v1/responses and /v1/messages write their answer with a writer that tells every change as events; a
client that does not stream gets the whole answer. Called by `response_route.py` and
`message_route.py`.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

import msgspec

from jaxserve.server.front_end import Source
from jaxserve.server.http.chat import Conversation
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.service import Service, UsageCount


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
