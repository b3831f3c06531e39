"""`python -m jaxserve.bench router`: the cost of one router in front of a thousand workers.

The router of this process has 500 prefill workers and 500 domains, stubs in another process
(`router_stubs.py`). Requests come as from its faces, without tokenising and text. Measured is this
process's CPU time: for a request with requests of one token, for a token with longer ones, for the
workers while nothing happens.
"""

import random
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.router_stubs import MODEL, TOKEN, VOCAB, serve
from jaxserve.bench.workers import BenchError, Helper, Worker
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.fleet.router import RouterEngine

WORKERS = 1000
REQUESTS = 5000
OPEN = 1000
"""Requests that run at the same time."""
PROMPT, SHARED = 1024, 256
"""Tokens of a prompt, and of its beginning, which is one of a hundred."""
MORE_TOKENS = 32
IDLE_SECONDS = 5.0
SECONDS = 300.0


def measure(quick: bool) -> Iterator[Part]:
    """Starts the stubs and measures the router in this process."""
    workers, requests = (20, 200) if quick else (WORKERS, REQUESTS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Helper(Worker(serve, {"workers": workers}).command(), SECONDS) as stubs:
        yield _measure(deployment_of(stubs.answer()), requests, 0.5 if quick else IDLE_SECONDS)


def deployment_of(ports: list[int]) -> Deployment:
    """Describes a fleet on loopback; the first half of the ports are prefill workers."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    half = len(addresses) // 2
    return load_deployment(
        Path("."),
        {
            "mode": "colocated",
            "domains": len(addresses) - half,
            "prefill.workers": half,
            "fleet.prefill": addresses[:half],
            "fleet.domains": addresses[half:],
            "cluster.heartbeat_seconds": 60.0,
        },
    )


def _measure(deployment: Deployment, requests: int, idle: float) -> Part:
    router = RouterEngine(deployment, TOKEN, MODEL)
    router.start()
    workers = len(deployment.fleet.prefill) + len(deployment.fleet.domains)
    deadline = time.monotonic() + SECONDS
    while any(worker.status != "ready" for worker in router.load().workers):
        if time.monotonic() > deadline:
            raise BenchError(f"workers are missing: {router.connections.absences()}")
        time.sleep(0.1)
    begin = time.process_time()
    time.sleep(idle)
    idle_share = (time.process_time() - begin) / idle
    _run(router, requests // 10, 1)  # warms up
    wall, cpu, submits = _run(router, requests, 1)
    _, more, _ = _run(router, requests, 1 + MORE_TOKENS)
    router.close()
    of_request = (cpu - idle_share * wall) / requests
    of_token = max(0.0, more - cpu) / (requests * MORE_TOKENS)
    measures = [
        Measure(f"{workers} workers, nothing to do", idle_share * 100, "% of a core"),
        Measure("requests of one token", requests / wall, "requests/s"),
        Measure("CPU a request", of_request * 1e3, "ms"),
        Measure("of that, until it is sent to a worker, p50", submits * 1e3, "ms"),
        Measure("CPU a further token", of_token * 1e6, "µs"),
    ]
    notes = [
        f"Prompts of {PROMPT} tokens, {OPEN} requests at a time, a hand-off each; without "
        "tokenising, text and HTTP. The stubs take their part of the machine.",
    ]
    return Part("router", f"one router, {workers} stub workers", measures, notes)


def _run(router: RouterEngine, requests: int, tokens: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds of this process, and the median of those of `submit`."""
    draw = random.Random(tokens)
    shared = [[draw.randrange(VOCAB) for _ in range(SHARED)] for _ in range(100)]
    own = [draw.randrange(VOCAB) for _ in range(8 * PROMPT)]
    prompts = [
        draw.choice(shared) + own[(start := draw.randrange(7 * PROMPT)) : start + PROMPT - SHARED]
        for _ in range(requests)
    ]
    params = SamplingParams(max_tokens=tokens, seed=1)
    room, ended = threading.Semaphore(OPEN), threading.Event()
    left = [requests]
    errors: list[str] = []

    def on_output(output: TokenOutput) -> None:
        if output.finish_reason is not None:
            if output.finish_reason != "length":
                errors.append(output.error or output.finish_reason)
            room.release()
            left[0] -= 1
            if not left[0]:
                ended.set()

    submits = []
    begin, cpu = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        if not room.acquire(timeout=SECONDS):
            raise BenchError("no request ended")
        before = time.thread_time()
        router.submit(prompt, params, on_output, request_id=f"{tokens}-{number}")
        submits.append(time.thread_time() - before)
    if not ended.wait(SECONDS) or errors:
        raise BenchError(f"{left[0]} requests did not end, {errors[:3]}")
    return time.perf_counter() - begin, time.process_time() - cpu, statistics.median(submits)
