"""The cost of thousands of open streams to the engine's process: part of `bench front`.

An engine stub gives every stream one token per step. Counted is the CPU time, in the engine's
process, of the step loop's thread while it hands the tokens out, and of all other threads: they
hold the interpreter that the step loop needs. With the faces as threads (`server.processes: 0`),
and in a process of their own. Processor time, unlike wall time, is comparable on a busy machine.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

import grpc

from jaxserve.bench.client import Client, completion_body
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.stub_engine import FOLDER, PROMPT, PacedEngine
from jaxserve.bench.workers import BenchError, Helper, Worker, run_worker
from jaxserve.config.deployment import Server
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.faces import Faces, LocalFaces
from jaxserve.server.processes.host import FaceProcesses
from jaxserve.server.rpc import InferenceStub
from jaxserve.text.tokenizer import Tokenizer

STREAMS = 2048
STEPS = 50
STEP_SECONDS = 0.2
"""Long enough for two cores to serve all streams and their clients meanwhile."""
CHANNELS = 32
"""HTTP/2 connections of the gRPC client."""
OPEN_SECONDS = 120.0
SECONDS = 300.0
ENDLESS = 10**6
"""Tokens that a stream requests."""


def measure(quick: bool) -> Iterator[Part]:
    """Measures both faces, each as threads and as a process."""
    streams, steps = (64, 5) if quick else (STREAMS, STEPS)
    measures, details = [], {}
    for face in ("http", "grpc"):
        for processes in (0, 1):
            arguments: dict[str, Any] = {"face": face, "processes": processes}
            arguments |= {"streams": streams, "steps": steps}
            found = run_worker(Worker(serve, arguments), SECONDS)
            name = f"{face}, {'a process' if processes else 'threads'}"
            details[name] = found
            step_loop, others = found["step_loop_ms"], found["other_threads_ms"]
            measures.append(Measure(f"{name}: step loop, emitting", step_loop, "ms/step"))
            measures.append(Measure(f"{name}: other threads", others, "ms/step"))
    notes = [f"{streams} streams of one token per step, CPU time of the engine's process."]
    yield Part("streams", "open streams and the engine's interpreter", measures, notes, details)


# ------------------------------------------------------------------------ the engine's process


def serve(face: str, processes: int, streams: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step in the engine's process while all streams get tokens."""
    server = Server(grpc_port=0, http_port=0, processes=processes)
    faces: Faces = LocalFaces(str(FOLDER), server, False)
    if processes:
        faces = FaceProcesses(str(FOLDER), server, False, "text")
    engine = PacedEngine(Tokenizer.from_folder(FOLDER), STEP_SECONDS)
    addresses = faces.start()
    faces.open(engine)
    clients = Worker(read, {"address": addresses[face], "face": face, "streams": streams})
    try:
        with Helper(clients.command(), SECONDS):
            begin = time.monotonic()
            while engine.running < streams:
                if time.monotonic() - begin > OPEN_SECONDS:
                    raise BenchError(f"{engine.running} of {streams} streams were opened")
                time.sleep(STEP_SECONDS)
            opened = time.monotonic() - begin
            _wait_for_steps(engine, 5)
            first, before = len(engine.emitting), _cpu_seconds(engine)
            _wait_for_steps(engine, steps)
            ran, after = len(engine.emitting) - first, _cpu_seconds(engine)
            if engine.running < streams:
                raise BenchError(f"{streams - engine.running} streams ended")
            return {
                "steps": ran,
                "opening_seconds": opened,
                "step_loop_ms": 1e3 * statistics.median(engine.emitting[first : first + ran]),
                "other_threads_ms": 1e3 * (after - before) / ran,
            }
    finally:
        if processes:
            faces.stop(0)


def _wait_for_steps(engine: PacedEngine, steps: int) -> None:
    end = len(engine.emitting) + steps
    while len(engine.emitting) < end:
        time.sleep(STEP_SECONDS / 4)


def _cpu_seconds(engine: PacedEngine) -> float:
    """CPU seconds of all threads but the step loop's."""
    assert engine.thread.ident is not None
    step_loop = time.clock_gettime(time.pthread_getcpuclockid(engine.thread.ident))
    return time.process_time() - step_loop


# ------------------------------------------------------------------------ the clients' process


def read(address: str, face: str, streams: int) -> None:
    """Reads endless streams until the process is ended."""

    async def over_http() -> None:
        client, body = Client(address), completion_body(PROMPT, ENDLESS)
        await asyncio.gather(*(client.complete(body) for _ in range(streams)))

    async def over_grpc() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS)]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=ENDLESS)

        async def one(channel: grpc.aio.Channel) -> None:
            async for _ in InferenceStub(channel).GenerateStream(request):
                pass

        await asyncio.gather(*(one(channels[n % CHANNELS]) for n in range(streams)))

    asyncio.run(over_http() if face == "http" else over_grpc())
