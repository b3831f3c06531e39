"""Measured stages: their file, the calibration that follows from it, and the times of stages in a
timeline.

A file is a JSON list of `Measurement`s, as `python -m pallas_kernels.bench --layer --json` writes
it, or the file of `jaxserve preflight`, which has such a list; `plan calibrate` joins several.

A timeline is read load by load. A load is the work of a step; steps whose contexts differ by less
than a tenth are alike. Times are means over ordinary steps, those of the middle half of durations:
such means add up to a step, as medians do not, and a pause counts as little in them.
"""

import itertools
import math
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jaxserve.config.formats import FormatName
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.observe.spans import Span
from jaxserve.observe.timeline_view import Bar
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
from jaxserve.planner.hardware import load_hardware, read_struct
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import AttentionLayers, CostModel, FFNLayers, load_model
from jaxserve.planner.stage_times import Rooflines, even_rows
from jaxserve.planner.stages import Calculator
from jaxserve.roles.layout import StepLoad

SIZES = ("dp", "tp", "ep", "ffn_tp")
"""Fields of a layout that a measurement shares."""


Size = Annotated[int, Meta(ge=1, lt=10**9)]
Number = Annotated[int, Meta(ge=0, lt=10**12)]


class Measurement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The time of one stage of one layer."""

    device_kind: str
    """JAX's name ("TPU v6 lite", "NVIDIA H200"), or that of a hardware file."""
    op: MeasuredStage
    model: str
    """A known model, or a model folder."""
    batch: Size
    """Sequences per DP group."""
    context: Size
    """Mean tokens of a sequence."""
    format: FormatName
    """Number format of weights and cache."""
    seconds: Annotated[float, Meta(gt=0, lt=1e9)]
    """Mean over ordinary steps."""
    cache: FormatName | None = None
    """Number format of the cache, if it differs."""
    dispatch: FormatName = "bfloat16"
    combine: Literal["auto", "int8"] = "auto"
    compute: str = "auto"
    """Format of matrix products (`Formats.compute`)."""
    dp: Size = 1
    tp: Size = 1
    ep: Size = 1
    ffn_tp: Size = 1
    """DP groups × tp devices, ep × ffn_tp devices: ffn, dispatch and combine depend on all."""
    rows: Literal["bfloat16", "float32"] = "bfloat16"
    """The deployment's `dtype`."""
    held: Literal["auto", "bfloat16", "float32"] = "auto"
    """Format of embedding and head; `auto`: as `rows`."""
    layers: int | None = None
    """Index of the group of equal layers in the model; None: the largest group."""
    tokens: Number = 0
    """Tokens of a DP group; 0: one for each sequence."""
    pairs: Number = 0
    """Pairs of a token with a token that it attends to, of a DP group; 0: as the others imply."""
    padded: Number = 0
    """Tokens of a DP group with padding; 0: `tokens`."""
    reach: Number = 0
    """Tokens that the bucket's pages of a sequence hold; 0: `context`."""
    sampled: Number = 0
    """Rows of a DP group that head and sampler see; 0: one a sequence."""
    source: Literal["measured", "estimate"] = "measured"
    """`estimate`: from compiled programs, ignored where the same stage was measured."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the measured quantity; a later measurement with the same key replaces it."""
        result = ("seconds", "source")
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name not in result)


class _Preflight(msgspec.Struct):
    """The part of a preflight's file that is used here."""

    measurements: list[Measurement]


def read_measurements(path: Path) -> list[Measurement]:
    """Reads measurements; raises ConfigError if the file is missing, or a number out of range."""
    kinds: Any = list[Measurement] | _Preflight
    told: list[Measurement] | _Preflight = read_struct(path, kinds, json=True)
    return told if isinstance(told, list) else told.measurements


def joined(lists: Iterable[Iterable[Measurement]]) -> list[Measurement]:
    """Joins lists; later measurements replace earlier ones of their key, estimates replace none."""
    every = sorted((one for found in lists for one in found), key=lambda o: o.source != "estimate")
    return list({one.key: one for one in every}.values())


class Expected(NamedTuple):
    """Rooflines of a measurement, and the terms that a fit is made of."""

    key: FitKey
    terms: Terms
    roofline: float
    """Seconds of the stage's own work, without collectives, as a bench of one device has it."""


