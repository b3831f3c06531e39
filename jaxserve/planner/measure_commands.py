"""`plan calibrate` and `plan verify`: measurements against predictions.

Called by `plan.py`.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.planner import report
from jaxserve.planner.calibration import Asked, Calibration, MeasuredStage
from jaxserve.planner.deployment_options import add_scenario, read_scenario
from jaxserve.planner.lanes import Disaggregated
from jaxserve.planner.measurements import (
    Measurement,
    calibration,
    expected,
    joined,
    read_measurements,
)
from jaxserve.planner.models import model_config
from jaxserve.planner.observed import ALIKE, Observed, kinds_of, observe, read_spans, with_load
from jaxserve.planner.quantities import tokens
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.stage_times import Rows, StepTimes, layer_kinds, rows_of_load
from jaxserve.planner.text import grid, json_text
from jaxserve.roles.layout import StepLoad

WITHIN = {"stage": 0.15, "step": 0.10}
"""What a calibrated prediction of a median is asked to keep to."""
_SETTLE, _COUNTED = 4, 8
"""Steps of every lane before a period is taken, and those that it is taken of."""


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """The options."""
    add = command.add_argument
    add("--measured", nargs="+", type=Path, default=[], metavar="FILE", help="lists of stage times")
    _timeline_options(command)
    add("--write", type=Path, metavar="FILE", help="keeps all of them there, for --calibration")
    command.set_defaults(run=calibrate)


def add_verify(command: argparse.ArgumentParser) -> None:
    """The options."""
    _timeline_options(command)
    command.set_defaults(run=verify)


def _timeline_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--timeline", type=Path, metavar="T", help="of serve, generate or bench stages")
    add_scenario(command)
    old = "of a timeline that does not say"
    add("--batch", type=int, help=f"{old}: sequences a DP group and lane: scheduler.slots")
    add("--context", default="2K", help=f"{old}: mean tokens of a sequence: 2K")


class Compared(NamedTuple):
    """A stage, or whole steps, of one load of a trace."""

    name: MeasuredStage | Literal["step"]
    layers: int
    """Which of the model's groups of equal layers."""
    load: StepLoad
    spans: int
    measured: float
    """Seconds, the median."""
    predicted: float
    held_out: bool
    """Whether the calibration has not seen this load."""

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether the prediction is as good as asked."""
        return abs(self.error) <= WITHIN["step" if self.name == "step" else "stage"]


def verify(options: argparse.Namespace) -> int:
    """Predicted against measured, stage by stage and load by load."""
    if options.timeline is None:
        raise ConfigError("--timeline is missing: a folder that serve --timeline wrote")
    made, seen = _observed(options)
    known = read_measurements(options.calibration) if options.calibration else []
    found = compare(made, seen, known)
    rows = [["", "sequences", "tokens", "context", "bucket", "", "median µs", "predicted", "error"]]
    for one in found:
        load = one.load
        rows.append(
            [
                _name(made, one),
                str(load.sequences),
                str(load.tokens),
                str(round(load.context / load.sequences)),
                f"{load.bucket_tokens}x{load.bucket_pages}",
                f"of {one.spans}",
                *(f"{value * 1e6:.1f}" for value in (one.measured, one.predicted)),
                f"{one.error:+.0%}" + ("" if one.within else " *"),
            ]
        )
    lines = summary(found)
    if options.html:
        sections = [("Stages and steps", report.table(rows)), ("Summary", report.lines(lines))]
        page = report.page("Predicted against measured", sections)
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        tree = [
            {**one._asdict(), "load": msgspec.to_builtins(one.load), "error": one.error}
            for one in found
        ]
        print(json_text(tree))
    else:
        print("\n".join([grid(rows), "", *lines]))
    return 0


def summary(found: Sequence[Compared]) -> list[str]:
    """How many predictions are as good as asked, and the worst one."""
    lines = []
    for kind, limit in WITHIN.items():
        ones = [one for one in found if (one.name == "step") == (kind == "step")]
        if ones:
            worst = max(ones, key=lambda one: abs(one.error))
            good = sum(one.within for one in ones)
            lines.append(
                f"{kind}s within {limit:.0%}: {good} of {len(ones)}; the worst is {worst.name} at "
                f"{worst.load.sequences} sequences of {worst.load.context // worst.load.sequences} "
                f"tokens, {worst.error:+.0%}"
            )
    loads = {one.load: one.held_out for one in found}
    lines.append(f"loads that were not calibrated with: {sum(loads.values())} of {len(loads)}")
    return lines


def _name(made: Scenario, one: Compared) -> str:
    """The stage, and which layers' it is where there are several kinds."""
    if one.name == "ffn" and len(made.ffn.model.ffn) > 1:
        return f"ffn, {'MoE' if made.ffn.model.ffn[one.layers].experts else 'dense'}"
    if one.name == "attend" and len(made.attention.model.attention) > 1:
        window = made.attention.model.attention[one.layers].window
        return f"attend, {f'window {window}' if window else 'full'}"
    return one.name


