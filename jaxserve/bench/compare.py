"""A model folder without any tuning, beside Hugging Face transformers on this CPU.

`python -m jaxserve.bench compare`: both continue the same prompts greedily, in processes of their
own that take turns: short prompts at 1, 8 and 32 sequences, where decoding takes the time, and
single prompts of 512, 4,096 and 16,384 tokens up to their first token. Ours is `LLM(folder)` with
the sizes that it chooses. Transformers is optional: `--python` names an interpreter that has it and
PyTorch, and without one only ours is measured. The model is `--model`, or 110 M of random weights.

The folder's tensors are BF16, as models are published. Transformers is asked for FP32 and makes
FP32 weights of them when it loads; ours keep them and convert in the products, so both compute the
same sums, and their texts are compared. `--stored float32` writes FP32 tensors: then both keep, and
read, four bytes a weight. `--theirs bfloat16` has transformers compute in BF16, as far as the CPU
does: then texts differ.
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

from jaxserve.bench import compare_transformers
from jaxserve.bench.load import write_checkpoint
from jaxserve.bench.report import Measure, Part, add_report_arguments, count, median_ratio, publish
from jaxserve.bench.requests import greedy, random_prompts
from jaxserve.bench.timing import take_turns
from jaxserve.bench.workers import Helper, Task, asked, say
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.command_line import add_options
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM

HELP = "a model folder beside transformers"


class Batch(NamedTuple):
    """Prompts that both sides continue at the same time.

    Attributes:
      sequences: number of prompts.
      prompt: tokens of each.
      output: greedy tokens after each.
      target: our tokens a second ÷ transformers', at least.
    """

    sequences: int
    prompt: int
    output: int
    target: float

    @property
    def name(self) -> str:
        if self.output > 1:
            return f"{self.sequences} sequences"
        return f"a prompt of {self.prompt}"

    @property
    def tokens(self) -> int:
        """Tokens that its speed counts: generated ones, or those of the prompt."""
        return self.sequences * (self.output if self.output > 1 else self.prompt)


BATCHES = [Batch(1, 16, 64, 1.0), Batch(8, 16, 64, 1.0), Batch(32, 16, 64, 2.0)]
BATCHES += [Batch(1, prompt, 1, 1.2) for prompt in (512, 4096, 16384)]
QUICK = [Batch(1, 16, 8, 1.0), Batch(8, 16, 8, 1.0), Batch(1, 512, 1, 1.2)]
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
    with_theirs = has_transformers(options.python)
    with tempfile.TemporaryDirectory(prefix="jaxserve-compare-") as made:
        folder = options.model or Path(made)
        if options.model is None:
            tree = CONFIG | {"torch_dtype": options.stored}
            write_checkpoint(folder, tree, file_bytes=1 << 30, dtype=STORED[options.stored])
        return publish("compare", measure(folder, with_theirs, options), options)


def measure(folder: Path, with_theirs: bool, options: argparse.Namespace) -> Iterator[Part]:
    """Runs both sides in turns."""
    batches, rounds = (QUICK, 1) if options.quick else (BATCHES, options.rounds)
    vocab = read_config(folder)[0].vocab
    ours = Task(generate, {"folder": str(folder), "overrides": options.set})
    theirs = [options.python, compare_transformers.__file__, str(folder), options.theirs]
    found: dict[str, Any] = {"ours": None, "transformers": None}
    with contextlib.ExitStack() as stack:
        sides = {"ours": stack.enter_context(Helper(ours.command(), SECONDS))}
        if with_theirs:
            sides["transformers"] = stack.enter_context(Helper(theirs, SECONDS))
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
        if rounds["transformers"]:
            theirs = batch.tokens / min(rounds["transformers"])
            ratio = median_ratio(rounds["transformers"], rounds["ours"])
            measures.append(Measure("  transformers", theirs, "tokens/s"))
            measures.append(
                Measure("  ours ÷ transformers, median", ratio, "", batch.target, "more"),
            )
            notes.append(
                f"{batch.name}: {rounds['same']:.1%} of the texts' tokens are the same up to the "
                "first that differs"
            )
    started = found["ours"]["seconds"]
    measures.append(Measure("our start, load and compile", started, "s"))
    said = found["transformers"]
    other = f"torch {said['torch']}, transformers {said['transformers']}" if said else "none here"
    notes += [
        f"{dtypes}; tokens/s of the best round of {len(found[batches[0].name]['ours'])}, of "
        f"prompts up to the first token; the other side: {other}",
        f"ours: {found['ours']['sizes']}",
    ]
    return Part("compare", "LLM(folder) beside transformers", measures, notes, dict(found))


def has_transformers(python: str) -> bool:
    """True if an interpreter has both packages."""
    seek = "import importlib.util as u; raise SystemExit(not(u.find_spec('torch') and "
    seek += "u.find_spec('transformers')))"
    try:
        return subprocess.run([python, "-c", seek], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise ConfigError(f"--python {python}: {error.strerror}") from None


def _rounds(sides: Mapping[str, Helper], batch: Batch, rounds: int, vocab: int) -> dict[str, Any]:
    """Seconds of every round of each side, in turns, after one that warms up; and the share of
    tokens that are the same up to the first difference."""
    numbers = {name: itertools.count() for name in sides}  # each side gets the same prompts

    def ask(name: str) -> dict[str, Any]:
        draw = random.Random(f"{batch.name} {next(numbers[name])}")
        prompts = random_prompts(draw, batch.sequences, batch.prompt, vocab)
        return sides[name].ask({"prompts": prompts, "tokens": batch.output})

    ways = {name: functools.partial(ask, name) for name in sides}
    answers = {"transformers": [], **take_turns(ways, rounds)}
    same = [
        next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), batch.output)
        for ours, theirs in zip(answers["ours"], answers["transformers"], strict=False)
        for mine, other in zip(ours["tokens"], theirs["tokens"], strict=True)
    ]
    seconds = {name: [one["seconds"] for one in found] for name, found in answers.items()}
    return seconds | {"same": sum(same) / (batch.output * len(same)) if same else 1.0}


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
