"""Tokens per second of the demo model through the engine, by layout and number of sequences.

Part of `bench pipeline`. Only the layout varies: limits, lanes and buckets are the deployment
file's. Each layout runs in a process of its own.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import DEMO, greedy, random_prompts, run_requests
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.config.load import load_deployment
from jaxserve.fleet.assembly import open_engine

LAYOUTS = {
    "colocated": ["mode=colocated"],
    "1A1F": ["attention.dp=1", "ffn.ep=1"],
    "2A2F": ["attention.dp=2", "ffn.ep=2"],
    "colocated, 1 lane": ["mode=colocated", "lanes=1", "scheduler.slots=32"],
    "1A1F, 1 lane": ["attention.dp=1", "ffn.ep=1", "lanes=1", "scheduler.slots=32"],
}
"""The first three with the lanes of the file; one lane holds the same sequences in one batch."""
SEQUENCES = (1, 8, 32)
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 64
_SECONDS = 300.0


def measure(quick: bool) -> Iterator[Part]:
    """Runs the layouts one after the other; starts no JAX in this process."""
    found: dict[str, Any] = {}
    for name, settings in LAYOUTS.items():
        arguments = {"settings": settings, "rounds": 1 if quick else 3}
        devices = load_deployment(DEMO, settings).devices
        found[name] = run_worker(Worker(measure_layout, arguments, devices), _SECONDS)
    measures = []
    for name, runs in found.items():
        for count in SEQUENCES:
            rate, gap = map(statistics.median, zip(*runs[f"{count}"], strict=True))
            label = f"{name}: {count} sequence{'s' * (count > 1)}"
            measures += [
                Measure(label, rate, "tokens/s"),
                Measure("  from one token of a sequence to the next", gap * 1e3, "ms"),
            ]
    notes = [
        f"Greedy, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out each, prefill included.",
        "Devices are simulated on the cores above: more devices are not more speed.",
    ]
    yield Part("tokens", "demo model, tokens a second of the engine", measures, notes, found)


def measure_layout(settings: Sequence[str], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Number of sequences → tokens a second and seconds between tokens, for every round."""
    engine = open_engine(load_deployment(DEMO, settings))
    vocab = engine.model_info()["vocab_size"]
    found: dict[str, list[tuple[float, float]]] = {}
    run_requests(engine, random_prompts(random.Random(8), 8, PROMPT_TOKENS, vocab), greedy(8))
    for count in SEQUENCES:
        prompts = random_prompts(random.Random(count), count, PROMPT_TOKENS, vocab)
        runs = [run_requests(engine, prompts, greedy(OUTPUT_TOKENS)) for _ in range(rounds)]
        found[f"{count}"] = [(run.rate, run.gap) for run in runs]
    engine.close()
    return found
