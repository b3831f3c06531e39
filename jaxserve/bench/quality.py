"""`python -m jaxserve.bench quality`: the quality loss of the number formats, and how much
calibration wins back.

Held-out bits per byte of the demo model for every format of weights, KV cache and wire relative to
BF16, and how often each format's most likely token is BF16's. It measures the serving programs
themselves: a step takes 128 tokens of a file, one per slot, all on the pages of one sequence, so
that the logits of all 128 are returned. The part `outliers` does so with a model whose
activations have outlier channels, in INT8 by rounding and by calibration; the part `int4` with the
demo's FFNs in INT4 groups.

Trained on little text, the demo model has no channels that stand out; in models of real size
activations are 10 to 100 times wider than weights in a few channels (xDeepServe §4.7, figure 15).
`write_outliers` makes a few channels behind every norm, of every value head and of every FFN's
hidden rows 32 to 100 times as wide as the median channel where they are written, and makes up for
that where they are read. The factors are powers of two: the model is the same function, bit for bit
in FP32 and in BF16, and only its quantisation is worse.
"""

import itertools
import math
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.bench.random_model import one_bucket
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import DEMO
from jaxserve.bench.workers import BenchError
from jaxserve.calibration.gptq import INT8, RoundingTarget
from jaxserve.calibration.run import CalibrationSettings, CalibrationText, cut
from jaxserve.checkpoint import conversion
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.runtime import Runtime
from jaxserve.fleet.assembly import build_runtime
from jaxserve.model.attention.kv_cache import ring_pages
from jaxserve.roles.sampling import Finished
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows
from jaxserve.text.tokenizer import Tokenizer

FORMATS = ("bfloat16", "fp8", "int8")
STEP = 128
"""Tokens a step, and slots."""
PAGE = 16
LIMIT = 0.5
"""Percent of BF16's bits a byte that a format may cost."""
WON_BACK = 80
"""Target: percent of the loss of rounding to INT8 that calibration wins back."""
GROUPS = (128, 32)
"""Columns that share a scale in INT4."""
LIBRARY = Path(sysconfig.get_path("stdlib"))
"""Folder of the texts."""


class Format(NamedTuple):
    """Formats of one deployment."""

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
        """Keys of a deployment."""
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
    """Beginning of a held-out file."""

    token_ids: list[int]
    size: int
    """Bytes of the text."""


class Score(NamedTuple):
    """Scores of a model on all texts."""

    bits: float
    """Bits a byte."""
    choices: np.ndarray
    """int [tokens]: the best next token at every position."""


class Judge:
    """Scores deployments of the demo model, or of folders made from it, on the same held-out texts.

    Attributes:
      folder: folder of the demo model.
      texts: held-out texts.
    """

    def __init__(self, quick: bool):
        conversion.quieten_libraries()
        self.folder = Path(load_deployment(DEMO).model)
        self.texts = held_out(self.folder, 2 if quick else 24, 256 if quick else 1024)
        self._settings = CalibrationSettings(tokens=2048 if quick else 16384)

    def __call__(
        self, name: str, format: Format, folder: Path | None = None, more: Mapping[str, Any] = {}
    ) -> Score:
        """Scores one deployment, and prints the score; see `deployment` for the arguments."""
        made = deployment(self.texts, format, folder, more)
        found = score(build_runtime(made), self.texts)
        print(f"{name}: {found.bits:.4f}", file=sys.stderr, flush=True)
        return found

    def calibration(self, target: RoundingTarget = INT8) -> CalibrationText:
        """Text to calibrate on, from files that are not held out."""
        text = calibration_text(self.folder, self._settings.tokens)
        return CalibrationText(self._settings, cut(text, self._settings, len(text)), target)

    @property
    def note(self) -> str:
        """Describes the text of a calibration."""
        return f"Calibrated on {self._settings.tokens:,} tokens of other files."


def _lost(
    name: str, score: Score, base: Score, of: str = "BF16", limit: float | None = None
) -> list[Measure]:
    """Returns the measures of a score: bits a byte beyond those of `base`, which is called `of`;
    and the share of positions at which both choose the same token."""
    more, same = 100 * (score.bits / base.bits - 1), 100 * np.mean(score.choices == base.choices)
    return [
        Measure(f"{name}more than {of}", more, "%", limit),
        Measure("  same greedy token", float(same), "%"),
    ]


def measure(quick: bool) -> Iterator[Part]:
    """Scores every format on the same texts."""
    judge = Judge(quick)
    formats = [Format(a, b, c) for a, b, c in itertools.product(FORMATS, repeat=3)]
    if quick:
        formats = [format for format in formats if len(set(format[:3])) == 1]
    formats.append(Format("bfloat16", "int8", "bfloat16", products=every_layer(judge.folder)))
    scores = {format: judge(str(format), format) for format in formats}
    base = scores[BASE]
    measures = []
    for format, found in scores.items():
        limit = LIMIT if format != BASE else None
        measures.append(Measure(f"{format}: bits a byte", found.bits))
        measures += _lost("  ", found, base, limit=limit)
    size, tokens = sum(t.size for t in judge.texts), sum(len(t.token_ids) for t in judge.texts)
    notes = [
        "weights × KV cache × wire.",
        f"The beginnings of {len(judge.texts)} held-out files: {tokens:,} tokens, {size:,} bytes.",
    ]
    details = {
        str(format): {"bits": found.bits, "ratio": found.bits / base.bits}
        for format, found in scores.items()
    }
    yield Part("formats", "quality loss of the formats", measures, notes, details)


