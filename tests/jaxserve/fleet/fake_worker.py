"""A worker without a model, behind a real port: for tests of what stands between router and worker.

Its tokens follow from the seed, the position and the token before, as a model's would, so that a
request that goes on elsewhere goes on wrongly if anything of it is missing.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.request_frames import GrammarOf
from jaxserve.fleet.worker_frames import WorkerFacts, WorkerRole, hello_of
from jaxserve.fleet.worker_port import WorkerPort
from jaxserve.link.pages.source import PagesSource
from jaxserve.observe.load import EngineLoad
from jaxserve.observe.view import PipelineView

VOCAB = 1000
PAGE = 4
TOKEN = "secret"
MODEL = "a model"


def token_after(tokens: Sequence[int], seed: int) -> int:
    return (tokens[-1] * 31 + len(tokens) * 7 + seed * 13) % VOCAB


def expected(prompt: Sequence[int], count: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_after(tokens, seed))
    return tokens[len(prompt) :]


@dataclass
class Running:
    tokens: list[int]
    left: int
    seed: int
    on_output: Callable[[TokenOutput], None]
    deadline: float | None
    grammar: Any
    sent: int = 0


@dataclass
class FakeWorkerEngine:
    """A token a step for every request; a prompt a step, which is held until it is released."""

    pace: float = 0.002
    fetch: Callable[[PagesSource, list[int]], str | None] = lambda source, tokens: None
    """Why pages do not come."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Tokens come while it is set."""
    stuck: bool = False
    allowed: int = 10**6
    """Tokens that a request gets here at most, until it is raised."""
    slots: int = 10**6
    """Requests that get tokens at a time."""
    found: int = 0
    """Tokens of each prompt that its prefix cache has."""

    status: str = "ready"
    failure: EngineFailedError | None = None
    last_turn: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.running: dict[str, Running] = {}
        self.prompts: dict[str, tuple[list[int], Callable[[Any], None]]] = {}
        self.held: dict[str, PagesSource] = {}
        self.renewed: list[str] = []
        self.submits: list[tuple[list[int], list[int], PagesSource | None]] = []
        self.prefilled: list[list[int]] = []
        self.resets = 0
        self.gate.set()
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[EngineFailedError], None]] = []
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def idle(self) -> bool:
        return not (self.running or self.prompts or self.held)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.running) + len(self.prompts), kv_usage=[0.25])

    def pipeline(self) -> PipelineView:
        return PipelineView(steps=7)

    def reset_prefix_cache(self) -> int:
        self.resets += 1
        return 0

    def model_info(self) -> dict[str, Any]:
        info = {"model": "fake", "vocab_size": VOCAB, "max_length": 200, "dtype": "float32"}
        return info | {"mode": "colocated", "attention": "", "ffn": "", "lanes": 1}

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        self._callbacks.append(callback)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        source: PagesSource | None = None,
        emitted: Sequence[int] = (),
    ) -> str:
        assert request_id is not None
        assert params.seed is not None, "a worker cannot draw a seed that others know"
        with self._lock:
            self.submits.append((prompt, list(emitted), source))
            tokens = [*prompt, *emitted]
            if source is not None and (why := self.fetch(source, tokens)):
                news = TokenOutput(
                    request_id=request_id, finish_reason="error", error=why, pages_lost=True
                )
                threading.Thread(target=on_output, args=(news,)).start()
                return request_id
            left = params.max_tokens - len(emitted)
            for token_id in emitted:
                if params.grammar is not None:
                    params.grammar.accept(token_id)
            self.running[request_id] = Running(
                tokens, left, params.seed, on_output, deadline, params.grammar
            )
        return request_id

    def prefill(
        self,
        prompt: list[int],
        on_held: Callable[[Any], None],
        *,
        cache_salt: str = "",
        priority: int = 0,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        assert request_id is not None
        with self._lock:
            self.prefilled.append(prompt)
            self.prompts[request_id] = prompt, on_held
        return request_id

    def cancel(self, request_id: str) -> None:
        with self._lock:
            running = self.running.pop(request_id, None)
            self.prompts.pop(request_id, None)
            self.held.pop(request_id, None)
        if running is not None:
            running.on_output(TokenOutput(request_id=request_id, finish_reason="cancelled"))

    def withdraw(self, request_id: str) -> None:
        with self._lock:
            one = self.running.get(request_id)
            if one is not None and not one.sent:
                self.cancel(request_id)

    def renew(self, hand_off: str) -> None:
        self.renewed.append(hand_off)

    def close(self) -> None:
        self._closed.set()

    def fail(self, why: str) -> None:
        self.status, self.failure = "failed", EngineFailedError(why)
        with self._lock:  # as the engine, which tells its requests before anybody else
            for request_id, running in list(self.running.items()):
                del self.running[request_id]
                running.on_output(
                    TokenOutput(
                        request_id=request_id, finish_reason="error", error=why, engine_failed=True
                    )
                )
        for callback in self._callbacks:
            callback(self.failure)

    def _run(self) -> None:
        while not self._closed.wait(self.pace):
            if self.stuck:
                continue
            self.last_turn = time.monotonic()
            if self.gate.is_set():
                self._step()

    def _step(self) -> None:
        for request_id, (prompt, on_held) in list(self.prompts.items()):
            tokens = len(prompt) // PAGE * PAGE
            source = PagesSource(
                "here", request_id, tokens, f"{sum(prompt[:tokens])}", cached=self.found
            )
            with self._lock:
                if self.prompts.pop(request_id, None) is None:
                    continue
                self.held[request_id] = source
            on_held(source)
        for request_id, one in list(self.running.items())[: self.slots]:
            if one.deadline is not None and time.monotonic() >= one.deadline:
                self.cancel(request_id)
                continue
            if one.sent >= self.allowed:
                continue
            one.sent += 1
            one.tokens.append(token_after(one.tokens, one.seed))
            one.left -= 1
            if one.grammar is not None:
                one.grammar.accept(one.tokens[-1])
            if not one.left:
                self.running.pop(request_id, None)
            news = TokenOutput(
                request_id=request_id,
                token_ids=one.tokens[-1:],
                finish_reason=None if one.left else "length",
                cached_tokens=PAGE,
            )
            one.on_output(news)


def worker_facts(role: WorkerRole, **changes: Any) -> WorkerFacts:
    """Facts that a worker tells routers about itself."""
    facts: dict[str, Any] = {"role": role, "slots": 4, "groups": 1}
    facts |= {"pages": 1000, "page_size": PAGE, "max_length": 200, "vocab": VOCAB}
    facts |= {"eos_token_ids": [], "info": {}, "attention_cost": 2**-15}
    return WorkerFacts(**facts | changes)


class FakeWorker:
    """An engine behind a port."""

    def __init__(
        self,
        role: WorkerRole,
        engine: FakeWorkerEngine | None = None,
        *,
        address: str = "127.0.0.1:0",
        slots: int = 4,
        model: str = MODEL,
        restore: Callable[[GrammarOf, int], Any] = lambda grammar, vocab: None,
        resume_seconds: float = 30.0,
        **facts: Any,
    ):
        self.engine = engine or FakeWorkerEngine()
        info = dict(self.engine.model_info())
        told = worker_facts(role, slots=slots, info=info, **facts)
        hello = hello_of(role, model)
        self.port = WorkerPort(address, TOKEN, hello, lambda engine: told, restore, resume_seconds)
        self.port.start()
        self.port.open(self.engine)
        self.address, self.model = self.port.address, model

    def kill(self) -> None:
        """Ends the connections without a word, like a process that is killed."""
        self.port._stopping.set()
        for router in list(self.port._routers):
            router.fail("killed")
        self.port._listener.close(1.0)
        self.engine.close()

    def close(self) -> None:
        self.port.stop(1.0)
        self.engine.close()
