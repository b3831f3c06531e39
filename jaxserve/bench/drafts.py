"""`python -m jaxserve.bench drafts`: the gain of drafts on the demo model, on held-out text.

One process has an engine without drafts and one for each way to draft, all of one layout. They take
turns, so other work on the machine affects all engines alike.
"""

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.quality import held_out
from jaxserve.bench.report import Measure, Part, median_ratio
from jaxserve.bench.requests import DEMO, greedy, run_requests
from jaxserve.bench.workers import Task, run_worker
from jaxserve.config.load import load_deployment
from jaxserve.fleet.assembly import open_engine

SETTINGS = ["mode=colocated"]
METHODS = {
    "none": [],
    "ngram, 3 drafts": ["speculative.method=ngram", "speculative.drafts=3"],
    "mtp, 1 draft": ["speculative.method=mtp", "speculative.drafts=1"],
    "mtp, 3 drafts": ["speculative.method=mtp", "speculative.drafts=3"],
}
SEQUENCES = (1, 32)
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 96
FASTER_LIMIT, SLOWER_LIMIT, TOKENS_LIMIT = 1.3, 0.97, 1.6
_SECONDS = 1500.0


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with one device."""
    arguments = {"rounds": 1 if quick else 8}
    yield part_of(run_worker(Task(measure_methods, arguments, devices=1), _SECONDS))


def measure_methods(rounds: int) -> dict[str, Any]:
    """All samples: method → sequences → tokens a second, and how many of its drafts held."""
    folder = Path(load_deployment(DEMO).model)
    texts = held_out(folder, files=max(SEQUENCES), tokens=PROMPT_TOKENS)
    prompts = [text.token_ids[:PROMPT_TOKENS] for text in texts]
    engines = {
        name: open_engine(load_deployment(DEMO, [*SETTINGS, *settings]))
        for name, settings in METHODS.items()
    }
    for engine in engines.values():  # learns which steps are faster with drafts
        for count in SEQUENCES:
            run_requests(engine, prompts[:count], greedy(OUTPUT_TOKENS))
    rates: dict[str, dict[str, list[float]]] = {
        name: {str(count): [] for count in SEQUENCES} for name in METHODS
    }
    for count, turn, (name, engine) in itertools.product(SEQUENCES, range(rounds), engines.items()):
        some = [prompts[(turn + place) % len(prompts)] for place in range(count)]
        rates[name][str(count)].append(run_requests(engine, some, greedy(OUTPUT_TOKENS)).rate)
    found: dict[str, Any] = {}
    for name, engine in engines.items():
        drafts = engine.load().drafts
        found[name] = {
            "tokens_per_second": rates[name],
            "runs": 0 if drafts is None else drafts.runs,
            "accepted": [] if drafts is None else drafts.accepted,
            "compilations": engine.compilations_after_ready,
        }
        engine.close()
    return found


def part_of(found: dict[str, dict[str, Any]]) -> Part:
    """Builds the report of all samples."""
    measures = []
    base = found["none"]["tokens_per_second"]
    for name, samples in found.items():
        rates = samples["tokens_per_second"]
        if name != "none":
            tokens = 1 + sum(samples["accepted"]) / max(samples["runs"], 1)
            least = TOKENS_LIMIT if name.startswith("mtp") else None
            measures.append(
                Measure(f"{name}: tokens a drafted step and sequence", tokens, "", least, "more")
            )
            for place, count in enumerate(samples["accepted"], 1):
                held = 100 * count / max(samples["runs"], 1)
                measures.append(Measure(f"  draft {place} held", held, "%"))
        for count, values in rates.items():
            title = f"{name}: " if name == "none" else "  "
            label = f"{title}{count} sequence{'s' * (count != '1')}"
            measures.append(Measure(label, statistics.median(values), "tokens/s"))
            if name != "none":
                ratio = median_ratio(values, base[count])
                limit = SLOWER_LIMIT if count != "1" or name.startswith("ngram") else FASTER_LIMIT
                measures.append(Measure("  ÷ none", ratio, "", limit, "more"))
        measures.append(Measure("  compiled after ready", samples["compilations"], "", 0.0))
    notes = [
        f"Colocated; held-out text, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} greedy ones out, "
        "prefill included; steps have drafts where they are faster with them.",
        "Ratios are medians over rounds, in which the engines took turns.",
    ]
    return Part("drafts", "Drafts on the demo model", measures, notes, found)
