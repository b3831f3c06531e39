"""Keeps requests and their outputs in a domain when their router is gone, for another router.

A client that sends a key with a request (`Idempotency-Key`) may send both again, to any router,
when its own is gone. Meanwhile the domain continues the request for `fleet.resume_seconds`. The
router that adopts it gets everything from the first token. Called by `worker_port.py`; any thread.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from jaxserve.engine.request import TokenOutput
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.fleet.worker_frames import Submit, unpacked

OnOutput = Callable[[TokenOutput], None]


class Kept(msgspec.Struct, eq=False):
    """A request with a key.

    Attributes:
      frame: the frame in which it came.
      outputs: all outputs so far, including those of other domains before.
      receiver: receiver of its outputs; None: its router is gone.
      since: seconds of `time.monotonic` at which its router left or the request ended.
    """

    frame: Submit
    outputs: list[TokenOutput]
    receiver: OnOutput | None
    since: float = 0.0
    ended: bool = False


class KeptRequests:
    """Requests with keys that one worker keeps.

    Args:
      seconds: time for which a request without a router, or an ended one, is kept; 0: never.
      cancel: ends a request of the engine.
    """

    def __init__(self, seconds: float, cancel: Callable[[str], Any]):
        self._seconds, self._cancel = seconds, cancel
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}

    @property
    def orphans(self) -> list[str]:
        """Attempts of requests whose router is gone."""
        with self._lock:
            return [one for one, kept in self._kept.items() if kept.receiver is None]

    def keep(self, frame: Submit, receiver: OnOutput) -> OnOutput:
        """Keeps a request, if it has a key. Returns the receiver to give its outputs to."""
        params = frame.params
        whole = params.logprobs is None and params.prompt_logprobs is None
        if not (self._seconds and frame.keyed) or (frame.emitted and not whole):
            return receiver
        before = []
        if frame.emitted:
            tokens = unpacked(frame.emitted)
            before = [TokenOutput(request_id=frame.request_id, token_ids=tokens)]
        kept = Kept(frame, before, receiver)
        with self._lock:
            self._kept[frame.request_id] = kept

        def take(output: TokenOutput) -> None:
            with self._lock:
                kept.outputs.append(output)
                if output.finish_reason in ("cancelled", "error"):
                    self._kept.pop(frame.request_id, None)
                elif output.finish_reason is not None:
                    kept.ended, kept.since = True, time.monotonic()
                if kept.receiver is not None:
                    kept.receiver(output)

        return take

    def drop(self, attempt: str) -> None:
        """Forgets a request that its router gave up, or that was refused."""
        with self._lock:
            self._kept.pop(attempt, None)

    def left(self, receiver: OnOutput) -> set[str]:
        """Notes that a receiver is gone. Returns its requests that are kept, ended ones included:
        their outputs may not have arrived."""
        with self._lock:
            own = {one for one, kept in self._kept.items() if kept.receiver == receiver}
            for attempt in own:
                self._kept[attempt].receiver, self._kept[attempt].since = None, time.monotonic()
        return own

    def adopt(self, attempt: str, prompt: bytes, receiver: OnOutput) -> None:
        """Hands a request whose router is gone to another receiver, from its first token.

        Raises:
          OverloadedError: the request is no longer kept and has to begin again.
          InvalidRequestError: it has another prompt.
        """
        with self._lock:
            kept = self._kept.get(attempt)
            if kept is None or kept.receiver is not None:
                raise OverloadedError("the request was kept no longer")
            if kept.frame.prompt != prompt:
                raise InvalidRequestError("request_id", "another prompt was sent with this key")
            for output in kept.outputs:
                receiver(output)
            kept.receiver = receiver

    def tick(self) -> None:
        """Ends requests that no router has adopted in time."""
        now = time.monotonic()
        with self._lock:
            old = [
                attempt
                for attempt, kept in self._kept.items()
                if (kept.ended or kept.receiver is None) and now - kept.since > self._seconds
            ]
            running = [attempt for attempt in old if not self._kept.pop(attempt).ended]
        for attempt in running:
            self._cancel(attempt)
