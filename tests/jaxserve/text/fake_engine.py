"""An engine without a model: what the tests of the faces run against.

It answers every prompt with the same script of token ids, on a thread of its own, as the real one
does: callbacks come from that thread, cancellation and deadlines are seen between two steps.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.engine.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError
from jaxserve.observe.load import DomainLoad, DraftCounts, EngineLoad, WorkerLoad
from jaxserve.observe.spans import STAGES, Span
from jaxserve.observe.view import PipelineView, Transfers
from jaxserve.roles.expert_view import ExpertView
from tests.jaxserve.waiting import SECONDS

EOS = 1


def logprobs(token_ids: list[int], top: int, wanted: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    """A token's is minus a hundredth of its id; its rivals are those wanted, or the ids before."""
    return [
        TokenLogprobs(
            i, -i / 100, tuple((n, -n / 100) for n in wanted or range(i, max(-1, i - top), -1))
        )
        for i in token_ids
    ]


def pipeline_view(milliseconds: int) -> PipelineView:
    """Two lanes and three layers in a window of this length; 24 stages of one step each."""
    length, spans = milliseconds * 1_000_000, []
    start = 1_700_000_000 * 10**9
    for n in range(24):
        begin, end = start + n * length // 24, start + (n + 1) * length // 24
        lane, layer, stage = n % 2, n // 8, STAGES[n // 2 % 4]
        spans.append(Span(stage, lane, layer, 7, begin, end, 0, begin))
    return PipelineView(
        measured_at=(start + length) / 1e9,
        window_seconds=milliseconds / 1e3,
        steps=2,
        busy={"attend": 0.75, "dispatch": 0.05, "ffn": 0.5, "combine": 0.04},
        bubble=0.25,
        timeline=spans,
        transfers={"dispatch": Transfers(10, 0.002), "combine": Transfers(10, 0.001)},
        experts=ExpertView(expert_tokens={1: [4, 0, 2, 2], 2: [1, 1, 1, 5]}, imbalance=2.25),
    )


@dataclass
class _Running:
    prompt: list[int]
    params: SamplingParams
    on_output: Callable[[TokenOutput], None]
    deadline: float | None
    sent: int = 0
    generated: int = 0


