"""The gain of cached prefixes, and the cost of sampling options: part of `bench engine`.

The demo model in two layouts, each in its own process: time to the first token of a prompt of which
90 % is in the prefix cache, and throughput of requests with grammars, penalties and
log-probabilities relative to requests without. The grammars' masks are precomputed, so that only
the engine's share of the cost is measured.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import DEMO, greedy, random_prompts, run_requests
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.fleet.assembly import open_engine

LAYOUTS = {"colocated": ["mode=colocated"], "1A1F": ["attention.dp=1", "ffn.ep=1"]}
PROMPT_TOKENS = 960
SHARED_TOKENS = 864
SHARED_LIMIT = 4.0
STRUCTURED_LIMIT = 0.85
SEQUENCES = 32
OUTPUT_TOKENS = 64
_SECONDS = 300.0


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
"""Options of a request, by its number and the vocabulary's size."""


def measure(quick: bool) -> Iterator[Part]:
    """Measures every layout in a process of its own."""
    found, rounds = {}, 1 if quick else 8
    for name, settings in LAYOUTS.items():
        devices = load_deployment(DEMO, settings).devices
        worker = Worker(measure_layout, {"settings": settings, "rounds": rounds}, devices)
        found[name] = run_worker(worker, _SECONDS)
    yield part_of(found, rounds)


def throughput(engine: Engine, mix: str) -> float:
    """Tokens a second of `SEQUENCES` requests together, prefill included."""
    vocab = engine.model_info()["vocab_size"]
    prompts = random_prompts(random.Random(0), SEQUENCES, 16, vocab)
    params = [
        msgspec.structs.replace(greedy(OUTPUT_TOKENS), **MIXES[mix](number, vocab))
        for number in range(SEQUENCES)
    ]
    return run_requests(engine, prompts, params).rate


def measure_layout(settings: Sequence[str], rounds: int) -> dict[str, Any]:
    """All samples of one layout; the mixes alternate, so that noise affects them alike."""
    engine = open_engine(load_deployment(DEMO, settings))
    draw, vocab = random.Random(1), engine.model_info()["vocab_size"]

    def tokens(count: int) -> list[int]:
        return random_prompts(draw, 1, count, vocab)[0]

    def first_token(prompt: list[int]) -> float:
        return run_requests(engine, [prompt], greedy(1)).seconds

    shared = tokens(SHARED_TOKENS)
    first_token(shared + tokens(PROMPT_TOKENS - SHARED_TOKENS))
    first: dict[str, list[float]] = {"cold": [], "shared": []}
    for _ in range(2 * rounds):
        first["cold"].append(first_token(tokens(PROMPT_TOKENS)))
        first["shared"].append(first_token(shared + tokens(PROMPT_TOKENS - SHARED_TOKENS)))
    rates: dict[str, list[float]] = {mix: [] for mix in MIXES}
    for _, mix in itertools.product(range(rounds), MIXES):
        rates[mix].append(throughput(engine, mix))
    compiled = engine.compilations_after_ready
    engine.close()
    return {"first_token_seconds": first, "tokens_per_second": rates, "compilations": compiled}


def part_of(found: dict[str, dict[str, Any]], rounds: int) -> Part:
    """Builds the report of all samples."""
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
        f"The best of {rounds} rounds each (prompts: twice as many), which took turns: other "
        "work on the machine only makes a round longer.",
        "Masks are ready-made: the time of a grammar library is not included.",
    ]
    return Part("engine", "Shared prefixes and sampling options", measures, notes, found)
