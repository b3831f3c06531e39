"""Mixes of requests to the engine, parts of `bench pipeline` (steps: tokens a second by pipeline)
and `bench engine` (cached prefixes, sampling from a large vocabulary). Every layout has
its own process, in which the mixes take turns, so that other work affects all alike.
"""

import functools
import random
import secrets
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.bench.random_model import random_engine
from jaxserve.bench.report import Measure, Part, median_ratio, take_turns
from jaxserve.bench.requests import DEMO, greedy, random_prompts, run_requests
from jaxserve.bench.workers import Task, run_workers
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.assembly import open_engine, open_follower
from jaxserve.fleet.bootstrap import joined
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.following import Following
from jaxserve.ports import free_port

LAYOUTS = {"colocated": ["mode=colocated"], "1A1F": ["pipeline=step"]}
"""Settings of the demo, which one process chooses for itself as 1A1F."""
STEPS = {"colocated": LAYOUTS["colocated"], "layer": ["pipeline=layer"], "step": LAYOUTS["1A1F"]}
SHARES = {1: 0.7, 8: 0.8, 32: 0.9}
"""Sequences, and the least share of the colocated demo's speed."""
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 960
SHARED_TOKENS = 864
VOCAB = 151_936
"""Tokens of Qwen3's vocabulary."""
LARGE_VOCAB = [
    *("mode=colocated", "scheduler.token_buckets=[32]"),
    *("scheduler.page_buckets=[16]", "scheduler.token_budget=32", "scheduler.max_length=256"),
]
_SECONDS = 600.0


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that run together.

    Attributes:
      prompt: tokens of each prompt.
      shared: tokens with which all prompts of all rounds begin.
      options: fields of `SamplingParams`.
      grammar: whether each request follows a grammar.
      biases: number of token ids with a bias.
    """

    sequences: int
    prompt: int = 16
    output: int = OUTPUT_TOKENS
    shared: int = 0
    options: dict[str, Any] = {}
    grammar: bool = False
    biases: int = 0


class MixFigures(msgspec.Struct):
    """Figures of one mix in one round.

    Attributes:
      rate: tokens a second of all requests, prefill included.
      core: core seconds a step.
    """

    seconds: float
    rate: float
    core: float


class EveryOther:
    """A grammar that alternates even and odd token ids, with precomputed masks: only the engine's
    share of a grammar's cost is measured."""

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


Found = dict[str, list[MixFigures]]
"""Name of a mix → its figures in every round."""


def run_mixes(
    settings: Sequence[str],
    mixes: dict[str, Any],
    rounds: int,
    vocab: int,
    joins: dict[str, Any],
    written: str,
) -> None:
    """Runs all mixes in turns, in a process of a layout.

    Args:
      vocab: vocabulary of the demo's layers with random weights; 0: the demo itself.
      joins: fields of `ProcessArguments`.
      written: file for the result of process 0. Processes of a runtime end without returning.
    """
    deployment = load_deployment(DEMO, settings)
    with joined(ProcessArguments(**joins), deployment) as peers:
        if isinstance(peers, Follower):
            Following(open_follower(deployment, peers), peers).run()
            return
        if vocab:
            config, names = read_config(deployment.model, deployment.ignored_model_keys)
            config = msgspec.structs.replace(config, vocab=vocab)
            engine = random_engine(deployment, config, names)
            engine.start()
        else:
            engine = open_engine(deployment, leader=peers)
        draw = random.Random(1)
        ways = {
            name: functools.partial(run_mix, engine, mix, draw)
            for name, mix in msgspec.convert(mixes, dict[str, Mix]).items()
        }
        found = take_turns(ways, rounds)
        compiled = engine.compilations_after_ready
        engine.close()
        tree = {"mixes": found, "compilations": compiled}
        Path(written).write_bytes(msgspec.json.encode(tree))


def run_mix(engine: Engine, mix: Mix, draw: random.Random) -> MixFigures:
    """Runs the requests of a mix. Prompts are new, apart from the shared beginning."""
    vocab = engine.model_info()["vocab_size"]
    (shared,) = random_prompts(random.Random(0), 1, mix.shared, vocab)
    own = random_prompts(draw, mix.sequences, mix.prompt - mix.shared, vocab)
    params = [
        msgspec.structs.replace(
            greedy(mix.output),
            seed=number,
            logit_bias=dict.fromkeys(range(mix.biases), -5.0),
            grammar=EveryOther(vocab) if mix.grammar else None,
            **mix.options,
        )
        for number in range(mix.sequences)
    ]
    ran = run_requests(engine, [shared + prompt for prompt in own], params)
    return MixFigures(ran.seconds, ran.rate, ran.core_seconds / mix.output)


