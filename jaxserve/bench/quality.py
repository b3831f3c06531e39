"""`python -m jaxserve.bench quality`: the quality loss of the number formats, and what calibration
wins back of it where it is large.

Held-out bits per byte of the demo model for every format of weights, KV cache and wire relative to
BF16, and how often each format's most likely token is BF16's. It measures the serving programs
themselves: a step takes 128 tokens of a file, one per slot, all on the pages of one sequence, so
that the logits of all of them are returned. The part `outliers` does so with a model whose
activations have outlier channels (`outliers.py`), in INT8 by rounding and by calibration; the part
`int4` with the demo's FFNs in INT4 groups.
"""

import functools
import itertools
import math
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.bench.outliers import write_outliers
from jaxserve.bench.report import Measure, Part, run_parts
from jaxserve.bench.workers import BenchError
from jaxserve.calibration.gptq import Target
from jaxserve.calibration.run import Calibration, Settings, cut
from jaxserve.checkpoint import conversion
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.runtime import Runtime
from jaxserve.fleet.assembly import build_runtime
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
WON_BACK = 80
"""Percent of what rounding to INT8 costs that calibration is to win back."""
PARTS = ("formats", "outliers", "int4")
GROUPS = (128, 32)
"""Columns that share a scale in INT4."""


class Format(NamedTuple):
    """One point of the product."""

    weights: str
    cache: str
    wire: str
    answers: str = "auto"
    """Format of the wire back."""
    products: tuple[int, ...] = ()
    """Layers whose attention multiplies in INT8."""

    def __str__(self) -> str:
        names = self[:3] if self.answers == "auto" else (*self[:3], f"answers {self.answers}")
        names = (*names, "products int8") if self.products else names
        return " × ".join("bf16" if name == "bfloat16" else name for name in names)

    @property
    def overrides(self) -> dict[str, Any]:
        """Of a deployment."""
        return {
            "attention.weights": self.weights,
            "ffn.weights": self.weights,
            "cache.format": self.cache,
            "link.dispatch": self.wire,
            "link.combine": self.answers,
            "attention.int8_products": list(self.products),
        }


BASE = Format("bfloat16", "bfloat16", "bfloat16")
PLAIN = {"attention.weights": "auto", "ffn.weights": "auto"}


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


def run(only: Sequence[str], quick: bool, json_file: Path | None, config: Path = DEMO) -> int:
    """Measures the chosen parts; 1 if a format costs more than 0.5 % or calibration wins back less
    than 80 %."""
    conversion.quieten_libraries()
    parts = {
        "formats": functools.partial(measure, config=config),
        "outliers": functools.partial(measure_outliers, config=config),
        "int4": functools.partial(measure_int4, config=config),
    }
    return run_parts("quality", parts, only, quick, json_file)


def measure(quick: bool, config: Path) -> Part:
    """Scores every format on the same texts."""
    folder = Path(load_deployment(config).model)
    texts = held_out(folder, files=2 if quick else 24, tokens=256 if quick else 1024)
    formats = [Format(a, b, c) for a, b, c in itertools.product(FORMATS, repeat=3)]
    if quick:
        formats = [format for format in formats if len(set(format[:3])) == 1]
    formats.append(Format("bfloat16", "int8", "bfloat16", products=every_layer(folder)))
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
    return Part("formats", "what the formats cost", measures, notes, details)


def measure_outliers(quick: bool, config: Path) -> Part:
    """Scores the model with outlier channels, rounded to INT8 and calibrated."""
    source = Path(load_deployment(config).model)
    texts = held_out(source, files=2 if quick else 24, tokens=256 if quick else 1024)
    formats = [Format("int8", other, other) for other in ("bfloat16", "int8")]
    formats.append(Format("int8", "int8", "int8", "int8"))
    formats.append(Format("int8", "int8", "int8", products=every_layer(source)))
    with tempfile.TemporaryDirectory() as directory:
        wide, calibrated = Path(directory) / "outliers", Path(directory) / "int8"
        channels = write_outliers(source, wide)
        settings = Settings(tokens=2048 if quick else 16384)
        text = calibration_text(source, settings.tokens)
        calibration = Calibration(settings, cut(text, settings, len(text)))
        conversion.convert(wide, calibrated, "int8", calibration=calibration)

        def scored(folder: Path, format: Format) -> Score:
            found = score(build_runtime(deployment(config, texts, format, folder)), texts)
            print(f"{folder.name}, {format}: {found.bits:.4f}", file=sys.stderr, flush=True)
            return found

        demo, base = scored(source, BASE), scored(wide, BASE)
        pairs = [(format, scored(wide, format), scored(calibrated, format)) for format in formats]
    measures = [
        Measure("BF16: bits a byte", base.bits),
        Measure("  without the outliers", demo.bits),
    ]
    details = {}
    for format, nearest, better in pairs:
        losses = [100 * (found.bits / base.bits - 1) for found in (nearest, better)]
        agreement = [100 * float(np.mean(s.choices == base.choices)) for s in (nearest, better)]
        measures += [
            Measure(f"{format}, rounded to the nearest: more than BF16", losses[0], "%"),
            Measure("  same greedy token", agreement[0], "%"),
            Measure("  calibrated: more than BF16", losses[1], "%"),
            Measure("  same greedy token", agreement[1], "%"),
            Measure("  won back", 100 * (1 - losses[1] / losses[0]), "%", WON_BACK, "more"),
        ]
        details[str(format)] = {"rounded": nearest.bits, "calibrated": better.bits}
    notes = [
        f"weights × KV cache × wire; {channels} channels are up to 100 times wider.",
        f"Calibrated on {settings.tokens:,} tokens of other files.",
    ]
    return Part("outliers", "INT8 where activations have outliers", measures, notes, details)


