"""A model folder without any tuning, beside Hugging Face transformers and llama.cpp on this CPU.

`python -m jaxserve.bench compare`: all continue the same prompts greedily, in processes of their
own that take turns: short prompts at 1, 8 and 32 sequences, where decoding takes the time, and
single prompts of 512, 4,096 and 16,384 tokens up to their first token. Ours is `LLM(folder)` with
the sizes that it chooses. The others are measured where the interpreter that `--python` names has
them: PyTorch and transformers; llama-cpp-python and gguf. The model is `--model`, without
llama.cpp, which reads other files; or 110 M of random weights in BF16, as models are published.

Ours keep these weights and compute in FP32. Transformers makes FP32 weights of them when it loads
and computes the same sums, so texts are compared; with `--theirs bfloat16` it computes in BF16.
llama.cpp keeps the weights and rounds the rows that it multiplies to BF16. `--stored float32`
writes FP32 tensors, of which all read four bytes a weight.
"""

import argparse
import contextlib
import functools
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.bench import compare_others
from jaxserve.bench.compare_others import SIDES
from jaxserve.bench.load import write_checkpoint
from jaxserve.bench.report import (
    Measure,
    Part,
    add_report_arguments,
    count,
    median_ratio,
    publish,
    take_turns,
)
from jaxserve.bench.requests import greedy, random_prompts
from jaxserve.bench.workers import Helper, Task, asked, say
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.command_line import add_options
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM

HELP = "a model folder beside transformers and llama.cpp"


class Batch(NamedTuple):
    """Prompts that both sides continue at the same time.

    Attributes:
      sequences: number of prompts.
      prompt: tokens of each.
      output: greedy tokens after each.
      targets: our tokens a second ÷ those of each other side, at least.
    """

    sequences: int
    prompt: int
    output: int
    targets: Mapping[str, float]

    @property
    def name(self) -> str:
        if self.output > 1:
            return f"{self.sequences} sequences"
        return f"a prompt of {self.prompt}"

    @property
    def tokens(self) -> int:
        """Tokens that its speed counts: generated ones, or those of the prompt."""
        return self.sequences * (self.output if self.output > 1 else self.prompt)


TARGETS = {1: (1.0, 0.8), 8: (1.0, 1.1), 32: (2.0, 1.1)}
"""Targets of decoding by the number of sequences: ÷ transformers, ÷ llama.cpp."""
BATCHES = [Batch(n, 16, 64, dict(zip(SIDES, TARGETS[n], strict=True))) for n in TARGETS]
BATCHES += [Batch(1, prompt, 1, dict.fromkeys(SIDES, 1.2)) for prompt in (512, 4096, 16384)]
QUICK = [BATCHES[0]._replace(output=8), BATCHES[1]._replace(output=8), BATCHES[3]]
STORED = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
SECONDS = 3600.0