def expected(one: Measurement, configs: Path = CONFIGS) -> Expected:
    """Returns rooflines and terms of a measurement; raises ConfigError if its names are unknown."""
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
    """Returns fits by stage, hardware, model and format; of estimates where none is measured."""
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
    stderr if they are estimates. Raises ConfigError as `read_measurements` and `expected`."""
    if path is None:
        return NOTHING
    found = read_measurements(path)
    if said := estimated(found):
        print(f"note: {path}: {said}", file=sys.stderr)
    return calibration(found, configs)


ALIKE = 1.1
"""Contexts within this ratio are alike."""
WAITING = 0.1
"""Share of its time that a lane has to wait for the host for that to be measured."""

WATCHED_SECONDS = 60.0
"""Seconds to wait for steps of a running server."""
ANSWER_SECONDS = 10.0
"""Time for an answer of a server."""

_LaneStep = tuple[int, int]
"""A step's lane and number."""
_Alike = tuple[int, ...]
"""Key shared by steps of similar load."""


class Timed(NamedTuple):
    """Duration of a stage in a trace."""

    number: int
    """Spans with a duration above 0, in all steps."""
    seconds: float
    """Mean over ordinary steps."""


class Observed(NamedTuple):
    """Steps of one load."""

    load: StepLoad
    stages: Mapping[tuple[MeasuredStage, int], Timed]
    """Times by stage and group of equal layers (`CostModel.attention`, `CostModel.ffn`)."""
    step: Timed | None
    """From one step's end to the next one's on its lane; None: no two came one after the other."""


class _Measured(msgspec.Struct):
    """The part of a server's measured steps that is used here."""

    at: float
    timeline: list[Bar]
    loads: list[tuple[int, int, StepLoad]]


class _Watched(msgspec.Struct):
    """The part of a server's `GET /pipeline` that is used here."""

    measured: _Measured | None


class _Trace(msgspec.Struct):
    """The part of timeline.json that is used here."""

    spans: list[Span]


def read_spans(path: Path) -> list[Span]:
    """Reads the spans of a `--timeline` folder, or file; raises ConfigError without any."""
    file = path / "timeline.json" if path.is_dir() else path
    spans = read_struct(file, _Trace, json=True).spans
    if not spans:
        raise ConfigError(f"{file}: no spans")
    return spans


def ask(option: str, url: str, path: str, body: bytes | None = None) -> bytes:
    """Asks a server; raises ConfigError, naming the option, if it does not answer."""
    headers = {"content-type": "application/json"}
    try:
        asked = urllib.request.Request(f"{url.rstrip('/')}{path}", body, headers)
        with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace")
        raise ConfigError(f"{option} {url}: {told or error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {url}: {error}") from None


def watched_spans(url: str) -> list[Span]:
    """Returns spans of the steps that a running server, or a router's first domain, measures
    because it is asked: earlier ones may be of another load. Raises ConfigError if it does not
    answer, or measures no whole step within `WATCHED_SECONDS`."""
    until = time.monotonic() + WATCHED_SECONDS
    answered: list[float | None] = []
    while time.monotonic() < until:
        try:
            found = msgspec.json.decode(ask("--url", url, "/pipeline"), type=_Watched).measured
        except msgspec.DecodeError as error:
            raise ConfigError(f"--url {url}: {error}") from None
        answered.append(found.at if found else None)
        if found and found.loads and found.at != answered[0]:
            loads = {(lane, step): load for lane, step, load in found.loads}
            return [
                Span(
                    *(bar.stage, bar.lane, bar.layer, bar.step, bar.start * 1000, bar.end * 1000),
                    *(0, 0, loads[bar.lane, bar.step]),
                )
                for bar in found.timeline
                if bar.stage != "step" and (bar.lane, bar.step) in loads
            ]
        time.sleep(1)
    raise ConfigError(f"--url {url}: no step was measured in {WATCHED_SECONDS:g} s; is it idle?")


