"""(b) of `bench fleet`: what long prefills do to the time between tokens of running decodes.

One process plays a prefill worker and one a domain, each on a core of its own, with random weights.
A few sequences decode in the domain, in turn

- alone;
- while long prompts come, one for so many tokens, and the other process prefills them and hands
  them over;
- while the same prompts come to the domain itself, which prefills them in chunks beside its
  decodes, as a colocated worker does.

Run by `fleet.py` as workers: `python -m jaxserve.bench.interference --role ROLE --folder F …`.
"""

import argparse
import itertools
import random
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.bench.hand_off import start_worker, wait_for, write_whole
from jaxserve.bench.random_model import deployment_of
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Worker, run_workers, writing
from jaxserve.config.model import FFN, MFA, ModelConfig, Rope, decoder_layers
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.link.pages.source import PagesSource

MODULE = "jaxserve.bench.interference"
LIMIT = 1.3
DECODES, SLOTS = 4, 8
PROMPT_TOKENS = 769
"""Of a long prompt, 48 pages and a token."""
CHUNK_TOKENS = 64
"""Of a long prompt in one step beside decodes, where they are prefilled together."""
TOKENS_BETWEEN = 100
"""Tokens of a decoding sequence for every long prompt: the loads are the same on any machine."""
PAGE_SIZE, MAX_LENGTH = 16, 1088
LOADS = ("none", "handed over", "chunked")
_SECONDS = 1200.0
_LENGTH = struct.Struct("<I")


def measure(quick: bool) -> Part:
    """Runs both workers and compares; starts no JAX in this process."""
    rounds, tokens = (1, 60) if quick else (4, 400)
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        arguments = ["--folder", folder, "--rounds", str(rounds), "--tokens", str(tokens)]
        workers = [
            Worker(MODULE, [*arguments, "--role", role], {}, core)
            for core, role in enumerate(("prefill", "domain"))
        ]
        _, found = run_workers(workers, _SECONDS)
    gaps, prompts = found["gaps"], found["prompts"]
    p99 = {load: _percentile(gaps[load], 0.99) for load in LOADS}
    measures = []
    for load, name in zip(LOADS, ("no prefills", "handed over", "chunked here"), strict=True):
        middle = statistics.median(gaps[load])
        measures += [
            Measure(f"time between tokens, {name}: median", middle * 1e3, "ms"),
            Measure("  p99", p99[load] * 1e3, "ms"),
        ]
    measures += [
        Measure("p99 handed over ÷ no prefills", p99["handed over"] / p99["none"], "", LIMIT),
        Measure("p99 chunked here ÷ no prefills", p99["chunked"] / p99["none"]),
    ]
    notes = [
        f"{DECODES} sequences decode; a prompt of {PROMPT_TOKENS} tokens comes every "
        f"{TOKENS_BETWEEN} of their steps, and is prefilled in chunks of {CHUNK_TOKENS} where "
        f"there are decodes. {rounds} rounds of the three in turn; prompts that came: "
        f"{prompts['handed over']} and {prompts['chunked']}.",
        "Processes pinned: the prefill worker to one core, the domain to the other.",
    ]
    title = "(b) time between tokens beside long prefills"
    return Part("interference", title, measures, notes, found)


def open_worker(role: str) -> Engine:
    """An engine with its end of the link; the weights do not depend on the role."""
    attention = MFA(q_heads=2, kv_heads=1, head_dim=256, latent=128, rope=Rope(theta=1e4))
    config = ModelConfig(
        vocab=256,
        d_model=512,
        decoder=decoder_layers(6, attention, FFN(d_ff=2048)),
        norm_epsilon=1e-5,
        max_positions=MAX_LENGTH,
    )
    deployment = deployment_of(
        slots=SLOTS,
        max_length=MAX_LENGTH,
        page_size=PAGE_SIZE,
        mode="colocated",
        **{
            "scheduler.token_budget": 128,
            "scheduler.token_buckets": [SLOTS, CHUNK_TOKENS + SLOTS, 128],
            "scheduler.prefill_tokens": CHUNK_TOKENS,
            "pages.step_tokens": 128,
        },
    )
    return start_worker(deployment, config, role)


