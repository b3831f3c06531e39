"""Parts of `bench engine` about contexts: conversations that exceed the pool, and long prompts.

Conversations: the time to the first token with `cache.host_gb` and `cache.storage`. Every user's
turn repeats the conversation so far. Four engines on the demo model take turns with the same
requests: a pool for all conversations, a tenth of it, a tenth with host memory below, and one with
host memory and a folder below. At the end all but the first are closed and opened again, and every
user returns once.

Long prompts: the time to the first token, and between tokens, by length of the context. One request
at a time on a dense model of 5 M parameters, as `LLM(folder)` serves it here. The time to the first
token should grow as the model's operations do: linearly with the weights, and with the square of
the length in attention. Core time is compared, since other work does not lengthen it.
"""

import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.load import write_checkpoint
from jaxserve.bench.report import Measure, Part, percentile
from jaxserve.bench.requests import DEMO, greedy, random_prompts, run_requests
from jaxserve.bench.workers import BenchError, Task, run_worker
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.fleet.assembly import Options, open_engine
from jaxserve.fleet.here import open_here
from jaxserve.fleet.sizing import Sizing
from jaxserve.roles.sizing import count_parameters

USERS, TURNS = 50, 20
QUICK_USERS, QUICK_TURNS = 30, 6
SHARE = 10
"""Users for each one whose request runs at a time, and the inverse of a small pool's share of all
pages: a small pool has about the pages of the conversations that run together. With fewer, requests
would wait for pages however fast these came back."""
TOKENS, OUTPUT_TOKENS, PAGE_SIZE, VOCAB = 40, 8, 16, 1000
POOLS: dict[str, tuple[int, list[str]]] = {
    "endless": (1, []),
    "a tenth": (SHARE, []),
    "a tenth, and host memory": (SHARE, ["cache.host_gb=1"]),
    "a tenth, host memory and a folder": (SHARE, ["cache.host_gb=1", "cache.storage={folder}"]),
}
"""Inverse of the pool's share of all pages, and settings."""
RATIO = 1.3


def measure_conversations(quick: bool) -> Iterator[Part]:
    """Measures in a process with one device."""
    users, turns = (QUICK_USERS, QUICK_TURNS) if quick else (USERS, TURNS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"users": users, "turns": turns, "folder": folder}
        found = run_worker(Task(measure_pools, arguments, devices=1), _SECONDS)
    measures, base = [], found["endless"]["seconds"]
    for name, samples in found.items():
        seconds = samples["seconds"]
        half, most = statistics.median(seconds), percentile(seconds, 95)
        measures.append(Measure(f"{name}: time to the first token, p50", half * 1e3, "ms"))
        measures.append(Measure("  p95", most * 1e3, "ms"))
        if name != "endless":
            limit = RATIO if samples["host_pages"] else None
            measures.append(Measure("  p50 ÷ endless", half / statistics.median(base), "", limit))
            measures.append(Measure("  p95 ÷ endless", most / percentile(base, 95), "", limit))
        measures.append(Measure("  prompt tokens not computed", samples["found"] * 100, "%"))
        again = statistics.median(samples["returning"])
        measures.append(Measure("  after a restart, p50", again * 1e3, "ms"))
        if name != "endless":
            warm = found["endless"]["returning"]
            limit = RATIO if samples["returned"].get("storage_hits") else None
            kept = again / statistics.median(warm)
            measures.append(Measure("  ÷ endless, not restarted", kept, "", limit))
    notes = [f"{users} users, {turns} turns; all tokens equal."]
    yield Part("conversations", "Conversations beyond the pool", measures, notes, found)


def measure_pools(users: int, turns: int, folder: str) -> dict[str, Any]:
    """Returns the seconds to the first token of every request after the first turn, by pool, and of
    every user's request after a restart."""
    pages = users * -(-(turns + 1) * (TOKENS + OUTPUT_TOKENS) // PAGE_SIZE)

    def opened(name: str) -> Engine:
        share, settings = POOLS[name]
        overrides = ["mode=colocated", f"cache.page_size={PAGE_SIZE}"]
        overrides += [f"cache.pages={max(pages // share, 64)}"]
        overrides += [each.format(folder=folder) for each in settings]
        return open_engine(load_deployment(DEMO, overrides))

    draw = random.Random(0)
    texts: list[list[int]] = [[] for _ in range(users)]

    def take_turn() -> dict[str, list[float]]:
        """Returns the seconds to the first token by pool."""
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        order = draw.sample(range(users), users)
        for first in range(0, users, users // SHARE):
            some = order[first : first + users // SHARE]
            for user in some:
                texts[user] += random_prompts(draw, 1, TOKENS, VOCAB)[0]
            prompts, answers = [texts[user] for user in some], []
            for name, engine in draw.sample([*engines.items()], len(engines)):
                ran = run_requests(engine, prompts, greedy(OUTPUT_TOKENS))
                answers.append(ran.tokens)
                seconds[name] += [times[0] for times in ran.arrivals]
            if answers.count(answers[0]) < len(answers):
                raise BenchError(f"users {some}: the pools gave different tokens")
            for user, tokens in zip(some, answers[0], strict=True):
                texts[user] += tokens
        return seconds

    engines = {name: opened(name) for name in POOLS}
    taken = [take_turn() for _ in range(turns)]
    found = {}
    for name, engine in engines.items():
        load = engine.load()
        hits = load.prefix_hits + PAGE_SIZE * load.host_pages.get("hits", 0)
        found[name] = {
            "seconds": [each for turn in taken[1:] for each in turn[name]],
            "found": hits / load.prefix_queries,
            "preemptions": load.preemptions,
            "host_pages": load.host_pages,
        }
    for name in [name for name in POOLS if name != "endless"]:
        engines[name].close()
        engines[name] = opened(name)
    returning = take_turn()
    for name, engine in engines.items():
        found[name] |= {"returning": returning[name], "returned": engine.load().host_pages}
        engine.close()
    return found


MODEL = json.loads(Path(__file__).with_name("long_model.json").read_text())
FITTED = (1024, 4096, 16384)
"""Prompts whose times give the exponent."""
LENGTHS = (*FITTED, 32768, 65536, 131072 - 64)
OUTPUT_TOKENS = 33
ABOVE = 0.15
"""Most by which the exponent of the measured time may exceed that of the operations."""
_SECONDS = 7200.0


def measure_long(quick: bool) -> Iterator[Part]:
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