def _measured(
    settings: Sequence[str],
    mixes: dict[str, Mix],
    rounds: int,
    vocab: int = 0,
    processes: int = 1,
) -> tuple[Found, int]:
    """Returns the figures of a layout's mixes, and the programs compiled after the start."""
    joins: dict[str, Any] = {"processes": processes, "token": secrets.token_hex(16)}
    for name in ("coordinator", "control_address"):
        joins[name] = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        file = Path(folder, "found.json")
        given = {"settings": settings, "mixes": mixes, "rounds": rounds, "vocab": vocab}
        given["written"] = f"{file}"
        each = [given | {"joins": joins | {"process_id": n}} for n in range(processes)]
        run_workers([Task(run_mixes, arguments) for arguments in each], _SECONDS)
        found = msgspec.json.decode(file.read_bytes())
    return msgspec.convert(found["mixes"], Found), found["compilations"]


def measure_steps(quick: bool) -> Iterator[Part]:
    """Measures tokens a second of 1A1F, in one process and in two with a role each: `pipeline:
    step` over `layer`, and over the colocated demo. The layouts are started in turns."""
    mixes = {f"{count} sequences": Mix(sequences=count) for count in SHARES}
    measures, details = [], {}
    for processes in (1, 2):
        rates = {(name, layout): list[float]() for name in mixes for layout in STEPS}
        for layout in (1 if quick else 5) * [*STEPS]:
            number = 1 if layout == "colocated" else processes
            found, _ = _measured(STEPS[layout], mixes, 1 if quick else 3, processes=number)
            for name, runs in found.items():
                rates[name, layout].append(statistics.median(run.rate for run in runs))
        for name, share in zip(mixes, SHARES.values(), strict=True):
            details[f"{processes}, {name}"] = of = [rates[name, layout] for layout in STEPS]
            colocated, layer, step = of
            limit, ratio = 1.3 if name == "1 sequences" else None, median_ratio(step, layer)
            title = f"{processes} processes, {name}: step ÷ "
            measures += [
                Measure(f"{title}layer", ratio, "", limit, "more"),
                Measure(f"{title}colocated", median_ratio(step, colocated), "", share, "more"),
                Measure("  layer ÷ colocated", median_ratio(layer, colocated)),
            ]
    notes = [f"Greedy, 16 tokens in and {OUTPUT_TOKENS} out each, prefill included."]
    yield Part("steps", "demo as 1A1F, a step in one dispatch", measures, notes, details)


def measure_prefixes(quick: bool) -> Iterator[Part]:
    """Measures the time to a first token with 90 % of the prompt cached."""
    cold = Mix(sequences=1, prompt=PROMPT_TOKENS, output=1)
    mixes = {"cold": cold, "shared": msgspec.structs.replace(cold, shared=SHARED_TOKENS)}
    rounds, measures, details = 1 if quick else 8, [], {}
    for layout, settings in LAYOUTS.items():
        details[layout], compiled = _measured(settings, mixes, rounds)
        first, again = (min(run.seconds for run in details[layout][name]) for name in mixes)
        measures += [
            Measure(f"{layout}: first token, cold ÷ shared", first / again, "", 4.0, "more"),
            Measure("  cold", first * 1e3, "ms"),
            Measure("  90 % shared", again * 1e3, "ms"),
            Measure("  compiled after ready", compiled, "", 0.0),
        ]
    notes = [
        f"{PROMPT_TOKENS} prompt tokens, of which {SHARED_TOKENS} shared. The best of {rounds} "
        "rounds: other work on the machine only makes a round longer.",
    ]
    yield Part("prefixes", "Shared prefixes", measures, notes, details)


def measure_sampling(quick: bool) -> Iterator[Part]:
    """Measures core time of steps with one sampling option each, relative to greedy ones."""
    counts = (1, 8, 32)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"options": {"temperature": 1.0}},
        "top_k and top_p": {"options": {"temperature": 0.7, "top_k": 20, "top_p": 0.95}},
        "penalties": {"options": {"presence_penalty": 0.5, "repetition_penalty": 1.1}},
        "300 biases": {"biases": 300},
        "grammar": {"grammar": True},
        "5 logprobs": {"options": {"logprobs": 5}},
    }
    mixes = {
        f"{count} {name}": Mix(sequences=count, prompt=1, output=12, **more)
        for count in counts
        for name, more in ways.items()
    }
    rounds, measures = 1 if quick else 8, []
    found, _ = _measured(LARGE_VOCAB, mixes, rounds, VOCAB)
    for count in counts:
        core = {name: min(run.core for run in found[f"{count} {name}"]) for name in ways}
        measures.append(Measure(f"{count} sequences: greedy", core["greedy"] * 1e3, "CPU ms"))
        measures += [
            Measure(f"  {name} ÷ greedy", core[name] / core["greedy"], "", 1.3)
            for name in list(ways)[1:]
        ]
    notes = [
        f"{VOCAB:,} tokens, the demo's layers with random weights, colocated; CPU time of a step, "
        f"over 12 tokens a sequence, prefill included; the best of {rounds} rounds each.",
    ]
    yield Part("sampling", "Tokens that are drawn", measures, notes, {"mixes": found})