def measure_outliers(quick: bool) -> Iterator[Part]:
    """Scores the model with outlier channels, rounded to INT8 and calibrated."""
    judge = Judge(quick)
    formats = [Format("int8", other, other) for other in ("bfloat16", "int8")]
    formats.append(Format("int8", "int8", "int8", "int8"))
    formats.append(Format("int8", "int8", "int8", products=every_layer(judge.folder)))
    with tempfile.TemporaryDirectory() as directory:
        wide, calibrated = Path(directory) / "outliers", Path(directory) / "int8"
        channels = write_outliers(judge.folder, wide)
        conversion.convert(wide, calibrated, "int8", calibration=judge.calibration())

        def scored(folder: Path, format: Format) -> Score:
            return judge(f"{folder.name}, {format}", format, folder)

        demo, base = scored(judge.folder, BASE), scored(wide, BASE)
        pairs = [(format, scored(wide, format), scored(calibrated, format)) for format in formats]
    measures = [
        Measure("BF16: bits a byte", base.bits),
        Measure("  without the outliers", demo.bits),
    ]
    details = {}
    for format, nearest, better in pairs:
        lost = _lost(f"{format}, rounded to the nearest: ", nearest, base)
        left = _lost("  calibrated: ", better, base)
        back = 100 * (1 - left[0].value / lost[0].value)
        measures += [*lost, *left, Measure("  won back", back, "%", WON_BACK, "more")]
        details[str(format)] = {"rounded": nearest.bits, "calibrated": better.bits}
    told = f"weights × KV cache × wire; {channels} channels are up to 100 times wider."
    notes = [told, judge.note]
    yield Part("outliers", "INT8 where activations have outliers", measures, notes, details)


def measure_int4(quick: bool) -> Iterator[Part]:
    """Scores the model with FFNs in INT4, rounded and calibrated, against FP32 and against FFNs in
    INT8; the routed experts' rows as they are (W4A16) and in INT8 (W4A8)."""
    judge = Judge(quick)

    def scored(name: str, more: dict[str, Any], folder: Path | None = None) -> Score:
        return judge(name, BASE, folder, PLAIN | more)

    wide = {"dtype": "float32", "cache.format": "float32", "link.dispatch": "float32"}
    exact = scored("float32", wide)
    scores = {
        "bf16": scored("bf16", {}),
        "FFN int8, rounded": scored("int8", {"ffn.weights": "int8"}),
        "FFN mxfp4, rounded": scored("mxfp4", {"ffn.weights": "mxfp4"}),
    }
    with tempfile.TemporaryDirectory() as directory:
        for group in GROUPS[: 1 if quick else 2]:
            calibration = judge.calibration(RoundingTarget(4, group, int8_rows=False))
            for name, own in (("rounded", None), ("calibrated", calibration)):
                folder = Path(directory) / f"{name}{group}"
                conversion.convert(judge.folder, folder, "int4", group=group, calibration=own)
                name = f"FFN int4 in groups of {group}, {name}"
                scores[name] = scored(name, {}, folder)
                name += ", experts' rows int8"
                scores[name] = scored(name, {"ffn.expert_rows": "blocks"}, folder)
    eight = scores["FFN int8, rounded"]
    measures = [Measure("float32: bits a byte", exact.bits)]
    for name, found in scores.items():
        more, same = _lost(f"{name}: ", found, exact, "FP32")
        measures += [more, _lost("  ", found, eight, "INT8")[0], same]
    notes = [
        "Attention, cache and wire are in BF16; INT8 FFNs quantise rows, INT4 ones where said.",
        judge.note,
    ]
    details = {name: {"bits": found.bits} for name, found in scores.items()}
    yield Part("int4", "FFNs in INT4", measures, notes, details)


def every_layer(folder: Path) -> tuple[int, ...]:
    """Returns the numbers of all layers of a model."""
    return tuple(range(read_config(folder)[0].layers))


def calibration_text(folder: Path, tokens: int) -> list[int]:
    """Returns the token ids of the beginnings of files of the standard library that are not held
    out.

    Raises:
      BenchError: the list of held-out files is missing.
    """
    tokenizer, found = Tokenizer.from_folder(folder), list[int]()
    held = set(_read(folder / "held_out.txt").split())
    for path in (path for path in sorted(LIBRARY.glob("*.py")) if path.name not in held):
        found += tokenizer.encode(_read(path))[:1024]
        if len(found) >= 4 * tokens:
            break
    return found


