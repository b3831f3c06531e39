import asyncio
import threading
import time
from collections.abc import Callable, Coroutine

from jaxserve.server.stream import StreamBuffer, pause
from jaxserve.text.output import GenerationOutput


def token(number: int, finish: bool = False) -> GenerationOutput:
    return GenerationOutput(
        request_id="a",
        text=chr(97 + number % 26),
        token_ids=[number],
        finish_reason="length" if finish else None,
    )


def runs(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Makes a test of a coroutine."""
    return lambda: asyncio.run(asyncio.wait_for(test(), 20))


async def begun(seconds: float) -> StreamBuffer:
    """A buffer whose first token was taken, which goes at once."""
    buffer = StreamBuffer(lambda: seconds)
    buffer.put(token(0))
    assert (await buffer.take()).token_ids == [0]
    return buffer


@runs
async def test_whatever_gathered_while_the_loop_was_busy_goes_together() -> None:
    for seconds in (10, 0):
        buffer = await begun(seconds)
        for number in range(1, 18):
            buffer.put(token(number))
        portion = await buffer.take()
        assert (portion.token_ids, portion.text) == ([*range(1, 18)], "bcdefghijklmnopqr")


@runs
async def test_a_portion_goes_when_the_interval_is_over() -> None:
    buffer = await begun(0.1)
    start = time.monotonic()
    buffer.put(token(1))
    buffer.put(token(2))
    assert (await buffer.take()).token_ids == [1, 2]
    assert time.monotonic() - start >= 0.05


@runs
async def test_a_slow_stream_is_not_delayed() -> None:
    """The interval counts from the last message: a token that comes later goes at once."""
    buffer = await begun(30)
    buffer._next_portion -= 30  # the interval is over
    buffer.put(token(1))
    assert (await buffer.take()).token_ids == [1]


@runs
async def test_the_end_waits_for_nothing() -> None:
    buffer = await begun(30)
    buffer.put(token(1))
    buffer.put(token(2, finish=True))
    last = await buffer.take()
    assert (last.token_ids, last.finish_reason) == ([1, 2], "length")


@runs
async def test_nothing_is_lost_between_threads() -> None:
    buffer = StreamBuffer(lambda: 0.001)

    def produce() -> None:
        for number in range(5000):
            buffer.put(token(number, finish=number == 4999))

    thread = threading.Thread(target=produce)
    thread.start()
    numbers: list[int] = []
    while True:
        portion = await buffer.take()
        assert portion.token_ids
        numbers += portion.token_ids
        if portion.finish_reason is not None:
            break
    thread.join()
    assert numbers == list(range(5000))


def test_putting_after_the_loop_is_gone_is_harmless() -> None:
    async def make() -> StreamBuffer:
        buffer = StreamBuffer(lambda: 0.0)
        waiting = asyncio.ensure_future(buffer.take())
        await asyncio.sleep(0)
        waiting.cancel()
        return buffer

    buffer = asyncio.run(make())
    buffer.put(token(0))


def test_few_streams_have_every_token_at_once() -> None:
    assert [pause(streams, 2000) for streams in (1, 16, 64)] == [1 / 8000, 0.002, 0.008]
    assert pause(2064, 2000) == 1.008
