"""Hand-off of KV pages between two processes, next to a plain copy of the same bytes by a socket.

One process plays a prefill worker and one a domain, with random weights and an engine each, on a
core of their own. The prefill worker holds the pages of some prompts; the domain asks for one after
the other. In turn it reads as many bytes from a socket of the prefill worker into memory. What a
hand-off adds to the time to the first token is measured against the same request once its prefix is
in the domain's own cache.

Run by `fleet.py` as workers: `python -m jaxserve.bench.hand_off --role ROLE --folder F --result F`.
"""

import argparse
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.bench.random_leaves import open_random
from jaxserve.bench.random_model import deployment_of
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Worker, run_workers, writing
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, MFA, ModelConfig, Rope, decoder_layers
from jaxserve.engine.engine import Engine
from jaxserve.engine.hand_off import LinkedHandOffs
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.engine.runtime import warm_up
from jaxserve.fleet.assembly import Options, build_runtime, make_engine
from jaxserve.fleet.pages_link import fetch_pages, serve_pages
from jaxserve.link.pages.source import PagesSource

LAYERS, HEAD_DIM = 8, 1024
TOKEN_BYTES = LAYERS * 2 * HEAD_DIM * 4
"""64 KiB: keys and values in FP32."""
SIZES = {"31 MB": 480, "64 MiB": 1024}
"""Tokens of a hand-off: a thousand tokens of 31 KB, and a long request."""
PAGE_SIZE, MAX_LENGTH = 16, 1088
RATIO, TTFT_FACTOR, TTFT_MS = 0.6, 2.0, 5.0
_SECONDS = 600.0
_SECRET = "bench"
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def measure(quick: bool) -> Part:
    """Runs both workers and puts their numbers into words; starts no JAX in this process."""
    rounds = 2 if quick else 12
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        arguments = ["--folder", folder, "--rounds", str(rounds)]
        workers = [
            Worker("jaxserve.bench.hand_off", [*arguments, "--role", role], {}, core)
            for core, role in enumerate(("prefill", "domain"))
        ]
        _, found = run_workers(workers, _SECONDS)
    measures = []
    for name, row in found.items():
        copy, pulled, added = (statistics.median(row[key]) for key in ("copy", "hand_off", "added"))
        size = row["bytes"]
        measures += [
            Measure(f"{name}: plain copy", size / copy / 1e9, "GB/s"),
            Measure("  hand-off", size / pulled / 1e9, "GB/s"),
            Measure("  hand-off ÷ copy", copy / pulled, "", RATIO, "more"),
            Measure("  added to the time to the first token", added * 1e3, "ms"),
            Measure(
                "  of it beyond twice the copy",
                (added - TTFT_FACTOR * copy) * 1e3,
                "ms",
                TTFT_MS,
            ),
        ]
    notes = [
        f"Medians of {rounds} hand-offs; a core a process. Bytes are those of the tokens; pieces "
        "are padded. The hand-off is over when the last piece is at the domain; the time to the "
        "first token has the domain's writing of its pages, too.",
    ]
    return Part("hand-off", "hand-off of KV pages", measures, notes, found)


def open_worker(role: str) -> Engine:
    """An engine with one end of the link; the weights do not depend on the role."""
    attention = MFA(q_heads=1, kv_heads=1, head_dim=HEAD_DIM, latent=32, rope=Rope(theta=1e4))
    config = ModelConfig(
        vocab=256,
        d_model=64,
        decoder=decoder_layers(LAYERS, attention, FFN(d_ff=64)),
        norm_epsilon=1e-5,
        max_positions=MAX_LENGTH,
    )
    deployment = deployment_of(
        slots=2,
        max_length=MAX_LENGTH,
        page_size=PAGE_SIZE,
        mode="colocated",
        **{
            "cache.pages": 40 * MAX_LENGTH // PAGE_SIZE if role == "prefill" else 1024,
            "scheduler.token_budget": 128,
            "scheduler.token_buckets": [2, 128],
            "scheduler.page_buckets": [MAX_LENGTH // PAGE_SIZE],
            "pages.lease_seconds": _SECONDS,
        },
    )
    return start_worker(deployment, config, role)


def start_worker(deployment: Deployment, config: ModelConfig, role: str) -> Engine:
    """An engine with random weights and one end of the pages link: of a prefill worker or of a
    domain."""
    runtime = build_runtime(
        deployment, Options(config=config, names=step3_names(config), weights=open_random)
    )
    warm_up(runtime)
    engine = make_engine(runtime, eos_token_ids=frozenset())
    if role == "prefill":
        serve_pages(engine, _SECRET)
    else:
        fetch_pages(engine, _SECRET)
    engine.start()
    return engine


def prompts(rounds: int) -> dict[str, list[list[int]]]:
    """Of every size, one a round and one more: a page is never held of the last token."""
    draw = random.Random(0)
    return {
        name: [[draw.randrange(256) for _ in range(tokens + 1)] for _ in range(rounds + 1)]
        for name, tokens in SIZES.items()
    }


def hold(folder: Path, rounds: int) -> None:
    """The prefill worker: holds everything, then answers until the domain is done."""
    engine = open_worker("prefill")
    held: dict[str, list[PagesSource]] = {}
    for name, of_size in prompts(rounds).items():
        held[name] = [_held(engine, prompt) for prompt in of_size]
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve_copies, args=(server,), daemon=True).start()
        write_whole(folder / "held", msgspec.msgpack.encode([server.getsockname()[1], held]))
        wait_for(folder / "done")
    engine.close()