def prefill(folder: Path) -> None:
    """The prefill worker: holds the prompts that come over a socket until it is closed."""
    engine = open_worker("prefill")
    with socket.create_server(("127.0.0.1", 0)) as server:
        write_whole(folder / "port", str(server.getsockname()[1]).encode())
        server.settimeout(_SECONDS)
        sock, _ = server.accept()
    with sock:
        sending = threading.Lock()
        for message in _messages(sock):
            number, prompt = msgspec.msgpack.decode(message, type=tuple[int, list[int]])

            def held(news: object, number: int = number) -> None:
                source = news if isinstance(news, PagesSource) else None
                with sending:
                    _send(sock, (number, source))

            engine.prefill(prompt, held)
    engine.close()


def decode(folder: Path, rounds: int, tokens: int) -> dict[str, Any]:
    """The domain: seconds between tokens of the running decodes by load, and prompts that came."""
    engine = open_worker("domain")
    wait_for(folder / "port")
    port = int((folder / "port").read_text())
    gaps: dict[str, list[float]] = {load: [] for load in LOADS}
    prompts = dict.fromkeys(LOADS, 0)
    draw = random.Random(0)
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as sock:
        long = _LongPrompts(engine, sock, draw)
        for number in range(rounds + 1):
            for load in LOADS:
                turns: list[str] = []

                def on_turn(load: str = load, turns: list[str] = turns) -> None:
                    if load != "none":
                        turns.append(load)
                        long.submit(load == "handed over")

                seen = _decodes(engine, draw, tokens if number else 20, on_turn)
                long.wait(len(turns))
                if number:  # the first one connects, and faults memory in
                    gaps[load] += seen
                    prompts[load] += len(turns)
    engine.close()
    return {"gaps": gaps, "prompts": prompts}


class _LongPrompts:
    """Prompts that are submitted beside the decodes, by any thread."""

    def __init__(self, engine: Engine, sock: socket.socket, draw: random.Random):
        self._engine, self._sock, self._draw = engine, sock, draw
        self._asked: list[list[int]] = []
        self._answered = threading.Semaphore(0)
        threading.Thread(target=self._submit_held, daemon=True).start()

    def submit(self, hand_over: bool) -> None:
        """Begins another one."""
        prompt = [self._draw.randrange(256) for _ in range(PROMPT_TOKENS)]
        if hand_over:
            self._asked.append(prompt)
            _send(self._sock, (len(self._asked) - 1, prompt))
        else:
            self._submit(prompt, None)

    def wait(self, count: int) -> None:
        """Until so many more have been answered."""
        for _ in range(count):
            if not self._answered.acquire(timeout=_SECONDS):
                raise BenchError(f"a long prompt was not answered within {_SECONDS:g} s")

    def _submit_held(self) -> None:
        for message in _messages(self._sock):
            number, source = msgspec.msgpack.decode(message, type=tuple[int, PagesSource | None])
            self._submit(self._asked[number], source)

    def _submit(self, prompt: list[int], source: PagesSource | None) -> None:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

        def on_output(output: TokenOutput) -> None:
            if output.finish_reason is not None:
                self._answered.release()

        self._engine.submit(prompt, params, on_output, source=source)


def _decodes(
    engine: Engine, draw: random.Random, tokens: int, on_turn: Callable[[], None]
) -> list[float]:
    """Runs the sequences and returns the seconds between their tokens; every `TOKENS_BETWEEN`
    tokens of the first one it calls `on_turn`."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    times: list[list[float]] = [[] for _ in range(DECODES)]
    ended = threading.Semaphore(0)
    for number, seen in enumerate(times):

        def on_output(output: TokenOutput, number: int = number, seen: Any = seen) -> None:
            seen.append(time.perf_counter())
            if number == 0 and len(seen) % TOKENS_BETWEEN == 10:
                on_turn()
            if output.finish_reason is not None:
                ended.release()

        engine.submit([draw.randrange(256) for _ in range(PAGE_SIZE)], params, on_output)
    for _ in times:
        if not ended.acquire(timeout=_SECONDS):
            raise BenchError(f"a sequence did not end within {_SECONDS:g} s")
    return [after - before for seen in times for before, after in itertools.pairwise(seen)]


def _send(sock: socket.socket, what: object) -> None:
    data = msgspec.msgpack.encode(what)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _messages(sock: socket.socket) -> Iterator[bytes]:
    """Until the other end closes."""
    with sock.makefile("rb") as stream:
        while header := stream.read(_LENGTH.size):
            yield stream.read(*_LENGTH.unpack(header))


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    """One of the workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["prefill", "domain"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        if options.role == "prefill":
            prefill(options.folder)
        else:
            result |= decode(options.folder, options.rounds, options.tokens)


if __name__ == "__main__":
    main()
