"""Outputs of one request on their way from the text generator's thread to a coroutine, coalesced.

A message costs far more than a token, so a `StreamBuffer` coalesces where the event loop is behind:
it sends the outputs that came since its last turn. Up to `SMOOTH_STREAMS` streams, every token is
sent at once while the event loop keeps up. With more streams each sends less often, because
messages take time from the step loop of the same process. `WholeBuffer` is for requests
that are not streamed. Called by `front_end.py`; knows no protocol.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

from jaxserve.text.output import GenerationOutput, merge

COALESCE_TOKENS = 16
SMOOTH_STREAMS = 64
SMOOTH_MESSAGES = 8000
"""Messages a second of all smooth streams together: about what one event loop can send."""
MESSAGES_A_SECOND = 2000
"""Rate of all other streams together, if the step loop runs in this process."""


def pause(streams: int, messages_a_second: float) -> float:
    """Returns the least seconds between two messages of one of several streams.

    Args:
      streams: number of open streams.
      messages_a_second: rate of all streams beyond `SMOOTH_STREAMS` together.
    """
    others = max(0, streams - SMOOTH_STREAMS)
    return (streams - others) / SMOOTH_MESSAGES + others / messages_a_second


class _Waker:
    """Sets events of an event loop from other threads; many at a time cost one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[asyncio.Event] = []

    @classmethod
    def of_this_loop(cls) -> "_Waker":
        """The waker of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _wakers:
            _wakers[loop] = cls(loop)
        return _wakers[loop]

    def wake(self, event: asyncio.Event) -> None:
        """Has the event loop set an event soon; from any thread."""
        with self._lock:
            self._events.append(event)
            if len(self._events) > 1:
                return  # the loop is about to wake up
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop is closed, so nothing waits for the event
            return

    def _set(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()


_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker]" = (
    weakref.WeakKeyDictionary()
)


class StreamBuffer:
    """Outputs of one request: `put` from any thread, `take` from one coroutine.

    It has no bound of its own: a `Generation` with `max_pending_tokens` stops putting.

    Args:
      pause: the least seconds between two portions, as the number of streams asks for.
      tokens: as many are sent without waiting for the interval.
      seconds: the least seconds between two portions, however few streams there are.
    """

    def __init__(
        self,
        pause: Callable[[], float] = lambda: 0.0,
        tokens: int = COALESCE_TOKENS,
        seconds: float = 0.0,
    ):
        self._pause = pause
        self._portion = tokens
        self._interval = seconds
        self._waker = _Waker.of_this_loop()
        self._wake = asyncio.Event()
        self._next_portion = 0.0  # time.monotonic
        self._lock = threading.Lock()
        # Under the lock:
        self._outputs: list[GenerationOutput] = []
        self._tokens = 0
        self._ended = False
        self._wanted: int | None = None  # tokens that the waiting coroutine waits for

    def put(self, output: GenerationOutput) -> None:
        """Adds an output; wakes the coroutine if there are as many tokens as it waits for."""
        with self._lock:
            self._outputs.append(output)
            self._tokens += len(output.token_ids)
            self._ended |= output.finish_reason is not None
            wake = self._wanted is not None and self._has(self._wanted)
            if wake:
                self._wanted = None
        if wake:
            self._waker.wake(self._wake)

    async def take(self) -> GenerationOutput:
        """Waits for the next portion; the last one has a finish reason."""
        while not await self._wait(1):
            pass
        pause = self._next_portion - time.monotonic()
        if pause > 0:
            try:
                async with asyncio.timeout(pause):
                    while not await self._wait(self._portion):
                        pass
            except TimeoutError:
                pass
        interval = max(self._interval, self._pause())
        self._next_portion = time.monotonic() + interval
        with self._lock:
            outputs, self._outputs, self._tokens = self._outputs, [], 0
            self._wanted = None
        return merge(outputs)

    def _has(self, tokens: int) -> bool:
        return self._tokens >= tokens or self._ended

    async def _wait(self, tokens: int) -> bool:
        """Waits once for `tokens`; returns whether they are there (wake-ups may be spurious)."""
        with self._lock:
            if self._has(tokens):
                return True
            self._wanted = tokens
            self._wake.clear()
        await self._wake.wait()
        return False


class WholeBuffer:
    """All outputs of one request as one: `put` from any thread, `take` from one coroutine."""

    def __init__(self) -> None:
        self._waker = _Waker.of_this_loop()
        self._ended = asyncio.Event()
        self._outputs: list[GenerationOutput] = []

    def put(self, output: GenerationOutput) -> None:
        """Adds an output; the last one wakes the coroutine."""
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._waker.wake(self._ended)

    async def take(self) -> GenerationOutput:
        """Waits for the end; returns all outputs joined."""
        await self._ended.wait()
        return merge(self._outputs)