def fetch(folder: Path, rounds: int) -> dict[str, Any]:
    """The domain: seconds of every copy, hand-off and first token, by size."""
    engine = open_worker("domain")
    wait_for(folder / "held")
    port, held = msgspec.msgpack.decode(
        (folder / "held").read_bytes(), type=tuple[int, dict[str, list[PagesSource]]]
    )
    found: dict[str, Any] = {}
    for name, of_size in prompts(rounds).items():
        rows: dict[str, list[float]] = {"copy": [], "hand_off": [], "added": []}
        size = SIZES[name] * TOKEN_BYTES
        for number, (prompt, source) in enumerate(zip(of_size, held[name], strict=True)):
            copied = _copied(port, size)
            waited = _counters(engine)
            cold = _first_token(engine, prompt, source)
            pulled = _counters(engine) - waited
            warm = _first_token(engine, prompt, None)
            if number:  # the first one connects
                rows["copy"].append(copied)
                rows["hand_off"].append(pulled)
                rows["added"].append(cold - warm)
        found[name] = rows | {"bytes": size}
    write_whole(folder / "done", b"")
    engine.close()
    return found


def _counters(engine: Engine) -> float:
    assert isinstance(engine.hand_offs, LinkedHandOffs)
    return engine.hand_offs.domains[0].client.counters.wait_seconds


def _first_token(engine: Engine, prompt: list[int], source: PagesSource | None) -> float:
    ended = threading.Event()
    outputs: list[TokenOutput] = []

    def on_output(output: TokenOutput) -> None:
        outputs.append(output)
        ended.set()

    start = time.perf_counter()
    engine.submit(prompt, ONE, on_output, source=source)
    _within(ended.wait)
    seconds = time.perf_counter() - start
    if outputs[0].finish_reason != "length":
        raise BenchError(f"a request ended with {outputs[0]}")
    return seconds


def _held(engine: Engine, prompt: list[int]) -> PagesSource:
    there = threading.Event()
    news: list[Any] = []

    def on_held(what: Any) -> None:
        news.append(what)
        there.set()

    engine.prefill(prompt, on_held)
    _within(there.wait)
    if not isinstance(news[0], PagesSource):
        raise BenchError(f"a prompt is not held: {news[0]}")
    return news[0]


def _copied(port: int, size: int) -> float:
    """Seconds in which so many bytes come from the other process, from asking to the last one."""
    buffer = memoryview(np.zeros(size, np.uint8))
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as sock:
        start = time.perf_counter()
        sock.sendall(size.to_bytes(8, "little"))
        got = 0
        while got < size:
            got += sock.recv_into(buffer[got:])
        return time.perf_counter() - start


def _serve_copies(server: socket.socket) -> None:
    data = np.zeros(max(SIZES.values()) * TOKEN_BYTES, np.uint8)
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return
        with sock:
            size = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little")
            sock.sendall(memoryview(data)[:size])


def write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)


def wait_for(path: Path) -> None:
    """Until the other worker has written it."""
    end = time.monotonic() + _SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise BenchError(f"{path.name}: not there after {_SECONDS:g} s")
        time.sleep(0.01)


def _within(wait: Callable[[float], bool]) -> None:
    if not wait(_SECONDS):
        raise BenchError(f"nothing within {_SECONDS:g} s")


def main() -> None:
    """One of the workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["prefill", "domain"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        if options.role == "prefill":
            hold(options.folder, options.rounds)
        else:
            result |= fetch(options.folder, options.rounds)


if __name__ == "__main__":
    main()
