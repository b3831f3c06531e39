"""Workers without a model, a thousand in one process. Started by `router.py`.

Each listens on a port of its own and speaks the protocol of `fleet/worker_frames.py`; the first
half computes prompts at once, the second gives every request a token each step.
"""

import resource
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from jaxserve.bench.workers import say
from jaxserve.engine.request import TokenOutput
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.request_frames import Frame, Outputs
from jaxserve.fleet.worker_port import RouterConnection
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import Framing, accept
from jaxserve.link.session.messages import encode
from jaxserve.observe.load import EngineLoad

MODEL = "stub"
TOKEN = "bench"
STEP_SECONDS = 0.05
STATE_SECONDS = 0.5
VOCAB = 50_000


def serve(workers: int) -> None:
    """In a helper: says the ports of the workers, and serves until standard input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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
        connection, framing, _ = channel.detach()
        connection.setblocking(True)
        stub = _Stub(connection, framing, number)
        self._there.append(stub)
        self._selector.register(connection, selectors.EVENT_READ, stub)


class _Stub:
    """One connected worker."""

    def __init__(self, sock: socket.socket, framing: Framing, number: int):
        self._socket, self._framing, self._number = sock, framing, number
        self._received = bytearray()
        self._left: dict[str, tuple[int, int]] = {}
        self._state_at = 0.0

    def read(self) -> bool:
        """Handles the frames that arrived; False at the end of the connection."""
        try:
            data = self._socket.recv(1 << 18)
        except OSError:
            return False
        self._received += data
        answers: list[Frame] = []
        for body in self._framing.take(self._received):
            match RouterConnection.decode(body):
                case frames.Prefill(request_id=request_id, prompt=prompt):
                    source = PagesSource("stub", request_id, len(prompt) // 4, "digest")
                    answers.append(frames.Held(request_id, source))
                case frames.Submit(request_id=request_id, params=params):
                    self._left[request_id] = params.max_tokens, 0
        self._send(answers)
        return bool(data)

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
        if found:
            data = b"".join(self._framing.pack(encode(frame)) for frame in found)
            self._socket.sendall(data)


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
