"""What a timeline says of stages and steps, load by load: medians of those alike.

Called by `measure_commands.py`. A load is what a step had to do; steps whose contexts differ by
less than a tenth are alike.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.observe.timeline import Span, steady_window
from jaxserve.planner.calibration import MeasuredStage
from jaxserve.planner.models import CostModel
from jaxserve.planner.stage_times import layer_kinds
from jaxserve.roles.layout import StepLoad

ALIKE = 1.1
"""Contexts within this ratio are alike."""


class Timed(NamedTuple):
    """How long something took."""

    number: int
    seconds: float
    """The median."""


class Observed(NamedTuple):
    """Steps of one load."""

    load: StepLoad
    stages: Mapping[tuple[MeasuredStage, int], Timed]
    """By stage and group of equal layers (`CostModel.attention`, `CostModel.ffn`)."""
    step: Timed | None
    """From one step's end to the next one's on its lane; None: no two came one after the other."""


class _Trace(msgspec.Struct):
    """The part of timeline.json that is used here."""

    spans: list[Span]


def read_spans(path: Path) -> list[Span]:
    """The spans of a `--timeline` folder, or of its timeline.json.

    Raises:
      ConfigError: there are none.
    """
    file = path / "timeline.json" if path.is_dir() else path
    try:
        spans = msgspec.json.decode(file.read_bytes(), type=_Trace).spans
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not spans:
        raise ConfigError(f"{file}: no spans")
    return spans


def with_load(spans: Sequence[Span], load: StepLoad) -> list[Span]:
    """Spans that do not say what their steps had to do, of a typical window without compilations
    and pauses, with this load; others are as they were."""
    if any(span.load is not None for span in spans):
        return list(spans)
    steps = len({span.step for span in spans})
    begin, end = steady_window(spans, max(1, steps // 4))
    window = [span for span in spans if begin < span.end_ns <= end]
    return [msgspec.structs.replace(span, load=load) for span in window]


def observe(spans: Sequence[Span], kinds: Sequence[tuple[int, int]]) -> list[Observed]:
    """Medians of the stages and steps of every load, those with most sequences last.

    Args:
      kinds: of every layer, the groups of its attention and its FFN.

    Raises:
      ConfigError: the trace has other layers than the model, or no stage to measure.
    """
    last = max(span.layer for span in spans)
    if last != len(kinds):
        raise ConfigError(f"the trace has {last} layers, the model {len(kinds)}")
    loads: dict[tuple[int, ...], list[StepLoad]] = {}
    times: dict[tuple[int, ...], dict[tuple[MeasuredStage, int], list[float]]] = {}
    ends: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}
    for span in spans:
        # The first attend embeds, too.
        if span.load is None or span.stage == "step" or not span.load.sequences:
            continue
        alike = _alike(span.load)
        stage: MeasuredStage = span.stage
        layers = 0
        if span.layer == last:
            stage = "leave"
            ends.setdefault(span.lane, {})[span.step] = span.end_ns, alike
        elif stage in ("attend", "ffn"):
            layers = kinds[span.layer][stage == "ffn"]
        if (stage == "attend" and not span.layer) or span.end_ns <= span.start_ns:
            continue
        loads.setdefault(alike, []).append(span.load)
        of_load = times.setdefault(alike, {})
        of_load.setdefault((stage, layers), []).append(span.milliseconds / 1e3)
    if not times:
        raise ConfigError("the trace has no stage that can be measured")
    steps = _steps(ends)
    return [
        Observed(
            _typical(loads[alike]),
            {key: _timed(values) for key, values in sorted(times[alike].items())},
            _timed(steps[alike]) if alike in steps else None,
        )
        for alike in sorted(times, key=lambda alike: alike[2:])
    ]


def kinds_of(config: ModelConfig | None, model: CostModel) -> list[tuple[int, int]]:
    """Of every layer, which of the model's groups its attention and its FFN belong to."""
    if config is None:
        return layer_kinds(model)
    full, dense = config.layers > len(config.window_layers), config.layers > len(config.moe_layers)
    return [
        (
            int(layer in config.window_layers and full),
            int(layer in config.moe_layers and dense),
        )
        for layer in range(config.layers)
    ]


def _alike(load: StepLoad) -> tuple[int, ...]:
    context = round(math.log(max(1.0, load.context / load.sequences), ALIKE))
    return load.bucket_tokens, load.bucket_pages, load.sequences, load.tokens, context


def _typical(loads: Sequence[StepLoad]) -> StepLoad:
    """The load of those of median context."""
    return sorted(loads, key=lambda load: load.context)[len(loads) // 2]


def _steps(
    ends: Mapping[int, Mapping[int, tuple[int, tuple[int, ...]]]],
) -> dict[tuple[int, ...], list[float]]:
    """Seconds from a step's end to the next one's on the same lane, where both are alike."""
    found: dict[tuple[int, ...], list[float]] = {}
    for of_lane in ends.values():
        before: tuple[int, tuple[int, ...]] | None = None
        for _, (end, alike) in sorted(of_lane.items()):
            if before is not None and before[1] == alike:
                found.setdefault(alike, []).append((end - before[0]) / 1e9)
            before = end, alike
    return found


def _timed(seconds: Sequence[float]) -> Timed:
    return Timed(len(seconds), statistics.median(seconds))