def _observed(options: argparse.Namespace) -> tuple[Scenario, list[Observed]]:
    """The deployment, and what its trace says.

    Raises:
      ConfigError: it is colocated, or the trace is not one of it.
    """
    made = read_scenario(options, tokens(options.context))
    if made.layout.mode != "afd":
        raise ConfigError("a colocated deployment runs whole steps: its trace has no stages")
    batch = int(options.batch or made.deployment.scheduler.slots)
    if not 0 < batch <= 65536:
        raise ConfigError(f"--batch {batch}: expected 1 to 65536")
    count, context = made.layout.dp * batch, made.attention.context
    pages = -(-context // made.deployment.cache.page_size)
    unsaid = StepLoad(batch, pages, count, count, count * context, count * context)
    kinds = kinds_of(model_config(Path(made.deployment.model)), made.attention.model)
    return made, observe(with_load(read_spans(options.timeline), unsaid), kinds)


def compare(
    made: Scenario, seen: Sequence[Observed], known: Sequence[Measurement] = ()
) -> list[Compared]:
    """Medians of a trace's stages and steps beside the predictions.

    Args:
      known: what the calibration was made from.
    """
    calibrated = {_load_of(one) for one in known}
    found = []
    for one in seen:
        times = made.rooflines().step(_rows(made, one))
        held_out = _load_of(_measurement(made, one.load, "attend", 0, 1.0)) not in calibrated
        for (stage, layers), timed in one.stages.items():
            seconds = _predicted(made, times, stage, layers)
            found.append(Compared(stage, layers, one.load, *timed, seconds, held_out))
        if one.step is not None:
            seconds = step_seconds(times, made.layout.lanes, made.layout.dp)
            found.append(Compared("step", 0, one.load, *one.step, seconds, held_out))
    return found


def _rows(made: Scenario, one: Observed) -> Rows:
    return rows_of_load(one.load, made.layout.dp, made.deployment.cache.page_size)


def _predicted(made: Scenario, times: StepTimes, stage: MeasuredStage, layers: int) -> float:
    """Seconds of a stage, of layers of this group."""
    kinds = layer_kinds(made.attention.model)
    match stage:
        case "attend":
            return float(np.max(times.attend[[a for a, _ in kinds].index(layers)]))
        case "ffn":
            return float(times.ffn[[f for _, f in kinds].index(layers)])
    return float(np.max(getattr(times, stage)))


def step_seconds(times: StepTimes, lanes: int, groups: int) -> float:
    """Seconds from one step of a lane to its next one, when all lanes take these times and none
    waits for the host."""
    pipeline = Disaggregated(layers=len(times.ffn), lanes=lanes, groups=groups)
    ends: list[list[float]] = [[] for _ in range(lanes)]
    for lane in range(lanes):
        pipeline.begin(lane, 0, 0.0, times)
    while len(ends[0]) < _SETTLE + _COUNTED:
        lane, end = pipeline.advance(0.0)
        ends[lane].append(end)
        pipeline.begin(lane, len(ends[lane]), 0.0, times)
    return (ends[0][-1] - ends[0][_SETTLE - 1]) / _COUNTED


def calibrate(options: argparse.Namespace) -> int:
    """Collects measurements, and shows what follows from them."""
    lists = [read_measurements(path) for path in options.measured]
    if options.write is not None and options.write.is_file():
        lists.insert(0, read_measurements(options.write))
    if options.timeline is not None:
        made, seen = _observed(options)
        lists.append(measurements(made, seen))
    found = joined(lists)
    if not found:
        raise ConfigError("nothing to calibrate with: give --measured or --timeline")
    fits = calibration(found, options.configs)
    if options.write is not None:
        options.write.write_text(json_text([_short(one) for one in found]) + "\n")
    rows = _fit_rows(fits)
    points = _point_rows(found, fits, options.configs)
    if options.html:
        sections = [("Fits", report.table(rows)), ("Measurements", report.table(points))]
        options.html.write_text(report.page("Calibration", sections), encoding="utf-8")
    if options.json:
        tree = [{**key._asdict(), **one._asdict()} for key, one in fits.fits.items()]
        print(json_text(tree))
        return 0
    print(f"{grid(rows)}\n\n{grid(points)}")
    if not all(one.determined for one in fits.fits.values()):
        print(
            "\n? measured at too few batches and contexts to tell memory, compute and constant "
            "apart: what lies beyond them is a guess"
        )
    return 0


def measurements(made: Scenario, seen: Sequence[Observed]) -> list[Measurement]:
    """The stages of a trace as measurements: their own work, without collectives, which are taken
    off as predicted."""
    found = []
    asked = Asked(Path(made.deployment.model).name)
    roles = [role._replace(measured=asked) for role in (made.attention, made.ffn)]
    plain = made._replace(attention=roles[0], ffn=roles[1])
    for one in seen:
        asked.terms.clear()
        times = plain.rooflines().step(_rows(made, one))
        own = {(key.stage, key.layers): roof for key, (_, roof) in asked.terms.items()}
        for (stage, layers), timed in one.stages.items():
            beside = _predicted(made, times, stage, layers) - own[stage, layers]
            seconds = max(timed.seconds - beside, 1e-9)
            found.append(_measurement(made, one.load, stage, layers, seconds))
    return found


def _measurement(
    made: Scenario, load: StepLoad, stage: MeasuredStage, layers: int, seconds: float
) -> Measurement:
    layout, on_ffn = made.layout, stage in ("ffn", "combine")
    formats = (made.ffn if on_ffn else made.attention).formats
    return Measurement(
        device_kind=made.roles.names[on_ffn],
        op=stage,
        model=made.deployment.model,
        batch=-(-load.sequences // layout.dp),
        context=max(1, round(load.context / load.sequences)),
        format=formats.weights,
        cache=None if formats.cache == formats.weights else formats.cache,
        seconds=seconds,
        dispatch=formats.dispatch,
        dp=layout.dp,
        tp=layout.tp,
        ep=layout.ep,
        ffn_tp=layout.ffn_tp,
        rows=formats.rows,
        layers=layers,
        tokens=-(-load.tokens // layout.dp),
        pairs=-(-load.pairs // layout.dp),
        padded=load.bucket_tokens,
        reach=load.bucket_pages * made.deployment.cache.page_size,
    )


def _load_of(one: Measurement) -> tuple[int, ...]:
    """What it was measured at; contexts that are alike are the same."""
    context = round(math.log(one.context, ALIKE))
    return one.batch, context, one.tokens or one.batch, one.padded, one.reach


def _short(one: Measurement) -> dict[str, Any]:
    """As JSON, without what is as it is when nothing is said."""
    tree: dict[str, Any] = msgspec.to_builtins(one)
    unsaid = {
        field.name: field.default
        for field in msgspec.structs.fields(one)
        if field.default is not msgspec.NODEFAULT
    }
    return {
        name: value for name, value in tree.items() if name not in unsaid or value != unsaid[name]
    }


def _fit_rows(fits: Calibration) -> list[list[str]]:
    rows = [["", "format", "constant µs", "× bytes", "× FLOPs", "points", "worst error"]]
    for key, one in fits.fits.items():
        factors = f"{one.constant * 1e6:.1f}", f"{one.memory:.2f}", f"{one.compute:.2f}"
        unsure = "" if one.determined else " ?"
        name = f"{key.stage} {key.layers}, {key.model} on {key.hardware}"
        rows.append([name, key.format, *factors, str(one.points), f"{one.error:.1%}{unsure}"])
    return rows


def _point_rows(found: Sequence[Measurement], fits: Calibration, configs: Path) -> list[list[str]]:
    rows = [["", "batch", "context", "padded", "measured µs", "roofline µs", "calibrated µs"]]
    for one in found:
        key, terms, roofline = expected(one, configs)
        calibrated = fits.fits[key].seconds(terms)
        times = (f"{value * 1e6:.1f}" for value in (one.seconds, roofline, calibrated))
        name = f"{one.op} {key.layers}, {key.model} on {one.device_kind}"
        padded = f"{one.padded or one.tokens or one.batch}x{one.reach or one.context}"
        rows.append([name, str(one.batch), str(one.context), padded, *times])
    return rows
