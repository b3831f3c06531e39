"""`python -m jaxserve.bench long`: time to the first token, and between tokens, by length of the
context.

One request at a time on a dense model of 5 M parameters, as `LLM(folder)` serves it here. The time
to the first token should grow as the model's operations do: linearly with the weights, and with the
square of the length in attention. Core time is compared, since other work does not lengthen it.
"""

import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.load import write_checkpoint
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import greedy, random_prompts, run_requests
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.config.model import ModelConfig
from jaxserve.fleet.assembly import Options
from jaxserve.fleet.here import open_here
from jaxserve.fleet.sizing import Sizing
from jaxserve.roles.parameters import count_parameters

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
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
    with tempfile.TemporaryDirectory(prefix="jaxserve-long-") as made:
        folder = Path(made)
        write_checkpoint(folder, MODEL)
        config, _ = read_config(folder)
        asked = {"folder": made, "lengths": lengths, "rounds": rounds}
        found = run_worker(Worker(measure_lengths, asked), _SECONDS)
    yield part_of(found, [operations(config, length) for length in FITTED])


def part_of(found: dict[str, Any], counted: list[float]) -> Part:
    """Builds the report.

    Args:
      found: by length, figures as `measure_lengths` gives them; and the sizes.
      counted: operations of the prompts of `FITTED`.
    """
    measures = []
    for length, one in found["lengths"].items():
        measures += [
            Measure(f"{int(length):,} tokens: to the first token", one["first"], "s"),
            Measure("  core time", one["core"], "core s"),
            Measure("  between tokens", one["between"] * 1e3, "ms"),
        ]
    core = exponent([found["lengths"][str(length)]["core"] for length in FITTED])
    most = exponent(counted) + ABOVE
    name = f"exponent of core time, {FITTED[0]:,} to {FITTED[-1]:,} tokens"
    measures += [Measure(name, core, "", most), Measure("  of operations", most - ABOVE)]
    notes = [f"{found['sizes']}; the best of the rounds; prompts are new, the cache holds none."]
    return Part("long", "Long contexts, a model of 5 M parameters", measures, notes, found)


def exponent(values: list[float]) -> float:
    """Growth of the values of `FITTED`'s first and last length, as a power of the length."""
    return math.log(values[-1] / values[0]) / math.log(FITTED[-1] / FITTED[0])


def operations(config: ModelConfig, length: int) -> float:
    """Floating-point operations of a prompt: of all tokens but in the head, which sees the last."""
    weights = count_parameters(config).activated - config.d_model * config.vocab
    columns = MODEL["num_attention_heads"] * MODEL["head_dim"] * config.layers
    return 2.0 * weights * length + 2.0 * columns * length**2


def measure_lengths(folder: str, lengths: list[int], rounds: int) -> dict[str, Any]:
    """Seconds to the first token, core seconds until then, and seconds between tokens."""
    deployment = load_deployment(folder, {"scheduler.compile_first": "all"}, choose=Sizing())
    engine = open_here(deployment, Options())
    draw, found, limits = random.Random(1), dict[str, dict[str, float]](), deployment.scheduler
    for _ in range(rounds):
        for length in lengths:
            prompts = random_prompts(draw, 1, length, MODEL["vocab_size"])
            first = run_requests(engine, prompts, greedy(1), patience=_SECONDS)
            again = run_requests(engine, prompts, greedy(OUTPUT_TOKENS), patience=_SECONDS)
            run = {"first": first.seconds, "core": first.core_seconds, "between": again.gap}
            best = found.setdefault(str(length), run)
            found[str(length)] = {name: min(best[name], run[name]) for name in run}
    engine.close()
    return {
        "lengths": found,
        "sizes": f"{deployment.mode}, attention.tp {deployment.attention.tp}, steps of "
        f"{list(limits.token_buckets)} tokens",
    }
