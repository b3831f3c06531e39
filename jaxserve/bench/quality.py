"""`python -m jaxserve.bench quality`: the quality loss of the number formats.

Held-out bits per byte of the demo model for every format of weights, KV cache and wire relative to
BF16, and how often each format's most likely token is BF16's. It measures the serving programs
themselves: a step takes 128 tokens of a file, one per slot, all on the pages of one sequence, so
that the logits of all of them are returned.
"""

import functools
import itertools
import math
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.bench.report import Measure, Part, run_parts
from jaxserve.bench.workers import BenchError
from jaxserve.config.deployment import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.build import Runtime, build_runtime
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import SequenceRow, plan_of_rows
from jaxserve.text.tokenizer import Tokenizer

DEMO = CONFIGS / "demo.yaml"
FORMATS = ("bfloat16", "fp8", "int8")
STEP = 128
"""Tokens a step, and slots."""
PAGE = 16
LIMIT = 0.5
"""Percent of BF16's bits a byte that a format may cost."""


class Format(NamedTuple):
    """One point of the product."""

    weights: str
    cache: str
    wire: str

    def __str__(self) -> str:
        return " × ".join("bf16" if name == "bfloat16" else name for name in self)

    @property
    def overrides(self) -> dict[str, Any]:
        """Of a deployment."""
        return {
            "attention.weights": self.weights,
            "ffn.weights": self.weights,
            "cache.format": self.cache,
            "link.dispatch": self.wire,
        }


BASE = Format("bfloat16", "bfloat16", "bfloat16")


class Text(NamedTuple):
    """The beginning of a held-out file."""

    token_ids: list[int]
    size: int
    """Bytes of its text."""


class Score(NamedTuple):
    """The scores of a model on all texts."""

    bits: float
    """A byte."""
    choices: np.ndarray
    """int [tokens]: the best next token at every position."""


def run(quick: bool, json_file: Path | None, config: Path = DEMO) -> int:
    """Measures all formats; 1 if one costs more than 0.5 %."""
    parts = {"quality": functools.partial(measure, config=config)}
    return run_parts("quality", parts, ["quality"], quick, json_file)


def measure(quick: bool, config: Path) -> Part:
    """Scores every format on the same texts."""
    folder = Path(load_deployment(config).model)
    texts = held_out(folder, files=2 if quick else 24, tokens=256 if quick else 1024)
    formats = [Format(*names) for names in itertools.product(FORMATS, repeat=3)]
    if quick:
        formats = [format for format in formats if len(set(format)) == 1]
    scores: dict[Format, Score] = {}
    for format in [BASE, *(format for format in formats if format != BASE)]:
        scores[format] = score(build_runtime(deployment(config, texts, format)), texts)
        print(f"{format}: {scores[format].bits:.4f}", file=sys.stderr, flush=True)
    measures = []
    for format in formats:
        ratio = scores[format].bits / scores[BASE].bits
        agreement = float(np.mean(scores[format].choices == scores[BASE].choices))
        measures += [
            Measure(f"{format}: bits a byte", scores[format].bits),
            Measure("  more than BF16", 100 * (ratio - 1), "%", LIMIT if format != BASE else None),
            Measure("  same greedy token", 100 * agreement, "%"),
        ]
    size, tokens = sum(text.size for text in texts), sum(len(text.token_ids) for text in texts)
    notes = [
        "weights × KV cache × wire.",
        f"{len(texts)} held-out files, {tokens:,} tokens, {size:,} bytes: the beginning of each.",
    ]
    details = {
        str(format): {"bits": found.bits, "ratio": found.bits / scores[BASE].bits}
        for format, found in scores.items()
    }
    return Part("quality", "what the formats cost", measures, notes, details)


def held_out(folder: Path, files: int, tokens: int) -> list[Text]:
    """The beginnings of the held-out files that are named in the model's folder.

    Raises:
      BenchError: the list or a file is not there.
    """
    tokenizer = Tokenizer.from_folder(folder)
    texts = []
    library = Path(sysconfig.get_path("stdlib"))
    try:
        names = (folder / "held_out.txt").read_text().split()
        for name in names[:files]:
            ids = tokenizer.encode((library / name).read_text())[: tokens + 1]
            texts.append(Text(ids, len(tokenizer.decode(ids).encode())))
    except OSError as error:
        raise BenchError(f"quality: no held-out text: {error}") from None
    return texts


def deployment(config: Path, texts: Sequence[Text], format: Format) -> Any:
    """Colocated, BF16 but for the format, one bucket; it quantises where the link would."""
    pages = -(-max(len(text.token_ids) for text in texts) // PAGE)
    return load_deployment(
        config,
        {
            **format.overrides,
            "mode": "colocated",
            "dtype": "bfloat16",
            "lanes": 1,
            "cache.page_size": PAGE,
            "cache.pages": pages,
            "scheduler.slots": STEP,
            "scheduler.max_length": pages * PAGE,
            "scheduler.token_budget": STEP,
            "scheduler.token_buckets": [STEP],
            "scheduler.page_buckets": [pages],
        },
    )


def score(runtime: Runtime, texts: Sequence[Text]) -> Score:
    """Bits of every token but the first of each text, and the choices."""
    nats, choices = 0.0, []
    for text in texts:
        ids = np.asarray(text.token_ids)
        for start, logits in _logits(runtime, text.token_ids):
            targets = ids[start + 1 : start + 1 + len(logits)]
            logits = logits[: len(targets)].astype(np.float64)
            best = logits.max(axis=1)
            total = best + np.log(np.exp(logits - best[:, None]).sum(axis=1))
            nats += float(np.sum(total - logits[np.arange(len(targets)), targets]))
            choices.append(logits.argmax(axis=1))
    size = sum(text.size for text in texts)
    return Score(nats / math.log(2) / size, np.concatenate(choices))


def _logits(runtime: Runtime, token_ids: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(first position, logits [tokens, vocab]) of each step's tokens."""
    driver, (bucket,) = runtime.driver, runtime.buckets
    for start in range(0, len(token_ids), STEP):
        piece = token_ids[start : start + STEP]
        rows = [
            SequenceRow(
                slot=slot,
                token_ids=[token_id],
                kv_length=start + slot + 1,
                page_ids=list(range(bucket.pages)),
                sample=True,
            )
            for slot, token_id in enumerate(piece)
        ]
        slots = runtime.deployment.scheduler.slots
        driver.begin(plan_of_rows(0, start, bucket, [rows], slots=slots))
        finished = driver.advance()
        assert isinstance(finished, Finished)
        yield start, np.asarray(jax.block_until_ready(finished.logits))[: len(piece)]