def held_out(folder: Path, files: int, tokens: int) -> list[Text]:
    """Returns the beginnings of the held-out files that the model's folder names.

    Raises:
      BenchError: the list or a file is missing.
    """
    tokenizer, texts = Tokenizer.from_folder(folder), []
    for name in _read(folder / "held_out.txt").split()[:files]:
        ids = tokenizer.encode(_read(LIBRARY / name))[: tokens + 1]
        texts.append(Text(ids, len(tokenizer.decode(ids).encode())))
    return texts


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"quality: no held-out text: {error}") from None


def deployment(
    texts: Sequence[Text],
    format: Format,
    folder: Path | None = None,
    more: Mapping[str, Any] = {},
) -> Deployment:
    """Describes a colocated deployment of the demo, BF16 but for the format, with one bucket; it
    quantises where the link would.

    Args:
      folder: model folder; None: the demo's.
      more: keys that take precedence.
    """
    pages = -(-max(len(text.token_ids) for text in texts) // PAGE)
    return load_deployment(
        DEMO,
        {
            **format.overrides,
            **({} if folder is None else {"model": str(folder)}),
            **one_bucket(STEP, pages * PAGE, PAGE),
            "mode": "colocated",
            "dtype": "bfloat16",
            "cache.pages": pages,
            **more,
        },
    )


def score(runtime: Runtime, texts: Sequence[Text]) -> Score:
    """Scores every token but the first of each text."""
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
    """Yields (first position, logits [tokens, vocab]) of each step's tokens."""
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
        rings = ring_pages(runtime.config, runtime.deployment)
        driver.begin(plan_of_rows(0, start, bucket, [rows], slots=slots, rings=rings))
        finished = driver.advance()
        assert isinstance(finished, Finished)
        yield start, np.asarray(jax.block_until_ready(finished.logits))[: len(piece)]


WIDTHS = (32.0, 64.0, 100.0)
"""Widths of the chosen channels, as multiples of the median channel's."""
SHARE = 0.02
"""Share of the channels that are made wider; at least two."""
SEED = 7

Tensors = MutableMapping[str, np.ndarray]


def write_outliers(source: Path, target: Path) -> int:
    """Writes a Step-3 checkpoint in one file; returns the number of widened channels."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    layers = sorted(
        name.removesuffix("self_attn.wq.weight")
        for name in tensors
        if name.endswith("self_attn.wq.weight")
    )
    wider = sum(_widen_layer(tensors, layer) for layer in layers)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, target / path.name, metadata={"format": "pt"})
    return wider


def _widen_layer(tensors: Tensors, layer: str) -> int:
    attention = f"{layer}self_attn."
    down = [f"{attention}{name}_proj.weight" for name in "qkv"]
    ffns = [
        prefix
        for prefix in (f"{layer}mlp.", f"{layer}moe.", f"{layer}share_expert.")
        if f"{prefix}gate_proj.weight" in tensors
    ]
    reading = [f"{prefix}{part}_proj.weight" for prefix in ffns for part in ("gate", "up")]
    router = [name for name in (f"{layer}moe.gate.weight",) if name in tensors]
    count = _widen(tensors, [f"{layer}input_layernorm.weight"], down)
    count += _widen(tensors, [f"{attention}inter_norm.weight"], [f"{attention}wq.weight"])
    count += _widen(tensors, [f"{layer}post_attention_layernorm.weight"], reading + router)
    # Every query head reads the one value head.
    count += _widen(tensors, [f"{attention}v_proj.weight"], [f"{attention}o_proj.weight"])
    for prefix in ffns:
        count += _widen(tensors, [f"{prefix}up_proj.weight"], [f"{prefix}down_proj.weight"])
    return count


def _widen(tensors: Tensors, written: Sequence[str], read: Sequence[str]) -> int:
    """Multiplies a few channels where they are written, and divides them where they are read."""
    first = tensors[written[0]]
    axis = max(first.ndim - 2, 0)
    channels = first.shape[axis]
    chosen = np.random.default_rng(SEED + channels).permutation(channels)
    chosen = chosen[: max(2, round(SHARE * channels))]
    rows = np.moveaxis(first.astype(np.float32), axis, 0).reshape(channels, -1)
    width = np.sqrt(np.mean(rows**2, axis=1))
    factors = np.ones(channels, np.float32)
    wanted = np.resize(WIDTHS, len(chosen)) * np.median(width) / width[chosen]
    factors[chosen] = np.exp2(np.floor(np.log2(wanted)))
    for name in written:
        shaped = factors if first.ndim == 1 else factors[:, None]
        tensors[name] = _times(tensors[name], shaped)
    for name in read:
        repeats = tensors[name].shape[-1] // channels
        tensors[name] = _times(tensors[name], 1 / np.tile(factors, repeats))
    return len(chosen)


def _times(tensor: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return (tensor.astype(np.float32) * factors).astype(tensor.dtype)
