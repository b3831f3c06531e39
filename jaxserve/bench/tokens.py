"""Tokens a second of the demo model through the engine, a layout and number of sequences (c).

Each layout runs in a process of its own, because JAX counts its devices once. Greedy, 64 tokens a
sequence, end ids ignored, short prompts; a round of every size runs once before it is timed.

Run by `pipeline.py` as a worker: `python -m jaxserve.bench.tokens --overrides JSON --result FILE`.
"""

import argparse
import json
import queue
import statistics
import time
from pathlib import Path
from typing import Any

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import Worker, run_worker, writing
from jaxserve.config.deployment import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.llm import open_engine

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"mode": "colocated"},
    "1A1F": {},
    "2A2F": {"attention.dp": 2, "ffn.ep": 2},
}
SEQUENCES = (1, 8, 32)
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 16
_SECONDS = 300.0


def measure(quick: bool) -> Part:
    """Runs a worker a layout; starts no JAX in this process."""
    rounds = 1 if quick else 5
    results = {}
    for layout, overrides in LAYOUTS.items():
        arguments = ["--overrides", json.dumps(overrides), "--rounds", str(rounds)]
        results[layout] = run_worker(Worker("jaxserve.bench.tokens", arguments), _SECONDS)
    measures = [
        Measure(f"{layout}, {count} sequences", result["tokens_per_second"][count], "tokens/s")
        for layout, result in results.items()
        for count in map(str, SEQUENCES)
    ]
    notes = [
        f"{OUTPUT_TOKENS} tokens a sequence after {PROMPT_TOKENS} of prompt, prefill included; "
        f"medians of {rounds}. Devices are simulated on the cores above: more of them add no speed."
    ]
    return Part("tokens", "(c) demo model, FP32, tokens a second", measures, notes, results)


def generate(engine: Engine, sequences: int) -> float:
    """Tokens a second of so many requests submitted at once."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    count = 0

    def on_output(output: TokenOutput) -> None:
        nonlocal count
        count += len(output.token_ids)
        if output.finish_reason is not None:
            ended.put(output.finish_reason)

    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    for sequence in range(sequences):
        prompt = [2 + (37 * sequence + 11 * place) % 1000 for place in range(PROMPT_TOKENS)]
        engine.submit(prompt, params, on_output)
    reasons = {ended.get(timeout=_SECONDS) for _ in range(sequences)}
    if reasons != {"length"}:
        raise RuntimeError(f"requests ended with {reasons}")
    return count / (time.perf_counter() - start)


def main() -> None:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--overrides", type=json.loads, default={})
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        engine = open_engine(load_deployment(CONFIG, options.overrides))
        speeds: dict[int, list[float]] = {}
        for count in SEQUENCES:
            generate(engine, count)
            speeds[count] = [generate(engine, count) for _ in range(options.rounds)]
        engine.close()
        result["rounds"] = speeds
        result["tokens_per_second"] = {n: statistics.median(s) for n, s in speeds.items()}


if __name__ == "__main__":
    main()
