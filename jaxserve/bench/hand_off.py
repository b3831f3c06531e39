"""Hand-off of KV pages between two processes, next to a plain copy of the same bytes by a socket.

Part of `bench fleet`. One process plays a prefill worker and one a domain, with random weights and
an engine each, on a core of their own. The prefill worker prefills one prompt after the other; the
domain fetches its pages. In turn it reads as many bytes from a socket of the prefill worker into
memory. What a hand-off adds to the time to the first token is measured against the same request
once its prefix is in the domain's own cache. Pools hold two prompts and the copies have one buffer,
so that after the first rounds both are written into memory that has been written before, as in
steady use; the first write of a page of memory costs more than its copy.
"""

import os
import queue
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from jaxserve.bench.random_model import deployment_of, model_config, random_engine
from jaxserve.bench.report import Measure, Part, wall_seconds
from jaxserve.bench.requests import greedy, random_prompts, run_requests
from jaxserve.bench.workers import BenchError, Helper, Task, asked, run_worker, say, two_cores
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.model import FFN
from jaxserve.engine.engine import Engine
from jaxserve.engine.hand_off import LinkedHandOffs
from jaxserve.fleet.domain_end import fetch_pages
from jaxserve.fleet.prefill_end import serve_pages
from jaxserve.link.pages.source import PagesSource

LAYERS, HEAD_DIM = 8, 1024
TOKEN_BYTES = LAYERS * 2 * HEAD_DIM * 4
"""64 KiB: keys and values in FP32."""
SIZES = {"31 MB": 480, "64 MiB": 1024}
"""Tokens of a hand-off: a thousand tokens of 31 KB, and a long request."""
PAGE_SIZE, MAX_LENGTH = 16, 1088
RATIO, TTFT_MS = 0.7, 5.0
_SECONDS = 600.0
_SECRET = "bench"
KEYS = ("copy", "hand_off", "added", "sends", "reads", "gives", "takes")
"""Seconds of a round: the plain copy, the hand-off, and its addition to the time to first token;
then CPU seconds: the copy at the prefill worker and at the domain, and the hand-off at both. The
domain's last figure contains the writing of the pages; the first token is subtracted."""
VOCAB = 64


def measure(quick: bool) -> Iterator[Part]:
    """Runs both processes; starts no JAX in this one."""
    rounds = 2 if quick else 12
    cores = two_cores("hand-off")
    arguments = {"rounds": rounds, "prefill_core": cores[0]}
    found = run_worker(Task(measure_sizes, arguments, core=cores[1]), _SECONDS)
    measures = []
    for name, row in found.items():
        copy, pulled, added, *cpu = (statistics.median(row[key]) for key in KEYS)
        size = row["bytes"]
        sends, reads, gives, takes = (seconds / size * 2**30 for seconds in cpu)
        measures += [
            Measure(f"{name}: plain copy", size / copy / 1e9, "GB/s"),
            Measure("  hand-off", size / pulled / 1e9, "GB/s"),
            Measure("  hand-off ÷ copy", copy / pulled, "", RATIO, "more"),
            Measure("  added to the time to the first token", added * 1e3, "ms"),
            Measure("  of it beyond twice the copy", (added - 2 * copy) * 1e3, "ms", TTFT_MS),
            Measure("  CPU of the prefill worker a GiB", gives, "s"),
            Measure("    of a plain copy's sender", sends, "s"),
            Measure("  CPU of the domain a GiB", takes, "s"),
            Measure("    of a plain copy's receiver", reads, "s"),
        ]
    notes = [
        f"Medians of {rounds} hand-offs; a core a process. Bytes are those of the tokens; pieces "
        "are padded. The hand-off is over when the last piece is at the domain; the time to the "
        "first token has the domain's writing of its pages, too.",
    ]
    yield Part("hand-off", "hand-off of KV pages", measures, notes, found)