def observe(spans: Sequence[Span], kinds: Sequence[tuple[int, int]]) -> list[Observed]:
    """Returns the stages and steps of every load, those with most sequences last. `kinds` are, of
    every layer, the groups of its attention and its FFN. Raises ConfigError if the trace has other
    layers than the model, or no stage to measure."""
    last = max(span.layer for span in spans)
    if last != len(kinds):
        raise ConfigError(f"the trace has {last} layers, the model {len(kinds)}")
    loads: dict[_Alike, dict[_LaneStep, StepLoad]] = defaultdict(dict)
    times: dict[_Alike, dict[tuple[MeasuredStage, int], list[tuple[_LaneStep, float]]]]
    times = defaultdict(lambda: defaultdict(list))
    ends: dict[int, dict[int, tuple[int, _Alike]]] = defaultdict(dict)
    for span in spans:
        if span.load is None or span.stage == "step" or not span.load.sequences:
            continue
        alike, of = _alike(span.load), (span.lane, span.step)
        stage: MeasuredStage = span.stage
        layers = 0
        if span.layer == last:
            stage = "leave"
            ends[span.lane][span.step] = span.end_ns, alike
        elif stage in ("attend", "ffn"):
            layers = kinds[span.layer][stage == "ffn"]
            if stage == "attend" and not span.layer:
                stage = "enter"
        loads[alike][of] = span.load
        times[alike][stage, layers].append((of, max(0, span.end_ns - span.start_ns) / 1e9))
    steps = _steps(ends)
    late = _late(spans)
    found = []
    for alike in sorted(times, key=lambda alike: alike[2:]):
        ordered = sorted(own := steps.get(alike, {}), key=own.__getitem__)
        cut = len(ordered) // 4
        ordinary = set(ordered[cut : len(ordered) - cut] or loads[alike])
        step = _timed(own.items(), ordinary)
        stages = {
            key: timed
            for key, values in sorted(times[alike].items())
            if (timed := _timed(values, ordinary)) is not None
        }
        waited = statistics.median(late[of] for of in ordinary)
        if step is not None and waited > WAITING * step.seconds:
            # The host takes all of the time, which the lanes share.
            lanes = {lane for lane, _ in ordinary}
            stages["host", 0] = step._replace(seconds=step.seconds / len(lanes))
        by_context = sorted(loads[alike].values(), key=lambda load: load.context)
        found.append(Observed(by_context[len(by_context) // 2], stages, step))
    if not any(one.stages for one in found):
        raise ConfigError("the trace has no stage that can be measured")
    return found


def _alike(load: StepLoad) -> tuple[int, ...]:
    context = round(math.log(max(1.0, load.context / load.sequences), ALIKE))
    return load.bucket_tokens, load.bucket_pages, load.sequences, load.tokens, context


def _steps(
    ends: Mapping[int, Mapping[int, tuple[int, _Alike]]],
) -> dict[_Alike, dict[_LaneStep, float]]:
    """Seconds from the end of the lane's step before to a step's own, where both are alike."""
    found: dict[_Alike, dict[_LaneStep, float]] = defaultdict(dict)
    for lane, of_lane in ends.items():
        for (_, before), (step, (end, alike)) in itertools.pairwise(sorted(of_lane.items())):
            if before[1] == alike:
                found[alike][lane, step] = (end - before[0]) / 1e9
    return found


def _late(spans: Sequence[Span]) -> Mapping[_LaneStep, float]:
    """Seconds of steps in which all but the host was ready for the next stage."""
    late: dict[_LaneStep, float] = defaultdict(float)
    ready: dict[int, int] = {}
    free: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.end_ns):
        before = max(ready.get(span.lane, span.start_ns), free.get(span.stage, 0))
        if span.start_ns == span.enqueued_ns:
            late[span.lane, span.step] += max(0, span.start_ns - before) / 1e9
        ready[span.lane] = free[span.stage] = span.end_ns
    return late


def _timed(values: Iterable[tuple[_LaneStep, float]], ordinary: set[_LaneStep]) -> Timed | None:
    """Returns the mean over ordinary steps; None if none of them took any time.

    The end of a span is noted late now and then, and the next one seems to take no time: the mean
    counts both, so that stages add up.
    """
    seconds = list(values)
    longer = [value for _, value in seconds if value > 0]
    mean = statistics.mean([value for of, value in seconds if of in ordinary] or longer or [0.0])
    return Timed(len(longer), mean) if mean > 0 else None
