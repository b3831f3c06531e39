"""The port of a worker whose requests are traced: what passes it makes the worker's spans."""

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from jaxserve.engine.request import TokenOutput
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.worker_port import Item, RouterConnection, WorkerPort
from jaxserve.link.session.channel import Channel
from jaxserve.server.face_port import FaceConnection, FacePort
from jaxserve.server.tracing import Tracing, WorkerSpans

Handlers = dict[type[msgspec.Struct], Callable[..., None]]


class Traced(RouterConnection):
    """One router's requests, and their spans."""

    def __init__(self, port: WorkerPort, channel: Channel, tracing: Tracing):
        super().__init__(port, channel)
        self._tracing = tracing
        self._spans: dict[str, tuple[WorkerSpans, int]] = {}
        """Id of a request → its spans, and tokens of its prompt."""
        self.post = self._noted

    def _begin(self, frame: Any, trace: str) -> None:
        if trace:
            tokens = len(frame.prompt) // frames.TOKEN_BYTES
            self._spans[frame.request_id] = self._tracing.worker(trace), tokens

    def _noted(self, item: Item) -> None:
        """Queues an item, and notes it where its request is traced; on the engine's thread."""
        match item:
            case TokenOutput() if self._spans and item.request_id in self._spans:
                spans, prompt = self._spans[item.request_id]
                spans.note(item, prompt, item.cached_tokens)
                if item.finish_reason is not None:
                    self._spans.pop(item.request_id, None)
            case frames.Held() | frames.Rejected() if item.request_id in self._spans:
                spans, _ = self._spans.pop(item.request_id)
                spans.held(item.source if isinstance(item, frames.Held) else None)
        self._wanted.put(item)

    def _submit_traced(self, frame: frames.Submit) -> None:
        self._begin(frame, frame.params.trace)
        self._submit(frame)

    def _prefill_traced(self, frame: frames.Prefill) -> None:
        self._begin(frame, frame.trace)
        self._try(frame, self._prefill)

    traced: ClassVar[Handlers] = {frames.Submit: _submit_traced, frames.Prefill: _prefill_traced}
    handlers: ClassVar = RouterConnection.handlers | traced


class TracedFace(Traced, FaceConnection):
    """One face's requests, and their spans."""

    handlers: ClassVar = FaceConnection.handlers | Traced.traced


class TracedPort(WorkerPort):
    """Listens for routers, and traces their requests.

    Args:
      tracing: sends the spans.
      arguments: those of `WorkerPort`.
    """

    def __init__(self, tracing: Tracing, *arguments: Any):
        super().__init__(*arguments)
        self._tracing = tracing

    def stop(self, grace: float) -> None:
        """See `WorkerPort`; sends the last spans."""
        super().stop(grace)
        self._tracing.close()

    def _connection(self, channel: Channel) -> RouterConnection:
        return Traced(self, channel, self._tracing)


class TracedFacePort(TracedPort, FacePort):
    """Listens for faces, and traces their requests; arguments as of `TracedPort`."""

    def _connection(self, channel: Channel) -> TracedFace:
        return TracedFace(self, channel, self._tracing)
