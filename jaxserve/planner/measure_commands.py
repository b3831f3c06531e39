"""`plan calibrate` and `plan verify`: measurements against predictions.

Called by `plan.py`.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.observe.timeline import STAGES, AFDStage, Span
from jaxserve.planner import report
from jaxserve.planner.calibration import Calibration
from jaxserve.planner.deployment_options import add_scenario, read_scenario
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.measurements import (
    Measurement,
    calibration,
    joined,
    predicted,
    read_measurements,
    read_spans,
    steady_spans,
)
from jaxserve.planner.quantities import tokens
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.search import crossings
from jaxserve.planner.stage_times import layer_kinds
from jaxserve.planner.text import grid, json_text


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
    add("--timeline", type=Path, metavar="T", help="what serve --timeline wrote")
    add_scenario(command)
    add("--batch", type=int, help="sequences a DP group and lane: scheduler.slots")
    add("--context", default="2K", help="mean tokens of a sequence: 2K")


class ComparedStage(NamedTuple):
    """A stage of a trace."""

    name: AFDStage
    spans: int
    measured: float
    """Seconds, the median."""
    predicted: float

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measured - 1


def verify(options: argparse.Namespace) -> int:
    """Predicted against measured, stage by stage."""
    if options.timeline is None:
        raise ConfigError("--timeline is missing: a folder that serve --timeline wrote")
    made = read_scenario(options, tokens(options.context))
    stages = compare(made, steady_spans(read_spans(options.timeline)), _batch(options, made))
    rows = [["", "spans", "measured µs", "predicted µs", "error"]]
    for one in stages:
        times = (f"{value * 1e6:.1f}" for value in (one.measured, one.predicted))
        rows.append([one.name, str(one.spans), *times, f"{one.error:+.0%}"])
    if options.html:
        page = report.page("Predicted against measured", [("Stages", report.table(rows))])
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        print(json_text([{**one._asdict(), "error": one.error} for one in stages]))
    else:
        print(grid(rows))
    return 0


def compare(made: Scenario, spans: Sequence[Span], batch: int) -> list[ComparedStage]:
    """Medians of a trace's stages beside the predictions, of the most frequent kind of layer.

    Raises:
      ConfigError: the trace has other layers than the model.
    """
    wanted = _layers(made)
    layers = made.attention.model.layers
    last = max(span.layer for span in spans)
    if last > layers:
        raise ConfigError(f"the trace has a layer {last}, the model {layers} layers")
    times = predictions(made, batch)
    stages = []
    for name in STAGES:
        # The first attend embeds, too.
        found = [
            span.milliseconds / 1e3
            for span in spans
            if span.stage == name and span.layer in wanted and (span.layer or name != "attend")
        ]
        found = [seconds for seconds in found if seconds > 0]
        if found:
            stages.append(ComparedStage(name, len(found), statistics.median(found), times[name]))
    if not stages:
        raise ConfigError("the trace has no stage of the model's most frequent kind of layer")
    return stages


def predictions(made: Scenario, batch: int) -> dict[AFDStage, float]:
    """Seconds of the stages of the most frequent kind of layer, with `batch` sequences a DP group
    and lane."""
    layout, (attention, ffn, _) = made.layout, made.roles
    model = made.attention.model
    a_group = max(model.attention, key=lambda group: group.layers)
    f_group = max(model.ffn, key=lambda group: group.layers)
    parts = made.ffn.ffn(f_group, ffn, layout.dp * batch, layout.ffn_mesh)
    there, back = crossings(made.ffn, layout, attention, ffn, batch)
    return {
        "attend": made.attention.attend(a_group, attention, batch, layout.tp).seconds,
        "dispatch": there.seconds,
        "ffn": parts.stage(made.ffn.assumed.overlap).seconds,
        "combine": back.seconds,
    }


def _layers(made: Scenario) -> set[int]:
    kinds = layer_kinds(made.attention.model)
    most = statistics.mode(kinds)
    return {layer for layer, kind in enumerate(kinds) if kind == most}


def _batch(options: argparse.Namespace, made: Scenario) -> int:
    batch = int(options.batch or made.deployment.scheduler.slots)
    if not 0 < batch <= 65536:
        raise ConfigError(f"--batch {batch}: expected 1 to 65536")
    if made.layout.mode != "afd":
        raise ConfigError("a colocated deployment runs whole steps: its trace has no stages")
    return batch


def calibrate(options: argparse.Namespace) -> int:
    """Collects measurements, and shows what follows from them."""
    lists = [read_measurements(path) for path in options.measured]
    if options.write is not None and options.write.is_file():
        lists.insert(0, read_measurements(options.write))
    if options.timeline is not None:
        lists.append(_from_trace(options))
    found = joined(lists)
    if not found:
        raise ConfigError("nothing to calibrate with: give --measured or --timeline")
    fits = calibration(found, options.configs)
    if options.write is not None:
        options.write.write_text(json_text([msgspec.to_builtins(one) for one in found]) + "\n")
    rows = _fit_rows(fits)
    points = _point_rows(found, fits, options.configs)
    if options.html:
        sections = [("Fits", report.table(rows)), ("Measurements", report.table(points))]
        options.html.write_text(report.page("Calibration", sections), encoding="utf-8")
    if options.json:
        tree = [
            {"stage": stage, "hardware": hardware, **one._asdict()}
            for (stage, hardware), one in fits.fits.items()
        ]
        print(json_text(tree))
    else:
        print(f"{grid(rows)}\n\n{grid(points)}")
    return 0


def _from_trace(options: argparse.Namespace) -> list[Measurement]:
    """The stages of a trace as measurements; of an ffn stage the work alone, the rest as predicted.

    Raises:
      ConfigError: see `compare`.
    """
    made = read_scenario(options, tokens(options.context))
    batch = _batch(options, made)
    stages = compare(made, steady_spans(read_spans(options.timeline)), batch)
    layout, formats = made.layout, made.attention.formats
    f_group = max(made.ffn.model.ffn, key=lambda group: group.layers)
    tokens_of_all = layout.dp * batch
    parts = made.ffn.ffn(f_group, made.roles.ffn, tokens_of_all, layout.ffn_mesh)
    found = []
    for one in stages:
        on_ffn = one.name in ("ffn", "combine")
        weights = (made.ffn if on_ffn else made.attention).formats.weights
        seconds = one.measured
        if one.name == "ffn":
            seconds = max(seconds - parts.spread - parts.gather, 1e-9)
        found.append(
            Measurement(
                device_kind=made.roles.names[on_ffn],
                op=one.name,
                model=made.deployment.model,
                batch=batch,
                context=made.attention.context,
                format=weights,
                cache=None if formats.cache == weights else formats.cache,
                seconds=seconds,
                dispatch=formats.dispatch,
                dp=layout.dp,
                tp=layout.tp,
                ep=layout.ep,
                ffn_tp=layout.ffn_tp,
            )
        )
    return found


def _fit_rows(fits: Calibration) -> list[list[str]]:
    rows = [["", "constant µs", "factor", "points", "worst error"]]
    for (stage, hardware), one in fits.fits.items():
        numbers = f"{one.constant * 1e6:.1f}", f"{one.scale:.3f}", str(one.points)
        rows.append([f"{stage}, {hardware}", *numbers, f"{one.error:.1%}"])
    return rows


def _point_rows(found: Sequence[Measurement], fits: Calibration, configs: Path) -> list[list[str]]:
    rows = [["", "batch", "context", "format", "measured µs", "roofline µs", "calibrated µs"]]
    for one in found:
        hardware: Hardware
        hardware, seconds = predicted(one, configs)
        corrected = fits.correct(one.op, hardware.name, seconds)
        times = (f"{value * 1e6:.1f}" for value in (one.seconds, seconds, corrected))
        name = f"{one.op}, {one.device_kind}, {Path(one.model).name}"
        of_all = f"{one.format} (cache {one.cache})" if one.cache else one.format
        rows.append([name, str(one.batch), str(one.context), of_all, *times])
    return rows
