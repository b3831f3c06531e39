"""`python -m jaxserve.bench engine`: the gain of cached prefixes, and the cost of options.

The demo model in two layouts, each in its own process: time to the first token of a prompt of which
90 % is in the prefix cache, and throughput of requests with grammars, penalties and
log-probabilities relative to requests without. The grammars' masks are precomputed, so that only
the engine's share of the cost is measured. `sampling.py` adds what drawing tokens costs.
"""

import argparse
import itertools
import queue
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench import sampling
from jaxserve.bench.report import (
    Measure,
    Part,
    Report,
    conclude,
    describe_machine,
    table,
    this_machine,
)
from jaxserve.bench.tokens import CONFIG
from jaxserve.bench.workers import BenchError, Worker, run_worker, writing
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.fleet.assembly import open_engine

LAYOUTS = {"colocated": ["mode=colocated"], "1A1F": ["attention.dp=1", "ffn.ep=1"]}
PROMPT_TOKENS = 960
SHARED_TOKENS = 864
SHARED_LIMIT = 4.0
STRUCTURED_LIMIT = 0.85
SEQUENCES = 32
OUTPUT_TOKENS = 64
_SECONDS = 300.0
_OUTPUT_SECONDS = 60.0


class EveryOther:
    """A grammar that alternates even and odd token ids, with precomputed masks."""

    finished = False

    def __init__(self, vocab: int):
        words = -(-vocab // 32)
        self._masks = [np.full(words, word, np.uint32) for word in (0x55555555, 0xAAAAAAAA)]
        self._turn = 0

    def mask(self) -> np.ndarray:
        """The mask of the current turn."""
        return self._masks[self._turn]

    def accept(self, token_id: int) -> None:
        """Switches to the other turn."""
        if token_id % 2 != self._turn:
            raise ValueError(f"token {token_id} is not allowed")
        self._turn = 1 - self._turn


MIXES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "plain": lambda number, vocab: {},
    "grammars": lambda number, vocab: {"grammar": EveryOther(vocab)},
    "half grammars": lambda number, vocab: {"grammar": EveryOther(vocab) if number % 2 else None},
    "penalties": lambda number, vocab: {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "biases": lambda number, vocab: {"logit_bias": dict.fromkeys(range(300), -5.0)},
    "5 logprobs": lambda number, vocab: {"logprobs": 5},
}
"""What the requests of a run ask for, by their number."""


def time_to_first_token(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds from submitting a single request to its first token on an idle engine."""
    outputs: queue.SimpleQueue[float] = queue.SimpleQueue()
    start = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.submit(prompt, params, lambda output: outputs.put(time.perf_counter()))
    return outputs.get(timeout=_OUTPUT_SECONDS) - start


def throughput(engine: Engine, mix: str) -> float:
    """Tokens a second of `SEQUENCES` requests together, prefill included."""
    draw, vocab = random.Random(0), engine.model_info()["vocab_size"]
    outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
    start = time.perf_counter()
    for number in range(SEQUENCES):
        prompt = [draw.randrange(vocab) for _ in range(16)]
        params = SamplingParams(
            max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, **MIXES[mix](number, vocab)
        )
        engine.submit(prompt, params, outputs.put)
    tokens = ended = 0
    while ended < SEQUENCES:
        output = outputs.get(timeout=_OUTPUT_SECONDS)
        if output.finish_reason in ("error", "cancelled", "stop"):
            raise BenchError(f"{mix}: {output}")
        tokens += len(output.token_ids)
        ended += output.finish_reason is not None
    return tokens / (time.perf_counter() - start)


def measure_layout(settings: Sequence[str], rounds: int) -> dict[str, Any]:
    """All samples of one layout; the mixes alternate, so that noise affects them alike."""
    engine = open_engine(load_deployment(CONFIG, settings))
    draw, vocab = random.Random(1), engine.model_info()["vocab_size"]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(count)]

    shared = tokens(SHARED_TOKENS)
    time_to_first_token(engine, shared + tokens(PROMPT_TOKENS - SHARED_TOKENS))
    first: dict[str, list[float]] = {"cold": [], "shared": []}
    for _ in range(2 * rounds):
        first["cold"].append(time_to_first_token(engine, tokens(PROMPT_TOKENS)))
        rest = tokens(PROMPT_TOKENS - SHARED_TOKENS)
        first["shared"].append(time_to_first_token(engine, shared + rest))
    rates: dict[str, list[float]] = {mix: [] for mix in MIXES}
    for _, mix in itertools.product(range(rounds), MIXES):
        rates[mix].append(throughput(engine, mix))
    compiled = engine.compilations_after_ready
    engine.close()
    return {"first_token_seconds": first, "tokens_per_second": rates, "compilations": compiled}


def part_of(found: dict[str, dict[str, Any]], rounds: int) -> Part:
    """The layouts' samples in words."""
    measures = []
    for name, samples in found.items():
        cold, shared = map(min, samples["first_token_seconds"].values())
        rates = {mix: max(values) for mix, values in samples["tokens_per_second"].items()}
        measures += [
            Measure(f"{name}: first token, cold ÷ shared", cold / shared, "", SHARED_LIMIT, "more"),
            Measure("  cold", cold * 1e3, "ms"),
            Measure("  90 % shared", shared * 1e3, "ms"),
            Measure(f"{name}: plain requests", rates["plain"], "tokens/s"),
        ]
        for mix in list(MIXES)[1:]:
            limit = STRUCTURED_LIMIT if "grammars" in mix else None
            measures.append(
                Measure(f"  {mix} ÷ plain", rates[mix] / rates["plain"], "", limit, "more")
            )
        measures.append(Measure("  compiled after ready", samples["compilations"], "", 0.0))
    notes = [
        f"{PROMPT_TOKENS} prompt tokens, of which {SHARED_TOKENS} shared; then {SEQUENCES} "
        f"requests together, {OUTPUT_TOKENS} greedy tokens each.",
        f"The best of {rounds} rounds each (prompts: twice as many), which took turns: what else "
        "runs on the machine only makes a round longer.",
        "Masks are ready-made: what a grammar library takes for them is not in it.",
    ]
    return Part("engine", "Shared prefixes and sampling options", measures, notes, found)


def run(quick: bool, json_file: Path | None) -> int:
    """Measures and prints; 1 if a target is missed."""
    machine, rounds = this_machine(), 1 if quick else 8
    print(describe_machine(machine), flush=True)
    found = {}
    for name, settings in LAYOUTS.items():
        arguments = [*(f"--set={setting}" for setting in settings), f"--rounds={rounds}"]
        devices = load_deployment(CONFIG, settings).devices
        environment = {"JAX_NUM_CPU_DEVICES": str(devices)}
        found[name] = run_worker(Worker("jaxserve.bench.options", arguments, environment), _SECONDS)
    parts = [part_of(found, rounds), sampling.measure(rounds)]
    for part in parts:
        print(f"\n{table(part)}", flush=True)
    return conclude(Report("engine", quick, machine, parts), json_file)


def main() -> None:
    """The worker: one layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        result.update(measure_layout(options.set, options.rounds))


if __name__ == "__main__":
    main()
