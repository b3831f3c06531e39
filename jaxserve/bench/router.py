"""`python -m jaxserve.bench router`: the cost of one router in front of a thousand workers.

The router of this process has 500 prefill workers, stubs that compute prompts at once, and 500
domains, stubs that give every request a token each step, all in another process with a port each.
Requests come as from its faces, without tokenising and text. Measured is this process's CPU time: a
request of one token, a token of longer ones, the workers while nothing happens.
"""

import random
import resource
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Helper, Task, say, wait_until
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.request_frames import Frame, Outputs
from jaxserve.fleet.router import RouterEngine
from jaxserve.fleet.worker_port import RouterConnection
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import Channel, accept
from jaxserve.link.session.messages import encode
from jaxserve.observe.load import EngineLoad

MODEL = "stub"
TOKEN = "bench"
STEP_SECONDS = 0.05
STATE_SECONDS = 0.5
VOCAB = 50_000


def serve(workers: int) -> None:
    """In a helper: says the ports of the workers, and serves until standard input ends."""
    stubs = Stubs(workers)
    say(stubs.ports)
    threading.Thread(target=stubs.run, daemon=True).start()
    sys.stdin.read()


class Stubs:
    """All workers, on one thread."""

    def __init__(self, workers: int):
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._selector = selectors.DefaultSelector()
        self._pool = ThreadPoolExecutor(8)
        self._there: list[_Stub] = []
        for number, listener in enumerate(self._listeners):
            self._selector.register(listener, selectors.EVENT_READ, number)

    def run(self) -> None:
        """Answers for ever."""
        next_step = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, next_step - time.monotonic())):
                if isinstance(key.data, int):
                    sock, _ = self._listeners[key.data].accept()
                    self._pool.submit(self._welcome, key.data, sock)
                elif not key.data.read():
                    self._selector.unregister(key.fileobj)
                    self._there.remove(key.data)
            if (now := time.monotonic()) >= next_step:
                for stub in self._there:
                    stub.step(now)
                next_step = now + STEP_SECONDS

    def _welcome(self, number: int, sock: socket.socket) -> None:
        channel = accept(sock, TOKEN, 30.0, frames.WORKER_FRAME_BYTES)
        channel.receive()
        prefill = number < len(self.ports) // 2
        hello = frames.hello_of(f"stub {number}", MODEL)
        channel.send(encode(frames.Welcome(hello, facts_of(prefill))))
        stub = _Stub(channel, number)
        self._there.append(stub)
        self._selector.register(channel.descriptor, selectors.EVENT_READ, stub)


class _Stub:
    """One connected worker."""

    def __init__(self, channel: Channel, number: int):
        self._channel, self._number = channel, number
        self._left: dict[str, tuple[int, int]] = {}
        self._state_at = 0.0

    def read(self) -> bool:
        """Handles the frames that arrived; False at the end of the connection."""
        try:
            bodies = self._channel.take()
        except (EOFError, OSError):
            return False
        answers: list[Frame] = []
        for body in bodies:
            match RouterConnection.decode(body):
                case frames.Prefill(request_id=request_id, prompt=prompt):
                    source = PagesSource("stub", request_id, len(prompt) // 4, "digest")
                    answers.append(frames.Held(request_id, source))
                case frames.Submit(request_id=request_id, params=params):
                    self._left[request_id] = params.max_tokens, 0
        self._send(answers)
        return True

    def step(self, now: float) -> None:
        """Sends a token for every request, and the state now and then."""
        outputs = []
        for request_id, (left, offset) in list(self._left.items()):
            outputs.append(
                TokenOutput(
                    request_id=request_id,
                    token_ids=[left],
                    finish_reason=None if left > 1 else "length",
                    offset=offset,
                )
            )
            if left > 1:
                self._left[request_id] = left - 1, offset + 1
            else:
                del self._left[request_id]
        found: list[Frame] = [Outputs(outputs)] if outputs else []
        if now >= self._state_at:
            # Not all at the same time.
            self._state_at = now + (self._number % 10 / 20 if not self._state_at else STATE_SECONDS)
            load = EngineLoad(running=len(self._left), kv_usage=[0.1] * 8)
            found.append(frames.State("ready", 0.0, load))
        self._send(found)

    def _send(self, found: list[Frame]) -> None:
        for frame in found:
            self._channel.send(encode(frame))


def facts_of(prefill: bool) -> frames.WorkerFacts:
    """Describes a worker of eight DP groups."""
    return frames.WorkerFacts(
        role="prefill" if prefill else "domain",
        slots=1024,
        groups=8,
        pages=10_000,
        page_size=64,
        max_length=131_072,
        vocab=VOCAB,
        eos_token_ids=[],
        info={"model": "stub", "vocab_size": VOCAB, "max_length": 131_072},
    )


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
    with Helper(Task(serve, {"workers": workers}).command(), SECONDS) as stubs:
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
    wait_until(
        lambda: all(one.status == "ready" for one in router.load().workers), SECONDS, "workers"
    )
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