@dataclass
class FakeEngine:
    """Plays `script` to every request, `chunk` tokens a step, a step every `pace` seconds.

    The script ends with EOS, unless max_tokens ends it before. `allowed` tokens a request are
    played at most until it is raised (None: all).
    """

    script: list[int]
    chunk: int = 1
    pace: float = 0.0
    allowed: int | None = None
    refusal: Exception | None = None
    vocab_size: int = 300
    cached_tokens: int = 0
    max_length: int = 100
    status: str = "ready"
    problems: list[str] = field(default_factory=list)
    failure: EngineFailedError | None = None
    view: PipelineView = field(default_factory=PipelineView)
    layers: int = 5
    drafts: DraftCounts | None = None
    workers: list[WorkerLoad] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._callbacks: list[Callable[[EngineFailedError], None]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self) -> None:
        self.status = "ready"

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        source: None = None,
        emitted: Sequence[int] = (),
    ) -> str:
        if self.refusal is not None:
            raise self.refusal
        if self.failure is not None:
            raise self.failure
        if self.status != "ready":
            raise DrainingError(f"the server is {self.status}")
        assert request_id is not None
        with self._lock:
            if request_id in self._running:
                raise InvalidRequestError("request_id", "is already running")
            self.prompts.append(prompt)
            self.params.append(params)
            running = _Running(prompt, params, on_output, deadline, sent=len(emitted))
            self._running[request_id] = running
        return request_id

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Takes everything."""

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running:
                self.cancelled.append(request_id)

    @property
    def last_turn(self) -> float:
        return time.monotonic()

    def load(self) -> EngineLoad:
        running = len(self._running)
        return EngineLoad(
            running=running,
            waiting=2,
            problems=self.problems,
            kv_usage=[0.25, 0.75],
            page_size=16,
            pages=10,
            drafts=self.drafts,
            workers=self.workers,
            domains=[
                DomainLoad(running=running, waiting=2, kv_usage=[0.25]),
                DomainLoad(kv_usage=[0.75]),
            ],
        )

    def pipeline(self) -> PipelineView:
        return self.view

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        self._callbacks.append(callback)

    def model_info(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "dtype": "float32",
            "mode": "afd",
            "attention": "dp 2 x tp 1",
            "ffn": "ep 2 x tp 1",
            "lanes": 3,
            "layers": self.layers,
        }

    def drain(self, timeout: float) -> bool:
        self.status = "draining"
        return self.wait_until_idle(timeout)

    def close(self) -> None:
        self.status = "closed"
        self._thread.join(5)

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    def wait_until_idle(self, timeout: float = SECONDS) -> bool:
        """Whether no request holds pages any more, within `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._running and time.monotonic() < end:
            time.sleep(0.002)
        return not self._running

    def fail(self, message: str) -> None:
        """A follower is gone: no request gets another output from the engine itself."""
        self.failure = EngineFailedError(message)
        self.status = "failed"
        with self._lock:
            self._running.clear()
        for callback in self._callbacks:
            callback(self.failure)

    def _run(self) -> None:
        while self.status != "closed":
            with self._lock:
                running = list(self._running.items())
            for request_id, request in running:
                output = self._step(request_id, request)
                if output is None:
                    continue
                if output.finish_reason is not None:
                    with self._lock:
                        self._running.pop(request_id, None)
                if self.status != "failed":
                    request.on_output(output)
            time.sleep(self.pace or 0.0005)
        for request_id, request in self._running.items():
            request.on_output(TokenOutput(request_id=request_id, finish_reason="cancelled"))

    def _constrained(self, request_id: str, request: _Running) -> TokenOutput:
        """One token: the next one of the script that the grammar allows, or else its lowest."""
        grammar = request.params.grammar
        try:
            bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
        except ValueError as error:
            return TokenOutput(request_id=request_id, finish_reason="error", error=str(error))
        rest = self.script[request.sent :]
        skipped = next((n for n, token_id in enumerate(rest) if bits[token_id]), None)
        token_id = int(np.flatnonzero(bits)[0]) if skipped is None else rest[skipped]
        request.sent += 0 if skipped is None else skipped + 1
        if token_id == EOS:
            return TokenOutput(request_id=request_id, finish_reason="stop", stop_token_id=EOS)
        try:
            grammar.accept(token_id)
            request.generated += 1
            reason: FinishReason | None = "stop" if grammar.finished else None
            if reason is None and request.generated == request.params.max_tokens:
                reason = "length"
        except ValueError as error:
            return TokenOutput(request_id=request_id, finish_reason="error", error=str(error))
        return TokenOutput(request_id=request_id, token_ids=[token_id], finish_reason=reason)

    def _step(self, request_id: str, request: _Running) -> TokenOutput | None:
        late = request.deadline is not None and time.monotonic() > request.deadline
        if late or request_id in self.cancelled:
            return TokenOutput(request_id=request_id, finish_reason="cancelled")
        if request.params.grammar is not None:
            return self._constrained(request_id, request)
        end = min(request.sent + self.chunk, len(self.script), request.params.max_tokens)
        if self.allowed is not None:
            end = min(end, self.allowed)
        token_ids = self.script[request.sent : end]
        request.sent = end
        reason: FinishReason | None = None
        if end == request.params.max_tokens:
            reason = "length"
        elif end == len(self.script):
            reason = "stop"
        if not token_ids and reason is None:
            return None
        params, first = request.params, request.sent == len(token_ids)
        return TokenOutput(
            request_id=request_id,
            logprobs=[]
            if params.logprobs is None
            else logprobs(token_ids, params.logprobs, params.logprob_token_ids),
            prompt_logprobs=(
                [None, *logprobs(request.prompt[1:], params.prompt_logprobs)]
                if first and params.prompt_logprobs is not None
                else None
            ),
            cached_tokens=self.cached_tokens,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=EOS if reason == "stop" else None,
        )
