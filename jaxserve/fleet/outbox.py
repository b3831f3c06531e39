"""The way out of a process that runs an engine: outputs are gathered, and sent by a thread.

The engine's thread only appends. Called by `worker_port.py`, for routers, and by the faces'
processes (`server/processes/host.py`).
"""

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from jaxserve.engine.request import FinishReason, TokenOutput
from jaxserve.fleet.request_frames import Frame, Outputs

BUSY = 64
"""After a frame of more outputs than this, the next one is delayed to gather more."""
GATHER_SECONDS = 0.002
MAX_WAITING = 2**20
"""Outputs that may wait for a receiver before it is taken for stuck."""

logger = logging.getLogger(__name__)


class Outbox:
    """Frames and outputs on their way to one receiver, in order. Any thread may post.

    Args:
      name: of the thread.
      send: sends frames. An OSError ends the outbox: the receiver is gone. A BlockingIOError, or
        any other error, ends it as stuck.
      ended: told of the requests whose last output goes out next, returns frames to go before it.
      stuck: called where the receiver takes nothing.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[Sequence[Frame]], None],
        ended: Callable[[Mapping[str, FinishReason]], Sequence[Frame]],
        stuck: Callable[[], None],
    ):
        self._send, self._ended, self._stuck = send, ended, stuck
        self._waiting: collections.deque[TokenOutput | Frame] = collections.deque()
        self._wake = threading.Event()
        self._closed = self._sending = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, item: TokenOutput | Frame) -> None:
        """Queues something; returns at once."""
        self._waiting.append(item)
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, seconds: float) -> bool:
        """Waits until everything posted before is sent; whether that happened in time."""
        deadline = time.monotonic() + seconds
        while self._waiting or self._sending:
            if self._closed or time.monotonic() >= deadline:
                return False
            time.sleep(GATHER_SECONDS)
        return True

    def close(self) -> None:
        """Ends the thread; what waits is dropped."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        busy = False
        while self._wake.wait() and not self._closed:
            self._wake.clear()
            if busy:  # the step loop is emitting outputs; do not compete for the GIL
                time.sleep(GATHER_SECONDS)
            if len(self._waiting) > MAX_WAITING:
                self._stuck()
                return
            self._sending = True
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                self._send(self._gathered(items))
            except Exception as error:
                self._closed = True
                if isinstance(error, BlockingIOError) or not isinstance(error, OSError):
                    logger.exception("nothing more is sent")
                    self._stuck()
                return  # where the receiver is gone, the thread that reads from it notices
            self._sending = False
            busy = len(items) > BUSY

    def _gathered(self, items: Sequence[TokenOutput | Frame]) -> list[Frame]:
        """Consecutive outputs as one frame."""
        found: list[Frame] = []
        outputs: list[TokenOutput] = []
        ended: dict[str, FinishReason] = {}
        for item in items:
            if isinstance(item, Frame):
                found.append(item)
                outputs = []
                continue
            if not outputs:
                found.append(Outputs(outputs))
            outputs.append(item)
            if item.finish_reason is not None:
                ended[item.request_id] = item.finish_reason
        return [*self._ended(ended), *found] if ended else found