CONFIG = json.loads(Path(__file__).with_name("compare_model.json").read_text())
"""Qwen3-MoE, 119 M parameters of which a token meets 42 M beside its row of the embedding."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    add_report_arguments(parser)
    add_options(parser, Path(__file__).with_suffix(".yaml"), {"count": count})
    parser.set_defaults(python=sys.executable)


def run(options: argparse.Namespace) -> int:
    """Measures both sides; 1 if a target is missed.

    Raises:
      BenchError: a side died; ConfigError: `--model` or `--python` is wrong.
    """
    if options.model is not None and not (options.model / "config.json").is_file():
        raise ConfigError(f"--model {options.model}: no config.json there")
    others = sides_of(options.python)
    if options.model is not None:
        others = [name for name in others if name != "llama.cpp"]
    with tempfile.TemporaryDirectory(prefix="jaxserve-compare-") as made:
        folder = options.model or Path(made)
        if options.model is None:
            tree = CONFIG | {"torch_dtype": options.stored}
            write_checkpoint(folder, tree, file_bytes=1 << 30, dtype=STORED[options.stored])
        return publish("compare", measure(folder, others, options), options)


def measure(folder: Path, others: Sequence[str], options: argparse.Namespace) -> Iterator[Part]:
    """Runs all sides in turns."""
    batches, rounds = (QUICK, 1) if options.quick else (BATCHES, options.rounds)
    vocab = read_config(folder)[0].vocab
    ours = Task(generate, {"folder": str(folder), "overrides": options.set})
    theirs = {
        name: [options.python, compare_others.__file__, name, str(folder), options.theirs]
        for name in others
    }
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(Helper(command, SECONDS))
            for name, command in {"ours": ours.command(), **theirs}.items()
        }
        for name, side in sides.items():
            found[name] = side.answer()
        longest = found["ours"]["longest"]
        fitting = [batch for batch in batches if batch.prompt + batch.output <= longest]
        for batch in fitting:
            found[batch.name] = _rounds(sides, batch, rounds, vocab)
    stored = json.loads((folder / "config.json").read_text()).get("torch_dtype", "not said")
    dtypes = f"ours in FP32, transformers in {options.theirs}, tensors {stored}"
    yield part_of(found, fitting, dtypes)


def part_of(found: dict[str, Any], batches: Sequence[Batch], dtypes: str) -> Part:
    """Builds the report of the seconds of every round of each batch, by its name.

    Args:
      dtypes: of both sides and of the folder's tensors, for the notes.
    """
    measures, notes = [], []
    for batch in batches:
        rounds = found[batch.name]
        best = batch.tokens / min(rounds["ours"])
        measures.append(Measure(f"ours, {batch.name}", best, "tokens/s"))
        for name, target in batch.targets.items():
            if name not in found:
                continue
            theirs = batch.tokens / min(rounds[name])
            ratio = median_ratio(rounds[name], rounds["ours"])
            measures.append(Measure(f"  {name}", theirs, "tokens/s"))
            measures.append(Measure(f"  ours ÷ {name}, median", ratio, "", target, "more"))
            notes.append(
                f"{batch.name}, {name}: {rounds['same'][name]:.1%} of the texts' tokens are the "
                "same up to the first that differs"
            )
    started = found["ours"]["seconds"]
    measures.append(Measure("our start, load and compile", started, "s"))
    said = [f"{one} {it}" for name in SIDES for one, it in found.get(name, {}).items()]
    other = ", ".join(said) or "none here"
    notes += [
        f"{dtypes}; tokens/s of the best round of {len(found[batches[0].name]['ours'])}, of "
        f"prompts up to the first token; others: {other}",
        f"ours: {found['ours']['sizes']}",
    ]
    return Part("compare", "LLM(folder) beside others", measures, notes, dict(found))


def sides_of(python: str) -> list[str]:
    """Returns the sides whose packages an interpreter has.

    Raises:
      ConfigError: it does not start.
    """
    seek = [python, compare_others.__file__]
    try:
        told = subprocess.run(seek, timeout=60, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--python {python}: {error.strerror}") from None
    return told.stdout.split()


def _rounds(sides: Mapping[str, Helper], batch: Batch, rounds: int, vocab: int) -> dict[str, Any]:
    """Seconds of every round of each side, in turns, after one that warms up; and for each other
    side the share of tokens that are ours up to the first difference."""
    numbers = {name: itertools.count() for name in sides}  # each side gets the same prompts

    def ask(name: str) -> dict[str, Any]:
        draw = random.Random(f"{batch.name} {next(numbers[name])}")
        prompts = random_prompts(draw, batch.sequences, batch.prompt, vocab)
        return sides[name].ask({"prompts": prompts, "tokens": batch.output})

    ways = {name: functools.partial(ask, name) for name in sides}
    answers = take_turns(ways, rounds)
    seconds = {name: [one["seconds"] for one in found] for name, found in answers.items()}
    return seconds | {"same": {name: _same(answers["ours"], answers[name]) for name in answers}}


def _same(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> float:
    """The share of tokens in front of the first of a text that differs."""
    pairs = [
        pair
        for mine, other in zip(ours, theirs, strict=True)
        for pair in zip(mine["tokens"], other["tokens"], strict=True)
    ]
    same = (
        itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=True))
        for pair in pairs
    )
    return sum(map(len, map(list, same))) / sum(len(mine) for mine, _ in pairs)


def generate(folder: str, overrides: Sequence[str]) -> None:
    """Our side, in a helper."""
    start = time.perf_counter()
    with LLM(folder, ["scheduler.compile_first=all", *overrides]) as llm:
        limits = llm.deployment.scheduler
        sizes = f"{llm.deployment.mode}, {limits.slots} slots, steps of {limits.token_buckets} "
        sizes += f"tokens, {llm.deployment.cache.pages} pages"
        seconds = time.perf_counter() - start
        say({"seconds": seconds, "sizes": sizes, "longest": limits.max_length})
        for question in asked():
            start = time.perf_counter()
            outputs = llm.generate(question["prompts"], greedy(question["tokens"]))
            seconds = time.perf_counter() - start
            say({"seconds": seconds, "tokens": [output.token_ids for output in outputs]})
