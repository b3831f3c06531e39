"""Conversations whose KV pages exceed the pool: the time to the first token with `cache.host_gb`
and `cache.storage`.

Part of `bench engine`. Every user's turn repeats the conversation so far. Four engines on the demo
model take turns with the same requests: a pool for all conversations, a tenth of it, a tenth with
host memory below, and one with host memory and a folder below. At the end all but the first are
closed and opened again, and every user returns once.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from jaxserve.bench.report import Measure, Part, percentile
from jaxserve.bench.requests import DEMO, greedy, random_prompts, run_requests
from jaxserve.bench.workers import BenchError, Task, run_worker
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.fleet.assembly import open_engine

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
_SECONDS = 1500.0


def measure(quick: bool) -> Iterator[Part]:
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
            # Not judged: in that turn the last conversation of a round waits for pages.
            kept = percentile(samples["returning"], 95) / percentile(warm, 95)
            measures.append(Measure("  p95 ÷ endless, not restarted", kept, ""))
    notes = [f"{users} users, {turns} turns; all tokens equal."]
    yield Part("conversations", "Conversations beyond the pool", measures, notes, found)


def measure_pools(users: int, turns: int, folder: str) -> dict[str, Any]:
    """Returns the seconds to the first token of every request after the first turn, by pool, and of
    every user's request after a restart."""
    pages = users * -(-(turns + 1) * (TOKENS + OUTPUT_TOKENS) // PAGE_SIZE)

    def opened(name: str) -> Engine:
        share, settings = POOLS[name]
        overrides = [
            *("mode=colocated", "lanes=1", f"cache.page_size={PAGE_SIZE}"),
            f"cache.pages={max(pages // share, 64)}",
            *(each.format(folder=folder) for each in settings),
        ]
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
