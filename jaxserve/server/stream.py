"""Outputs of one request on their way from the text generator's thread to a coroutine, coalesced.

A message costs far more than a token, so a `StreamBuffer` coalesces where the event loop is behind:
it sends the outputs that came since its last turn. Up to `SMOOTH_STREAMS` streams, every token is
sent at once while the event loop keeps up. With more streams each sends less often, because
messages take time from the step loop of the same process. Requests that are not streamed have one
portion. Called by `front_end.py`; knows no protocol.
"""

import asyncio
import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable

from jaxserve.text.output import GenerationOutput, merge

COALESCE_TOKENS = 16
"""Tokens that are sent without waiting for the pause between two messages."""
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
    """Ends waits of an event loop from other threads; many at a time cost one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._lock = threading.Lock()
        self._waits: list[asyncio.Future[None]] = []

    @classmethod
    def of_this_loop(cls) -> "_Waker":
        """The waker of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _wakers:
            _wakers[loop] = cls(loop)
        return _wakers[loop]

    def wake(self, wait: "asyncio.Future[None]") -> None:
        """Has the event loop end a wait soon; from any thread."""
        with self._lock:
            self._waits.append(wait)
            if len(self._waits) > 1:
                return  # the loop is about to wake up
        try:
            self.loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed, so nothing waits
            return

    def _end(self) -> None:
        with self._lock:
            waits, self._waits = self._waits, []
        for wait in waits:
            if not wait.done():  # else it was cancelled
                wait.set_result(None)


_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker]" = (
    weakref.WeakKeyDictionary()
)


class StreamBuffer:
    """Outputs of one request: `put` from any thread, `take` from one coroutine.

    It has no bound of its own: a `Generation` with `max_pending_tokens` stops putting.

    Args:
      pause: returns the least seconds between two portions; None: all outputs are one portion.
    """

    def __init__(self, pause: Callable[[], float] | None):
        self._pause = pause
        self._waker = _Waker.of_this_loop()
        self._next_portion = 0.0  # time.monotonic
        self._lock = threading.Lock()
        # Under the lock:
        self._outputs: list[GenerationOutput] = []
        self._tokens = 0
        self._ended = False
        self._wanted = 0.0  # tokens that the waiting coroutine waits for
        self._wait: asyncio.Future[None] | None = None  # ends when they have come

    def put(self, output: GenerationOutput) -> None:
        """Adds an output; wakes the coroutine if there are as many tokens as it waits for."""
        with self._lock:
            self._outputs.append(output)
            self._tokens += len(output.token_ids)
            self._ended |= output.finish_reason is not None
            if (wait := self._wait) is None or not self._has(self._wanted):
                return
            self._wait = None
        self._waker.wake(wait)

    async def take(self) -> GenerationOutput:
        """Waits for the next portion; the last one has a finish reason. May be cancelled while it
        waits: no output is lost."""
        await self._arrival(math.inf if self._pause is None else 1)
        if self._pause is not None:
            if (seconds := self._next_portion - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._arrival(COALESCE_TOKENS)
            self._next_portion = time.monotonic() + self._pause()
        with self._lock:
            outputs, self._outputs, self._tokens = self._outputs, [], 0
            self._wait = None
        return merge(outputs)

    def _has(self, tokens: float) -> bool:
        return self._tokens >= tokens or self._ended

    async def _arrival(self, tokens: float) -> None:
        """Waits until `tokens` have come, or the end."""
        with self._lock:
            if self._has(tokens):
                return
            self._wanted, self._wait = tokens, (wait := self._waker.loop.create_future())
        await wait
