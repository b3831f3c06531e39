"""Time to the first token, and between tokens, by length of the context. A part of `bench engine`.

One request at a time on a dense model of 5 M parameters, as `LLM(folder)` serves it here. The time
to the first token should grow as the model's operations do: linearly with the weights, and with the
square of the length in attention. Core time is compared, since other work does not lengthen it.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.load import write_checkpoint
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import greedy, random_prompts, run_requests
from jaxserve.bench.workers import Task, run_worker
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.fleet.assembly import Options
from jaxserve.fleet.here import open_here
from jaxserve.fleet.sizing import Sizing
from jaxserve.roles.sizing import count_parameters

MODEL = json.loads(Path(__file__).with_name("long_model.json").read_text())
FITTED = (1024, 4096, 16384)
"""Prompts whose times give the exponent."""
LENGTHS = (*FITTED, 32768, 65536, 131072 - 64)
OUTPUT_TOKENS = 33
ABOVE = 0.15
"""Most by which the exponent of the measured time may exceed that of the operations."""
_SECONDS = 7200.0


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process of its own; quick: up to 16,384 tokens, once."""
    lengths, rounds = (FITTED, 1) if quick else (LENGTHS, 3)
    with tempfile.TemporaryDirectory(prefix="jaxserve-long-") as folder:
        write_checkpoint(Path(folder), MODEL)
        asked = {"folder": folder, "lengths": lengths, "rounds": rounds}
        found = run_worker(Task(measure_lengths, asked), _SECONDS)
    measures = []
    for length, (first, core, between) in found["lengths"].items():
        measures += [
            Measure(f"{int(length):,} tokens: to the first token", first, "s"),
            Measure("  core time", core, "core s"),
            Measure("  between tokens", between * 1e3, "ms"),
        ]
    core, counted = exponent([found["lengths"][str(one)][1] for one in FITTED]), found["operations"]
    name = f"exponent of core time, {FITTED[0]:,} to {FITTED[-1]:,} tokens"
    measures += [Measure(name, core, "", counted + ABOVE), Measure("  of operations", counted)]
    notes = [f"{found['sizes']}; the best of the rounds; prompts are new, the cache holds none."]
    yield Part("long", "Long contexts, a model of 5 M parameters", measures, notes, found)


def exponent(values: list[float]) -> float:
    """Growth of the values of `FITTED`'s first and last length, as a power of the length."""
    return math.log(values[-1] / values[0]) / math.log(FITTED[-1] / FITTED[0])


def measure_lengths(folder: str, lengths: list[int], rounds: int) -> dict[str, Any]:
    """Seconds to the first token, core seconds until then, and seconds between tokens, by length;
    and the exponent of the prompts' operations, without the head's, which sees the last token."""
    config, _ = read_config(Path(folder))
    weights = count_parameters(config).activated - config.d_model * config.vocab
    columns = MODEL["num_attention_heads"] * MODEL["head_dim"] * config.layers
    deployment = load_deployment(folder, {"scheduler.compile_first": "all"}, choose=Sizing())
    engine, best = open_here(deployment, Options()), dict[int, list[float]]()
    draw, limits = random.Random(1), deployment.scheduler
    for length in lengths * rounds:
        prompts = random_prompts(draw, 1, length, config.vocab)
        first = run_requests(engine, prompts, greedy(1), patience=_SECONDS)
        (times,) = run_requests(engine, prompts, greedy(OUTPUT_TOKENS), patience=_SECONDS).arrivals
        between = (times[-1] - times[0]) / (OUTPUT_TOKENS - 1)
        run = [first.seconds, first.core_seconds, between]
        best[length] = [min(pair) for pair in zip(best.get(length, run), run, strict=True)]
    engine.close()
    return {
        "lengths": best,
        "operations": exponent([weights * one + columns * one**2 for one in FITTED]),
        "sizes": f"{deployment.mode}, attention.tp {deployment.attention.tp}, steps of "
        f"{list(limits.token_buckets)} tokens",
    }
