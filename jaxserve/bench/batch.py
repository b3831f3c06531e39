"""The same batch over HTTP and through `LLM.generate`: the cost of the server and its clients.

The demo model runs in one process, which also serves; the clients run in another, on the same
cores. Both ways alternate. Run by `front.py`: `python -m jaxserve.bench.batch …`.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from jaxserve.bench.client import Client
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.tokens import CONFIG
from jaxserve.bench.workers import BenchError, Worker, run_worker, writing
from jaxserve.config.load import load_deployment
from jaxserve.engine.request import SamplingParams
from jaxserve.llm import LLM
from jaxserve.server.http.server import HttpServer

SEQUENCES = 32
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 64
LIMIT = 0.9
ROUNDS = 8
_SECONDS = 300.0


def measure(quick: bool) -> Part:
    """Runs the measurement in a process of its own; starts no JAX in this one."""
    deployment = load_deployment(CONFIG)
    arguments = ["--rounds", str(1 if quick else ROUNDS)]
    environment = {"JAX_NUM_CPU_DEVICES": str(deployment.devices)}
    found = run_worker(Worker("jaxserve.bench.batch", arguments, environment), _SECONDS)
    return part_of(found)


def part_of(found: dict[str, list[float]]) -> Part:
    """A report of the seconds of every round."""
    tokens = SEQUENCES * OUTPUT_TOKENS
    direct, over_http = (tokens / min(found[way]) for way in ("generate", "http"))
    ratios = [a / b for a, b in zip(found["generate"], found["http"], strict=True)]
    return Part(
        "batch",
        "The demo model: a batch over HTTP beside LLM.generate",
        [
            Measure("LLM.generate", direct, "tokens/s"),
            Measure("HTTP, streamed", over_http, "tokens/s"),
            Measure("  ÷ LLM.generate", over_http / direct, "", LIMIT, "more"),
            Measure("  ÷ LLM.generate, median of the rounds", statistics.median(ratios)),
        ],
        [
            f"{SEQUENCES} requests together, {PROMPT_TOKENS} prompt tokens and {OUTPUT_TOKENS} "
            f"greedy tokens each; the best of {len(ratios)} rounds, which took turns."
        ],
        dict(found),
    )


def _prompts(number: int, vocab: int) -> list[list[int]]:
    """The prompts of a round; no two rounds share prefixes."""
    draw = random.Random(number)
    return [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(SEQUENCES)]


def _measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of the batch both ways, in the process of the model."""
    found: dict[str, list[float]] = {"generate": [], "http": []}
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(CONFIG) as llm:
        server = HttpServer(port=0)
        address = server.start()
        server.open(llm._generator)  # the one that `generate` uses
        vocab = llm.tokenizer.vocab_size
        try:
            with _clients(address) as batch:
                for number in range(rounds + 1):
                    prompts = _prompts(2 * number, vocab)
                    start = time.perf_counter()
                    llm.generate(prompts, params)
                    direct = time.perf_counter() - start
                    seconds = batch(_prompts(2 * number + 1, vocab))
                    if number:  # the first one warms up
                        found["generate"].append(direct)
                        found["http"].append(seconds)
        finally:
            server.stop(1.0)
    return found


@contextmanager
def _clients(address: str) -> Iterator[Any]:
    """Starts a process that sends batches; yields a function that sends one and returns its
    seconds."""
    command = [sys.executable, "-m", "jaxserve.bench.batch", "--clients", address]
    # In the session of the model's process: schedulers share the cores between sessions.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def batch(prompts: list[list[int]]) -> float:
        stdin.write(msgspec.json.encode(prompts) + b"\n")
        stdin.flush()
        answer = msgspec.json.decode(stdout.readline() or b'"the clients died"')
        if not isinstance(answer, float):
            raise BenchError(f"HTTP: {answer}")
        return answer

    try:
        yield batch
    finally:
        process.kill()
        process.wait()
        stdin.close()
        stdout.close()


async def _batch(client: Client, prompts: list[list[int]]) -> float | str:
    """Seconds until all requests were answered, or the error."""
    fields: dict[str, Any] = {
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    fields["stream_options"] = {"include_usage": True}
    bodies = [msgspec.json.encode({"prompt": prompt, **fields}) for prompt in prompts]
    start = time.perf_counter()
    outcomes = await asyncio.gather(*map(client.complete, bodies))
    seconds = time.perf_counter() - start
    for outcome in outcomes:
        if outcome.error or outcome.tokens != OUTPUT_TOKENS:
            return f"{outcome.tokens} tokens, {outcome.error}"
    return seconds


async def _serve_batches(address: str) -> None:
    """Sends a batch for every line of standard input, and prints the seconds that it took."""
    client = Client(address)
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer = await _batch(client, msgspec.json.decode(line))
        print(msgspec.json.encode(answer).decode(), flush=True)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--result")
    options = parser.parse_args()
    if options.clients is not None:
        asyncio.run(_serve_batches(options.clients))
        return
    with writing(options.result) as result:
        result.update(_measure(options.rounds))


if __name__ == "__main__":
    _main()
