"""The same batch over HTTP and through `LLM.generate`: the cost of the server and its clients.

Part of `bench front`. The demo model runs in one process, which also serves; the clients run in
another, on the same cores. Both ways take turns.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator

from jaxserve.bench.client import Client, completion_body
from jaxserve.bench.report import Measure, Part, median_ratio
from jaxserve.bench.requests import DEMO, greedy, random_prompts
from jaxserve.bench.timing import take_turns, wall_seconds
from jaxserve.bench.workers import BenchError, Helper, Worker, asked, run_worker, say
from jaxserve.config.load import load_deployment
from jaxserve.llm import LLM
from jaxserve.server.http.server import HttpServer

SEQUENCES = 32
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 64
LIMIT = 0.9
ROUNDS = 8
_SECONDS = 300.0


def measure(quick: bool) -> Iterator[Part]:
    """Runs the measurement in a process of its own; starts no JAX in this one."""
    devices = load_deployment(DEMO).devices
    worker = Worker(measure_ways, {"rounds": 1 if quick else ROUNDS}, devices)
    yield part_of(run_worker(worker, _SECONDS))


def part_of(found: dict[str, list[float]]) -> Part:
    """Builds the report of the seconds of every round."""
    tokens = SEQUENCES * OUTPUT_TOKENS
    direct, over_http = (tokens / min(found[way]) for way in ("generate", "http"))
    return Part(
        "batch",
        "The demo model: a batch over HTTP beside LLM.generate",
        [
            Measure("LLM.generate", direct, "tokens/s"),
            Measure("HTTP, streamed", over_http, "tokens/s"),
            Measure("  ÷ LLM.generate", over_http / direct, "", LIMIT, "more"),
            Measure(
                "  ÷ LLM.generate, median of the rounds",
                median_ratio(found["generate"], found["http"]),
            ),
        ],
        [
            f"{SEQUENCES} requests together, {PROMPT_TOKENS} prompt tokens and {OUTPUT_TOKENS} "
            f"greedy tokens each; the best of {len(found['http'])} rounds, which took turns."
        ],
        dict(found),
    )


def measure_ways(rounds: int) -> dict[str, list[float]]:
    """Seconds of the batch both ways, in the process of the model."""
    with LLM(DEMO) as llm:
        server = HttpServer(port=0)
        clients = Worker(send_batches, {"address": server.start()})
        server.open(llm._generator)  # the one that `generate` uses
        numbers, vocab = itertools.count(), llm.tokenizer.vocab_size

        def prompts() -> list[list[int]]:
            """Draws prompts that share no prefixes with those of earlier rounds."""
            return random_prompts(random.Random(next(numbers)), SEQUENCES, PROMPT_TOKENS, vocab)

        def directly() -> float:
            given = prompts()
            return wall_seconds(lambda: llm.generate(given, greedy(OUTPUT_TOKENS)))

        def over_http() -> float:
            answer = helper.ask(prompts())
            if not isinstance(answer, float):
                raise BenchError(f"HTTP: {answer}")
            return answer

        try:
            with Helper(clients.command(), _SECONDS) as helper:
                return take_turns({"generate": directly, "http": over_http}, rounds)
        finally:
            server.stop(1.0)


def send_batches(address: str) -> None:
    """In the clients' process: sends a batch for every list of prompts that it is given, and says
    the seconds that it took, or the error."""

    async def send() -> None:
        client = Client(address)
        while (prompts := await asyncio.to_thread(next, questions, None)) is not None:
            bodies = [completion_body(prompt, OUTPUT_TOKENS) for prompt in prompts]
            start = time.perf_counter()
            outcomes = await asyncio.gather(*map(client.complete, bodies))
            seconds = time.perf_counter() - start
            bad = [one for one in outcomes if one.error or one.tokens != OUTPUT_TOKENS]
            say(f"{bad[0].tokens} tokens, {bad[0].error}" if bad else seconds)

    questions = asked()
    asyncio.run(send())
