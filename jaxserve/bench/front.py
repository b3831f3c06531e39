"""`python -m jaxserve.bench front`: the speed of gRPC and HTTP without a model behind them.

The server in this process gets its tokens from a stub that produces them at once; clients in
another process read streams over HTTP and gRPC. Measures tokens per second over 64 streams, and the
time added to a request of a single token. Then `streams.py` measures what thousands of streams cost
the engine's process, and `batch.py` runs with the demo model.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.bench import batch, streams
from jaxserve.bench.client import Client
from jaxserve.bench.report import (
    Measure,
    Part,
    Report,
    describe_machine,
    missed,
    table,
    this_machine,
    write_json,
)
from jaxserve.bench.stub_engine import PacedEngine, StubEngine
from jaxserve.bench.workers import Worker, run_worker, writing
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.request import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.server import HttpServer
from jaxserve.server.jaxserve_pb2_grpc import InferenceStub
from jaxserve.server.metrics import Metrics
from jaxserve.text.generator import TextGenerator
from jaxserve.text.output import GenerationOutput
from jaxserve.text.tokenizer import Tokenizer

DEMO = CONFIGS / "demo"
STREAMS = 64
TOKENS = 4096
"""A stream, of the throughput."""
PROBES = 300
TURN = 50
WARM_UP = 5
"""Requests of a turn before those that count."""
SECONDS = 120.0
SMOOTH = (16, 64)
"""Streams of which the time between events is measured."""
STEP_SECONDS = 0.0086
EVENTS = 256
"""A stream."""


def run_bench(quick: bool, json_path: Path | None) -> int:
    """Measures, prints, and writes; 1 if a target is missed."""
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    tokenizer = Tokenizer.from_folder(DEMO)
    engine = StubEngine(tokenizer)
    metrics = Metrics("stub")
    generator = TextGenerator(engine, tokenizer, metrics.started)
    faces: list[GrpcServer | HttpServer] = [
        GrpcServer(port=0, max_pending_tokens=2**20),
        HttpServer(port=0, max_pending_tokens=2**20),
    ]
    addresses = [face.start() for face in faces]
    for face in faces:
        face.open(generator)
    try:
        bare = _bare_seconds(generator)
        arguments = ["--grpc", addresses[0], "--http", addresses[1]]
        arguments += ["--tokens", str(256 if quick else TOKENS)]
        arguments += ["--probes", str(20 if quick else PROBES)]
        found = run_worker(Worker("jaxserve.bench.front", arguments), SECONDS)
    finally:
        for face in faces:
            face.stop(1.0)
        generator.close()
    parts = [
        _part(found, bare),
        _smooth_part(tokenizer),
        streams.measure(quick),
        batch.measure(quick),
    ]
    print("\n\n".join(map(table, parts)))
    if json_path is not None:
        write_json(json_path, Report("front", quick, machine, parts))
    failed = missed(parts)
    for name in failed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if failed and not quick else 0


def _bare_seconds(generator: TextGenerator) -> float:
    """The time of a request of one token without a face."""
    times = []
    for _ in range(PROBES):
        ended = threading.Event()

        def on_text(output: GenerationOutput, ended: threading.Event = ended) -> None:
            if output.finish_reason is not None:
                ended.set()

        start = time.perf_counter()
        generator.submit([5, 6, 7], SamplingParams(max_tokens=1), on_text)
        ended.wait(SECONDS)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _smooth_part(tokenizer: Tokenizer) -> Part:
    """The time between the events of a stream over that between its tokens."""
    generator = TextGenerator(PacedEngine(tokenizer, STEP_SECONDS), tokenizer)
    server = HttpServer(port=0)
    address = server.start()
    server.open(generator)
    try:
        found = run_worker(Worker("jaxserve.bench.front", ["--smooth", address]), SECONDS)
    finally:
        server.stop(1.0)
        generator.close()
    measures = [
        Measure(
            f"http, {streams} streams, between events ÷ tokens, p50", found[str(streams)], "", 1.5
        )
        for streams in SMOOTH
    ]
    notes = [f"An engine stub that has a token for every stream each {STEP_SECONDS * 1e3:g} ms."]
    return Part("smooth", "how evenly tokens arrive", measures, notes, {})


def _part(found: dict[str, Any], bare: float) -> Part:
    measures = []
    for face, limit in (("grpc", 50_000.0), ("http", 25_000.0)):
        measures.append(
            Measure(f"{face}, {STREAMS} streams", found["rates"][face], "tokens/s", limit, "more")
        )
        added = (statistics.median(found["seconds"][face]) - bare) * 1e3
        measures.append(Measure(f"{face}, added to a request, p50", added, "ms", 2.0))
    check = statistics.median(found["seconds"]["health"]) * 1e3
    measures.append(Measure("grpc, a health check, p50", check, "ms"))
    notes = [
        "Server and clients share the machine's cores.",
        "Requests of one token, one after the other, before the streams; a health check shows "
        "what the library and the machine take of their time.",
    ]
    return Part("front", "network faces over an engine stub", measures, notes, {"bare_s": bare})


# ------------------------------------------------------------------------ the other process


Request = Callable[[int], Awaitable[int]]
"""Sends a request for so many tokens; returns how many came."""


async def _rate(one: Request, tokens: int) -> float:
    """Tokens a second of all streams together."""
    await asyncio.gather(*(one(16) for _ in range(STREAMS)))  # connections
    start = time.perf_counter()
    counts = await asyncio.gather(*(one(tokens) for _ in range(STREAMS)))
    return sum(counts) / (time.perf_counter() - start)


async def _probe(faces: Mapping[str, Request], probes: int) -> dict[str, list[float]]:
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


async def _clients(options: argparse.Namespace) -> dict[str, Any]:
    client = Client(options.http)

    async def over_http(tokens: int) -> int:
        body = {"prompt": [5, 6, 7], "max_tokens": tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        outcome = await client.complete(msgspec.json.encode(body))
        if outcome.error or outcome.tokens != tokens:
            raise RuntimeError(f"HTTP: {outcome.tokens} tokens, {outcome.error}")
        return outcome.tokens

    async with grpc.aio.insecure_channel(options.grpc) as channel:
        stub = InferenceStub(channel)

        async def over_grpc(tokens: int) -> int:
            prompt = pb.TokenIds(ids=[5, 6, 7])
            request = pb.GenerateRequest(token_ids=prompt, max_tokens=tokens)
            return sum([len(event.delta.token_ids) async for event in stub.GenerateStream(request)])

        async def health_check(tokens: int) -> int:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            return tokens

        faces: dict[str, Request] = {"grpc": over_grpc, "http": over_http}
        times = await _probe({**faces, "health": health_check}, options.probes)
        rates = {face: await _rate(one, options.tokens) for face, one in faces.items()}
        return {"seconds": times, "rates": rates}


async def _smoothness(address: str) -> dict[str, float]:
    """Streams → the median time between two events of a stream, over that of its tokens."""
    client = Client(address)
    body = msgspec.json.encode({"prompt": [5, 6, 7], "max_tokens": EVENTS, "stream": True})
    found = {}
    for streams_ in SMOOTH:
        outcomes = await asyncio.gather(*(client.complete(body) for _ in range(streams_)))
        gaps = [
            later - earlier
            for outcome in outcomes
            for earlier, later in itertools.pairwise(outcome.arrivals)
        ]
        found[str(streams_)] = statistics.median(gaps) / STEP_SECONDS
    return found


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", required=True)
    for name in ("--grpc", "--http", "--smooth"):
        parser.add_argument(name)
    for name in ("--tokens", "--probes"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    with writing(options.result) as result:
        if options.smooth:
            result |= asyncio.run(_smoothness(options.smooth))
        else:
            result |= asyncio.run(_clients(options))


if __name__ == "__main__":
    _main()
