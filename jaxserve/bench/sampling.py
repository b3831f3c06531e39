"""The cost of drawing tokens from a large vocabulary: part of `python -m jaxserve.bench engine`.

The demo's layers with random weights and as many tokens as Qwen3 has, colocated: CPU seconds a step
of requests that draw over those of greedy ones. The worker runs in a process of its own.
"""

import argparse
import itertools
import queue
import random
import time
from typing import Any

import msgspec

from jaxserve.bench.random_leaves import open_random
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.tokens import CONFIG
from jaxserve.bench.workers import BenchError, Worker, run_worker, writing
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.engine.runtime import warm_up
from jaxserve.fleet.assembly import Options, build_runtime, make_engine

VOCAB = 151_936
SETTINGS = [
    *("mode=colocated", "lanes=1", "scheduler.slots=32", "scheduler.token_buckets=[32]"),
    *("scheduler.page_buckets=[16]", "scheduler.token_budget=32", "scheduler.max_length=256"),
]
SEQUENCES = (1, 32)
OUTPUT_TOKENS = 12
LIMIT = 1.3
MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k and top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
}
"""What the requests of a run ask for."""
_SECONDS = 600.0
_OUTPUT_SECONDS = 60.0


def measure(rounds: int) -> Part:
    """Runs the worker; starts no JAX in this process."""
    worker = Worker("jaxserve.bench.sampling", [f"--rounds={rounds}"])
    return part_of(run_worker(worker, _SECONDS), rounds)


def part_of(found: dict[str, list[float]], rounds: int) -> Part:
    """The samples in words: CPU seconds a step, by the number of sequences and the mix."""
    measures = []
    for sequences in SEQUENCES:
        seconds = {mix: min(found[f"{sequences} {mix}"]) for mix in MIXES}
        measures.append(
            Measure(f"{sequences} sequences: greedy", seconds["greedy"] * 1e3, "CPU ms")
        )
        for mix in list(MIXES)[1:]:
            limit = LIMIT if mix == "temperature" else None
            ratio = seconds[mix] / seconds["greedy"]
            measures.append(Measure(f"  {mix} ÷ greedy", ratio, "", limit))
    notes = [
        f"{VOCAB:,} tokens, random weights; CPU time of a step, over {OUTPUT_TOKENS} tokens a "
        f"sequence, prefill included; the best of {rounds} rounds each, which took turns.",
    ]
    return Part("sampling", "Tokens that are drawn", measures, notes, found)


def _engine() -> Engine:
    deployment = load_deployment(CONFIG, SETTINGS)
    config, names = read_config(deployment.model, deployment.ignored_model_keys)
    config = msgspec.structs.replace(config, vocab=VOCAB)
    runtime = build_runtime(deployment, Options(config=config, names=names, weights=open_random))
    warm_up(runtime)
    engine = make_engine(runtime, eos_token_ids=frozenset())
    engine.start()
    return engine


def _seconds(engine: Engine, sequences: int, mix: str) -> float:
    """CPU time of the process for a step of so many requests together."""
    draw = random.Random(sequences)
    outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
    start = time.process_time()
    for number in range(sequences):
        params = SamplingParams(
            max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=number, **MIXES[mix]
        )
        engine.submit([draw.randrange(VOCAB)], params, outputs.put)
    ended = 0
    while ended < sequences:
        output = outputs.get(timeout=_OUTPUT_SECONDS)
        if output.finish_reason in ("error", "cancelled", "stop"):
            raise BenchError(f"{mix}: {output}")
        ended += output.finish_reason is not None
    return (time.process_time() - start) / OUTPUT_TOKENS


def main() -> None:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        engine = _engine()
        for _, sequences, mix in itertools.product(range(options.rounds), SEQUENCES, MIXES):
            seconds = _seconds(engine, sequences, mix)
            result.setdefault(f"{sequences} {mix}", []).append(seconds)
        engine.close()


if __name__ == "__main__":
    main()