def measure_int4(quick: bool, config: Path) -> Part:
    """Scores the model with FFNs in INT4, rounded and calibrated, against FP32 and against FFNs in
    INT8; the routed experts' rows as they are (W4A16) and in INT8 (W4A8)."""
    source = Path(load_deployment(config).model)
    texts = held_out(source, files=2 if quick else 24, tokens=256 if quick else 1024)
    settings = Settings(tokens=2048 if quick else 16384)
    text = calibration_text(source, settings.tokens)

    def scored(name: str, overrides: dict[str, Any], folder: Path | None = None) -> Score:
        made = deployment(config, texts, BASE, folder, {**PLAIN, **overrides})
        found = score(build_runtime(made), texts)
        print(f"{name}: {found.bits:.4f}", file=sys.stderr, flush=True)
        return found

    wide = {"dtype": "float32", "cache.format": "float32", "link.dispatch": "float32"}
    exact = scored("float32", wide)
    scores = {
        "bf16": scored("bf16", {}),
        "FFN int8, rounded": scored("int8", {"ffn.weights": "int8"}),
    }
    with tempfile.TemporaryDirectory() as directory:
        for group in GROUPS[: 1 if quick else 2]:
            target = Target(4, group, int8_rows=False)
            calibration = Calibration(settings, cut(text, settings, len(text)), target)
            for name, own in (("rounded", None), ("calibrated", calibration)):
                folder = Path(directory) / f"{name}{group}"
                conversion.convert(source, folder, "int4", group=group, calibration=own)
                name = f"FFN int4 in groups of {group}, {name}"
                scores[name] = scored(name, {}, folder)
                name += ", experts' rows int8"
                scores[name] = scored(name, {"ffn.expert_rows": "blocks"}, folder)
    eight = scores["FFN int8, rounded"]
    measures = [Measure("float32: bits a byte", exact.bits)]
    for name, found in scores.items():
        agreement = float(np.mean(found.choices == exact.choices))
        measures += [
            Measure(f"{name}: more than FP32", 100 * (found.bits / exact.bits - 1), "%"),
            Measure("  more than INT8", 100 * (found.bits / eight.bits - 1), "%"),
            Measure("  same greedy token", 100 * agreement, "%"),
        ]
    notes = [
        "Attention, cache and wire are in BF16; INT8 FFNs quantise rows, INT4 ones where said.",
        f"Calibrated on {settings.tokens:,} tokens of other files.",
    ]
    details = {name: {"bits": found.bits} for name, found in scores.items()}
    return Part("int4", "FFNs in INT4", measures, notes, details)


def every_layer(folder: Path) -> tuple[int, ...]:
    """The layers of a model."""
    return tuple(range(read_config(folder)[0].layers))


def calibration_text(folder: Path, tokens: int) -> list[int]:
    """The beginnings of files of the standard library that are not held out.

    Raises:
      BenchError: the list of those that are is not there.
    """
    tokenizer = Tokenizer.from_folder(folder)
    library = Path(sysconfig.get_path("stdlib"))
    try:
        held = set((folder / "held_out.txt").read_text().split())
        found: list[int] = []
        for path in sorted(library.glob("*.py")):
            if path.name not in held:
                found += tokenizer.encode(path.read_text(encoding="utf-8"))[:1024]
            if len(found) >= 4 * tokens:
                break
    except OSError as error:
        raise BenchError(f"quality: no text to calibrate on: {error}") from None
    return found


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


def deployment(
    config: Path,
    texts: Sequence[Text],
    format: Format,
    folder: Path | None = None,
    more: dict[str, Any] | None = None,
) -> Any:
    """Colocated, BF16 but for the format, one bucket; it quantises where the link would.

    Args:
      folder: of a model; None: the deployment's own.
      more: keys that take precedence.
    """
    pages = -(-max(len(text.token_ids) for text in texts) // PAGE)
    return load_deployment(
        config,
        {
            **format.overrides,
            **({} if folder is None else {"model": str(folder)}),
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
            **(more or {}),
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
