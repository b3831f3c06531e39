"""`python -m jaxserve.bench drafts`: what drafts gain on the demo model, on text it has not seen.

One process has an engine without drafts and one for each way to draft, all of one layout. They take
turns, so what else runs on the machine falls on all of them.
"""

import argparse
import itertools
import queue
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.quality import held_out
from jaxserve.bench.report import Measure, Part, run_parts
from jaxserve.bench.tokens import CONFIG
from jaxserve.bench.workers import BenchError, Worker, run_worker, writing
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
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
_OUTPUT_SECONDS = 60.0


def throughput(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second of requests that run together, greedy."""
    outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, params, outputs.put)
    tokens = ended = 0
    while ended < len(prompts):
        output = outputs.get(timeout=_OUTPUT_SECONDS)
        if output.finish_reason in ("error", "cancelled", "stop"):
            raise BenchError(str(output))
        tokens += len(output.token_ids)
        ended += output.finish_reason is not None
    return tokens / (time.perf_counter() - start)


def measure(rounds: int) -> dict[str, Any]:
    """All samples: method → sequences → tokens a second, and what came of its drafts."""
    folder = Path(load_deployment(CONFIG).model)
    texts = held_out(folder, files=max(SEQUENCES), tokens=PROMPT_TOKENS)
    prompts = [text.token_ids[:PROMPT_TOKENS] for text in texts]
    engines = {
        name: open_engine(load_deployment(CONFIG, [*SETTINGS, *settings]))
        for name, settings in METHODS.items()
    }
    for engine in engines.values():  # learns which steps are faster with drafts
        for count in SEQUENCES:
            throughput(engine, prompts[:count])
    rates: dict[str, dict[str, list[float]]] = {
        name: {str(count): [] for count in SEQUENCES} for name in METHODS
    }
    for count, turn, (name, engine) in itertools.product(SEQUENCES, range(rounds), engines.items()):
        some = [prompts[(turn + place) % len(prompts)] for place in range(count)]
        rates[name][str(count)].append(throughput(engine, some))
    found: dict[str, Any] = {}
    for name, engine in engines.items():
        drafts = engine.load().drafts
        found[name] = {
            "tokens_per_second": rates[name],
            "runs": 0 if drafts is None else drafts.runs,
            "drafted": 0 if drafts is None else drafts.drafted,
            "accepted": [] if drafts is None else drafts.accepted,
            "compilations": engine.compilations_after_ready,
        }
        engine.close()
    return found


def part_of(found: dict[str, dict[str, Any]]) -> Part:
    """The samples in words."""
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
                ratio = statistics.median(
                    mine / other for mine, other in zip(values, base[count], strict=True)
                )
                limit = SLOWER_LIMIT if count != "1" or name.startswith("ngram") else FASTER_LIMIT
                measures.append(Measure("  ÷ none", ratio, "", limit, "more"))
        measures.append(Measure("  compiled after ready", samples["compilations"], "", 0.0))
    notes = [
        f"Colocated; held-out text, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} greedy ones out, "
        "prefill included; steps have drafts where they are faster with them.",
        "Ratios are medians over rounds, in which the engines took turns.",
    ]
    return Part("drafts", "Drafts on the demo model", measures, notes, found)


def run(quick: bool, json_file: Path | None) -> int:
    """Measures and prints; 1 if a target is missed."""
    return run_parts("drafts", {"drafts": _measured}, ["drafts"], quick, json_file)


def _measured(quick: bool) -> Part:
    """By a process with one device."""
    arguments = ["--rounds", "1" if quick else "8"]
    worker = Worker("jaxserve.bench.drafts", arguments, {"JAX_NUM_CPU_DEVICES": "1"})
    return part_of(run_worker(worker, _SECONDS))


def main() -> None:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        result.update(measure(options.rounds))


if __name__ == "__main__":
    main()