def open_worker(role: str) -> Engine:
    """Starts a colocated engine with one end of the pages link: that of a prefill worker, or that
    of a domain. The random weights do not depend on the role."""
    ffn = FFN(d_ff=64)
    config = model_config(LAYERS, (1, HEAD_DIM, 32), ffn, d_model=64, positions=MAX_LENGTH)
    deployment = deployment_of(
        slots=2,
        max_length=MAX_LENGTH,
        page_size=PAGE_SIZE,
        mode="colocated",
        **{
            "cache.pages": 2 * MAX_LENGTH // PAGE_SIZE,
            "scheduler.token_budget": 128,
            "scheduler.token_buckets": [2, 128],
            "scheduler.page_buckets": [MAX_LENGTH // PAGE_SIZE],
            "pages.lease_seconds": _SECONDS,
        },
    )
    engine = random_engine(deployment, config, step3_names(config))
    (serve_pages if role == "prefill" else fetch_pages)(engine, _SECRET)
    engine.start()
    return engine


def prefill(core: int) -> None:
    """Plays the prefill worker. Says the port at which it serves plain copies. Then computes and
    holds the pages of every prompt that is asked, and answers with their source; a question without
    a prompt gets the CPU seconds of the process so far."""
    os.sched_setaffinity(0, {core})
    engine = open_worker("prefill")
    held: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve_copies, args=(server,), daemon=True).start()
        say(server.getsockname()[1])
        for prompt in asked():
            if prompt is None:
                say(time.process_time())
                continue
            engine.prefill(prompt, held.put)
            source = held.get(timeout=_SECONDS)
            say(source if isinstance(source, PagesSource) else None)


def measure_sizes(rounds: int, prefill_core: int) -> dict[str, Any]:
    """The domain: seconds of every copy, hand-off and first token, by size.

    Raises:
      BenchError: the prefill worker does not hold the pages of a prompt.
    """
    found: dict[str, Any] = {}
    worker = Task(prefill, {"core": prefill_core})
    with Helper(worker.command(), _SECONDS) as helper:
        engine, draw = open_worker("domain"), random.Random(0)
        port = helper.answer()
        buffer = memoryview(np.zeros(max(SIZES.values()) * TOKEN_BYTES, np.uint8))

        def used() -> tuple[float, float]:
            return helper.ask(None), time.process_time()

        for name, tokens in SIZES.items():
            rows: dict[str, list[float]] = {key: [] for key in KEYS}
            # The last token's page is never held, so each prompt has one token more.
            for number, prompt in enumerate(random_prompts(draw, rounds + 1, tokens + 1, VOCAB)):
                source = msgspec.convert(helper.ask(prompt), PagesSource | None)
                if source is None:
                    raise BenchError("a prompt is not held")
                cpu = [used()]
                copied = _copied(port, buffer[: tokens * TOKEN_BYTES])
                cpu.append(used())
                waited = _waited(engine)
                cold = run_requests(engine, [prompt], greedy(1), source).seconds
                pulled = _waited(engine) - waited
                cpu.append(used())
                warm = run_requests(engine, [prompt], greedy(1)).seconds
                cpu.append(used())
                (sends, reads), (gives, takes), (_, own) = np.diff(cpu, axis=0).tolist()
                times = copied, pulled, cold - warm, sends, reads, gives, takes - own
                if number:  # the first one connects
                    for key, seconds in zip(KEYS, times, strict=True):
                        rows[key].append(seconds)
            found[name] = rows | {"bytes": tokens * TOKEN_BYTES}
        engine.close()
    return found


def _waited(engine: Engine) -> float:
    assert isinstance(engine.hand_offs, LinkedHandOffs)
    return engine.hand_offs.domains[0].client.counters.wait_seconds


def _copied(port: int, buffer: memoryview) -> float:
    """Seconds from asking the other process for as many bytes until the last one is here."""
    size = len(buffer)
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as sock:

        def copy() -> None:
            sock.sendall(size.to_bytes(8, "little"))
            got = 0
            while got < size:
                got += sock.recv_into(buffer[got:])

        return wall_seconds(copy)


def _serve_copies(server: socket.socket) -> None:
    data = np.zeros(max(SIZES.values()) * TOKEN_BYTES, np.uint8)
    while True:
        sock, _ = server.accept()
        with sock:
            size = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little")
            sock.sendall(memoryview(data)[:size])
