"""Tokens per second of the demo model through the engine, by layout and number of sequences.

Only the layout varies: limits, lanes and buckets are the deployment file's.
Each runs in a process of its own, run by `pipeline.py`: `python -m jaxserve.bench.tokens …`.
"""

import argparse
import queue
import random
import statistics
import time
from typing import Any

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Worker, run_worker, writing
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.fleet.assembly import open_engine

CONFIG = CONFIGS / "demo.yaml"
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
_OUTPUT_SECONDS = 60.0


def measure(quick: bool) -> Part:
    """Runs the layouts one after the other; starts no JAX in this process."""
    found: dict[str, Any] = {}
    for name, settings in LAYOUTS.items():
        devices = load_deployment(CONFIG, settings).devices
        arguments = [*(f"--set={setting}" for setting in settings)]
        arguments += ["--rounds", "1" if quick else "3"]
        environment = {"JAX_NUM_CPU_DEVICES": str(devices)}
        found[name] = run_worker(Worker("jaxserve.bench.tokens", arguments, environment), _SECONDS)
    measures = []
    for name, runs in found.items():
        for count in SEQUENCES:
            run = runs[str(count)]
            label = f"{name}: {count} sequence{'s' * (count > 1)}"
            measures += [
                Measure(label, run["tokens_per_second"], "tokens/s"),
                Measure("  from one token of a sequence to the next", run["token_ms"], "ms"),
            ]
    notes = [
        f"Greedy, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out each, prefill included.",
        "Devices are simulated on the cores above: more devices are not more speed.",
    ]
    return Part("tokens", "(c) demo model, tokens a second of the engine", measures, notes, found)


def run_requests(engine: Engine, sequences: int, output_tokens: int) -> dict[str, float]:
    """Runs `sequences` requests together.

    Returns:
      tokens_per_second: of all, from the first submit to the last token.
      token_ms: median over sequences of the time from one of its tokens to the next: one step of
        its lane.

    Raises:
      BenchError: a request failed, or nothing came for a minute.
    """
    draw = random.Random(sequences)
    vocab = engine.model_info()["vocab_size"]
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    outputs: queue.SimpleQueue[tuple[float, TokenOutput]] = queue.SimpleQueue()
    start = time.perf_counter()
    for _ in range(sequences):
        prompt = [draw.randrange(vocab) for _ in range(PROMPT_TOKENS)]
        engine.submit(prompt, params, lambda output: outputs.put((time.perf_counter(), output)))
    first: dict[str, float] = {}
    gaps: list[float] = []
    tokens = 0
    while len(gaps) < sequences:
        try:
            at, output = outputs.get(timeout=_OUTPUT_SECONDS)
        except queue.Empty:
            raise BenchError(
                f"no token for {_OUTPUT_SECONDS:g} s; engine: {engine.status}"
            ) from None
        if output.finish_reason in ("error", "cancelled"):
            raise BenchError(f"request {output.request_id}: {output.error}")
        tokens += len(output.token_ids)
        if output.token_ids:
            first.setdefault(output.request_id, at)
        if output.finish_reason:
            gaps.append((at - first[output.request_id]) / (output_tokens - 1))
    seconds = time.perf_counter() - start
    return {"tokens_per_second": tokens / seconds, "token_ms": statistics.median(gaps) * 1e3}


def main() -> None:
    """The worker: one layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        engine = open_engine(load_deployment(CONFIG, options.set))
        run_requests(engine, 8, 8)
        for count in SEQUENCES:
            rounds = [run_requests(engine, count, OUTPUT_TOKENS) for _ in range(options.rounds)]
            result[str(count)] = {
                key: statistics.median(values[key] for values in rounds) for key in rounds[0]
            } | {"rounds": rounds}
        engine.close()


if __name__ == "__main__":
    main()
