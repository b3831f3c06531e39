"""`python -m jaxserve.bench front`: the speed of gRPC and HTTP without a model behind them.

The server in this process gets its tokens from a stub engine; clients in another process read
streams over HTTP and gRPC. Measures tokens per second over 64 streams, and the time of a request of
a single token.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc

from jaxserve.bench.client import Client, completion_body
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Task, run_worker
from jaxserve.config.sections import Server
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.request import FinishReason, SamplingParams, TokenOutput
from jaxserve.errors import EngineFailedError
from jaxserve.observe.load import EngineLoad
from jaxserve.observe.view import PipelineView
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.server import HttpServer
from jaxserve.server.metrics import Metrics
from jaxserve.server.rpc import InferenceStub
from jaxserve.text.generator import TextGenerator
from jaxserve.text.tokenizer import Tokenizer

FOLDER = CONFIGS / "demo"
"""Model that the stubs pretend to be."""
PROMPT = [5, 6, 7]


class StubEngine:
    """A `TokenEngine` that has every token at once, one a callback."""

    status = "ready"
    failure: EngineFailedError | None = None

    def __init__(self, tokenizer: Tokenizer):
        self._info = {"model": "stub", "vocab_size": tokenizer.vocab_size, "max_length": 2**20}
        self._info |= {"dtype": "", "mode": "", "attention": "", "ffn": "", "lanes": 1}
        text = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)\n" * 200
        self._script = tokenizer.encode(text)[1:]

    @property
    def last_turn(self) -> float:
        return time.monotonic()

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        assert request_id is not None
        script = (self._script * (params.max_tokens // len(self._script) + 1))[: params.max_tokens]
        for number, token_id in enumerate(script, 1):
            reason: FinishReason | None = "length" if number == len(script) else None
            news = TokenOutput(request_id=request_id, token_ids=[token_id], finish_reason=reason)
            on_output(news)
        return request_id

    def cancel(self, request_id: str) -> None:
        return

    def load(self) -> EngineLoad:
        return EngineLoad()

    def pipeline(self) -> PipelineView:
        return PipelineView()

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        return

    def model_info(self) -> dict[str, Any]:
        return self._info


STREAMS = 64
TOKENS = 4096
"""Tokens of a stream whose throughput is measured."""
PROBES = 300
TURN = 50
WARM_UP = 5
"""Requests of a turn before the counted ones."""
SECONDS = 120.0


def measure(quick: bool) -> Iterator[Part]:
    """Measures both faces over a stub that has every token at once."""
    tokenizer = Tokenizer.from_folder(FOLDER)
    metrics = Metrics("stub")
    generator = TextGenerator(StubEngine(tokenizer), tokenizer, metrics.started)
    faces: list[GrpcServer | HttpServer] = [
        GrpcServer(Server(grpc_port=0), max_pending_tokens=2**20),
        HttpServer(Server(http_port=0), max_pending_tokens=2**20),
    ]
    arguments: dict[str, Any] = {"grpc_address": faces[0].start(), "http": faces[1].start()}
    arguments |= {"tokens": 256 if quick else TOKENS, "probes": 20 if quick else PROBES}
    for face in faces:
        face.open(generator)
    try:
        yield _part(run_worker(Task(run_clients, arguments), SECONDS))
    finally:
        for face in faces:
            face.stop(1.0)
        generator.close()


def _part(found: dict[str, Any]) -> Part:
    measures = []
    for face, limit in (("grpc", 110_000.0), ("http", 100_000.0)):
        measures.append(
            Measure(f"{face}, {STREAMS} streams", found["rates"][face], "tokens/s", limit, "more")
        )
        one = statistics.median(found["seconds"][face]) * 1e3
        measures.append(Measure(f"{face}, a request of one token, p50", one, "ms", 2.0))
    notes = [
        "Server and clients share the machine's cores.",
        "Requests of one token run one after the other, before the streams.",
    ]
    return Part("front", "network faces over an engine stub", measures, notes)


AskTokens = Callable[[int], Awaitable[int]]
"""In the clients' process: sends a request for a number of tokens; returns how many came."""


async def _rate(one: AskTokens, tokens: int) -> float:
    """Tokens a second of all streams together."""
    await asyncio.gather(*(one(16) for _ in range(STREAMS)))  # connections
    start = time.perf_counter()
    counts = await asyncio.gather(*(one(tokens) for _ in range(STREAMS)))
    return sum(counts) / (time.perf_counter() - start)


async def _probe(faces: Mapping[str, AskTokens], probes: int) -> dict[str, list[float]]:
    """Seconds of requests of one token, one after the other; the faces take turns of `TURN`."""
    times: dict[str, list[float]] = {face: [] for face in faces}
    while min(map(len, times.values())) < probes:
        for face, one in faces.items():
            for number in range(WARM_UP + TURN):
                start = time.perf_counter()
                await one(1)
                if number >= WARM_UP:
                    times[face].append(time.perf_counter() - start)
    return times


def run_clients(grpc_address: str, http: str, tokens: int, probes: int) -> dict[str, Any]:
    """Seconds of requests of one token by face, and tokens a second of all streams together."""

    async def run() -> dict[str, Any]:
        client = Client(http)

        async def over_http(tokens: int) -> int:
            outcome = await client.complete(completion_body(PROMPT, tokens))
            if outcome.error or outcome.tokens != tokens:
                raise BenchError(f"HTTP: {outcome.tokens} tokens, {outcome.error}")
            return outcome.tokens

        async with grpc.aio.insecure_channel(grpc_address) as channel:
            stub = InferenceStub(channel)

            async def over_grpc(tokens: int) -> int:
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=tokens)
                events = stub.GenerateStream(request)
                return sum([len(event.delta.token_ids) async for event in events])

            faces: dict[str, AskTokens] = {"grpc": over_grpc, "http": over_http}
            times = await _probe(faces, probes)
            rates = {face: await _rate(one, tokens) for face, one in faces.items()}
            return {"seconds": times, "rates": rates}

    return asyncio.run(run())
