"""Part of `bench front`: what thousands of open streams cost the engine's process.

An engine stub gives every stream one token per step. Counted is the CPU time, in the engine's
process, of the step loop's thread while it hands the tokens out, and of all other threads: they
hold the interpreter that the step loop needs. With the faces as threads (`server.processes: 0`),
and in a process of their own. Processor time, unlike wall time, is comparable on a busy machine.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import grpc
import msgspec

from jaxserve.bench.client import Client
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.stub_engine import PacedEngine
from jaxserve.bench.workers import BenchError, Worker, run_worker, writing
from jaxserve.config.deployment import Server
from jaxserve.config.shipped import CONFIGS
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.faces import Faces, LocalFaces
from jaxserve.server.jaxserve_pb2_grpc import InferenceStub
from jaxserve.server.processes.host import FaceProcesses
from jaxserve.text.tokenizer import Tokenizer

DEMO = CONFIGS / "demo"
STREAMS = 2048
STEPS = 50
STEP_SECONDS = 0.2
"""Long enough for two cores to serve all streams and their clients meanwhile."""
CHANNELS = 32
"""HTTP/2 connections of the gRPC client."""
OPEN_SECONDS = 120.0
SECONDS = 300.0
ENDLESS = 10**6
"""Tokens that a stream asks for."""


def measure(quick: bool) -> Part:
    """Both faces, each as threads and as a process."""
    streams, steps = (64, 5) if quick else (STREAMS, STEPS)
    measures, details = [], {}
    for face in ("http", "grpc"):
        for processes in (0, 1):
            arguments = ["--face", face, "--processes", str(processes)]
            arguments += ["--streams", str(streams), "--steps", str(steps)]
            found = run_worker(Worker("jaxserve.bench.streams", arguments), SECONDS)
            name = f"{face}, {'a process' if processes else 'threads'}"
            details[name] = found
            step_loop, others = found["step_loop_ms"], found["other_threads_ms"]
            measures.append(Measure(f"{name}: step loop, emitting", step_loop, "ms/step"))
            measures.append(Measure(f"{name}: other threads", others, "ms/step"))
    notes = [f"{streams} streams of one token per step, CPU time of the engine's process."]
    return Part("streams", "open streams and the engine's interpreter", measures, notes, details)


# ------------------------------------------------------------------------ the engine's process


def _serve(face: str, processes: int, streams: int, steps: int) -> dict[str, Any]:
    server = Server(grpc_port=0, http_port=0, processes=processes)
    faces: Faces = LocalFaces(str(DEMO), server, False)
    if processes:
        faces = FaceProcesses(str(DEMO), server, False, "text")
    engine = PacedEngine(Tokenizer.from_folder(DEMO), STEP_SECONDS)
    addresses = faces.start()
    faces.open(engine)
    command = [sys.executable, "-m", "jaxserve.bench.streams", "--client", addresses[face]]
    client = subprocess.Popen([*command, "--face", face, "--streams", str(streams)])
    try:
        begin = time.monotonic()
        while engine.running < streams:
            if time.monotonic() - begin > OPEN_SECONDS or client.poll() is not None:
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
        client.kill()
        client.wait()
        if processes:
            faces.stop(0)


def _wait_for_steps(engine: PacedEngine, steps: int) -> None:
    end = len(engine.emitting) + steps
    while len(engine.emitting) < end:
        time.sleep(STEP_SECONDS / 4)


def _cpu_seconds(engine: PacedEngine) -> float:
    """Of all threads but the step loop's."""
    assert engine.thread.ident is not None
    step_loop = time.clock_gettime(time.pthread_getcpuclockid(engine.thread.ident))
    return time.process_time() - step_loop


# ------------------------------------------------------------------------ the clients' process


async def _read(address: str, face: str, streams: int) -> None:
    if face == "http":
        client = Client(address)
        body = {"prompt": [5, 6, 7], "max_tokens": ENDLESS, "stream": True}
        encoded = msgspec.json.encode(body)
        await asyncio.gather(*(client.complete(encoded) for _ in range(streams)))
        return
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), max_tokens=ENDLESS)

    async def one(channel: grpc.aio.Channel) -> None:
        async for _ in InferenceStub(channel).GenerateStream(request):
            pass

    await asyncio.gather(*(one(channels[n % CHANNELS]) for n in range(streams)))


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--face", "--result", "--client"):
        parser.add_argument(name)
    for name in ("--processes", "--streams", "--steps"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    if options.client:
        asyncio.run(_read(options.client, options.face, options.streams))
        return
    with writing(options.result) as result:
        result |= _serve(options.face, options.processes, options.streams, options.steps)
    sys.stdout.flush()
    os._exit(0)  # servers on threads would take seconds to close thousands of streams


if __name__ == "__main__":
    _main()
