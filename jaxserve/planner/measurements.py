"""Measured stages: their file, and the calibration that follows from it.

A file is a JSON list of `Measurement`s, as `python -m pallas_kernels.bench --layer --json` writes
it, or the file of `jaxserve preflight`, which has such a list; `plan calibrate` joins several.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from jaxserve.config.formats import FormatName
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.calibration import (
    NOTHING,
    Asked,
    Calibration,
    FitKey,
    MeasuredStage,
    Terms,
    fit,
)
from jaxserve.planner.hardware import load_hardware, read_json
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import AttentionLayers, CostModel, FFNLayers, load_model
from jaxserve.planner.stage_times import Rooflines, even_rows
from jaxserve.planner.stages import Calculator

SIZES = ("dp", "tp", "ep", "ffn_tp")
"""Fields of a layout that a measurement shares."""


class Measurement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The time of one stage of one layer."""

    device_kind: str
    """JAX's name ("TPU v6 lite", "NVIDIA H200"), or that of a hardware file."""
    op: MeasuredStage
    model: str
    """A known model, or a model folder."""
    batch: int
    """Sequences per DP group."""
    context: int
    """Mean tokens of a sequence."""
    format: FormatName
    """Number format of weights and cache."""
    seconds: float
    """Mean over ordinary steps."""
    cache: FormatName | None = None
    """Number format of the cache, if it differs."""
    dispatch: FormatName = "bfloat16"
    combine: Literal["auto", "int8"] = "auto"
    compute: str = "auto"
    """Format of matrix products (`Formats.compute`)."""
    dp: int = 1
    tp: int = 1
    ep: int = 1
    ffn_tp: int = 1
    """DP groups × tp devices, ep × ffn_tp devices: ffn, dispatch and combine depend on all."""
    rows: Literal["bfloat16", "float32"] = "bfloat16"
    """The deployment's `dtype`."""
    held: Literal["auto", "bfloat16", "float32"] = "auto"
    """Format of embedding and head; `auto`: as `rows`."""
    layers: int | None = None
    """Index of the group of equal layers in the model; None: the largest group."""
    tokens: int = 0
    """Tokens of a DP group; 0: one for each sequence."""
    pairs: int = 0
    """Pairs of a token with a token that it attends to, of a DP group; 0: as the others imply."""
    padded: int = 0
    """Tokens of a DP group with padding; 0: `tokens`."""
    reach: int = 0
    """Tokens that the bucket's pages of a sequence hold; 0: `context`."""
    sampled: int = 0
    """Rows of a DP group that head and sampler see; 0: one a sequence."""
    source: Literal["measured", "estimate"] = "measured"
    """`estimate`: computed from compiled programs (`plan estimate`), and ignored where the same
    stage of the same model was measured on the same hardware."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the measured quantity; a later measurement with the same key replaces it."""
        result = ("seconds", "source")
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name not in result)


class _Preflight(msgspec.Struct):
    """The part of a preflight's file that is used here."""

    measurements: list[Measurement]


def read_measurements(path: Path) -> list[Measurement]:
    """Reads a file of measurements.

    Raises:
      ConfigError: the file is missing or malformed, or a number is out of range.
    """
    told: list[Measurement] | _Preflight = read_json(path, list[Measurement] | _Preflight)  # type: ignore[arg-type]
    found = told if isinstance(told, list) else told.measurements
    for index, one in enumerate(found):
        for name in ("seconds", "batch", "context", *SIZES):
            if not 0 < getattr(one, name) < 1e9:
                raise ConfigError(f"{path}: [{index}].{name} = {getattr(one, name)} is not above 0")
        for name in ("tokens", "pairs", "padded", "reach", "sampled"):
            if not 0 <= getattr(one, name) < 1e12:
                raise ConfigError(f"{path}: [{index}].{name} = {getattr(one, name)} is below 0")
    return found


def joined(lists: Iterable[Iterable[Measurement]]) -> list[Measurement]:
    """Joins lists of measurements; later ones replace earlier ones with the same key, except that
    estimates replace no measurement."""
    every = sorted((one for found in lists for one in found), key=lambda o: o.source != "estimate")
    return list({one.key: one for one in every}.values())


class Expected(NamedTuple):
    """Rooflines of a measurement, and the terms that a fit is made of."""

    key: FitKey
    terms: Terms
    roofline: float
    """Seconds of the stage's own work, without collectives, as a bench of one device has it."""


def expected(one: Measurement, configs: Path = CONFIGS) -> Expected:
    """Returns what to compare a measurement with.

    Raises:
      ConfigError: its hardware or model is unknown, or the model has no such layers.
    """
    kind, hardware = one.device_kind, load_hardware(one.device_kind, folder=configs)
    named = {
        name: getattr(one, name) for name in ("dispatch", "combine", "compute", "rows", "held")
    }
    formats = Formats(weights=one.format, cache=one.cache or one.format, **named)
    model, asked = load_model(one.model, configs), Asked()
    calculator = Calculator(model, one.context, formats, Assumptions(), asked)
    sizes = {name: getattr(one, name) for name in SIZES}
    layout = Layout(mode="afd", attention=kind, ffn=kind, lanes=1, **sizes)
    tokens, padding = one.tokens or one.batch, {"reach": one.reach, "sampled": one.sampled}
    totals = (one.dp * number for number in (tokens, one.batch * one.context, one.pairs))
    rows = even_rows(one.dp, one.dp * one.batch, *totals, padded=one.padded or tokens, **padding)
    Rooflines(layout, calculator, calculator, (hardware, hardware)).step(rows)
    layers = most_layers(model, one.op) if one.layers is None else one.layers
    for key, (terms, roofline) in asked.terms.items():
        if (key.stage, key.layers) == (one.op, layers):
            return Expected(key, terms, roofline)
    raise ConfigError(f"{one.model} has no layers {layers} with {one.op}")


def most_layers(model: CostModel, stage: MeasuredStage) -> int:
    """Index of the largest group of equal layers that run a stage; 0 if all are alike."""
    groups: dict[str, Sequence[AttentionLayers | FFNLayers]]
    groups = {"attend": model.attention, "enter": model.attention, "ffn": model.ffn}
    sizes = [group.layers for group in groups.get(stage, ())] or [0]
    return sizes.index(max(sizes))


def calibration(found: Sequence[Measurement], configs: Path = CONFIGS) -> Calibration:
    """Returns a fit for each stage, hardware, model and format that was measured, or else
    estimated."""
    points: dict[FitKey, dict[str, list[tuple[Terms, float]]]] = {}
    for one in sorted(found, key=lambda one: one.source == "estimate"):
        key, terms, _ = expected(one, configs)
        points.setdefault(key, {}).setdefault(one.source, []).append((terms, one.seconds))
    return Calibration(
        {key: fit(own.get("measured") or own["estimate"]) for key, own in points.items()}
    )


def estimated(found: Sequence[Measurement]) -> str:
    """Warns of estimates among measurements; empty without any."""
    count = sum(one.source == "estimate" for one in found)
    told = f"{count} of {len(found)} stages are ESTIMATES from compiled programs, not measured"
    return told if count else ""


def read_calibration(path: Path | None, configs: Path = CONFIGS) -> Calibration:
    """Returns the calibration from a file of measurements; without a file, no correction. Says on
    stderr if they are estimates.

    Raises:
      ConfigError: see `read_measurements` and `expected`.
    """
    if path is None:
        return NOTHING
    found = read_measurements(path)
    if said := estimated(found):
        print(f"note: {path}: {said}", file=sys.stderr)
    return calibration(found, configs)
