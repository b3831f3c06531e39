"""The cost of drawing tokens from a large vocabulary: part of `bench engine`.

The demo's layers with random weights and as many tokens as Qwen3 has, colocated: core seconds a
step of requests that draw over those of greedy ones. It runs in a process of its own.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.bench.random_leaves import open_random
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import DEMO, random_prompts, run_requests
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams
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
"""Options of all requests of a run."""
_SECONDS = 600.0


def measure(quick: bool) -> Iterator[Part]:
    """Runs the worker; starts no JAX in this process."""
    rounds = 1 if quick else 8
    yield part_of(run_worker(Worker(measure_mixes, {"rounds": rounds}), _SECONDS), rounds)


def part_of(found: dict[str, list[float]], rounds: int) -> Part:
    """Builds the report of core seconds a step, by the number of sequences and the mix."""
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
    deployment = load_deployment(DEMO, SETTINGS)
    config, names = read_config(deployment.model, deployment.ignored_model_keys)
    config = msgspec.structs.replace(config, vocab=VOCAB)
    runtime = build_runtime(deployment, Options(config=config, names=names, weights=open_random))
    warm_up(runtime)
    engine = make_engine(runtime, eos_token_ids=frozenset())
    engine.start()
    return engine


def measure_mixes(rounds: int) -> dict[str, list[float]]:
    """Core seconds a step of requests that run together, by their number and mix."""
    engine = _engine()
    found: dict[str, list[float]] = {}
    for _, sequences, mix in itertools.product(range(rounds), SEQUENCES, MIXES):
        params = [
            SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=number, **MIXES[mix])
            for number in range(sequences)
        ]
        prompts = random_prompts(random.Random(sequences), sequences, 1, VOCAB)
        core = run_requests(engine, prompts, params).core_seconds
        found.setdefault(f"{sequences} {mix}", []).append(core / OUTPUT_TOKENS)
    engine.close()
    return found
