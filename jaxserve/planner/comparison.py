"""Compares measured timelines with predictions, and turns them into measurements to calibrate with.

Called by `measure_commands.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.planner.calibration import Asked, MeasuredStage
from jaxserve.planner.lanes import Disaggregated
from jaxserve.planner.measurements import Measurement
from jaxserve.planner.observed import ALIKE, Observed
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.stage_times import Rows, StepTimes, layer_kinds, rows_of_load
from jaxserve.roles.layout import StepLoad

WITHIN = {"stage": 0.15, "step": 0.10}
"""Relative errors that a calibrated prediction should keep to."""
_LEAST = 1e-9
"""Seconds: no stage takes less."""
_SETTLE, _COUNTED = 4, 8
"""Steps of every lane before a period is taken, and those that it is taken of."""


class Compared(NamedTuple):
    """A stage, or whole steps, of one load of a trace."""

    name: MeasuredStage | Literal["step"]
    layers: int
    """Which of the model's groups of equal layers."""
    load: StepLoad
    spans: int
    measured: float
    """Seconds, the mean of ordinary steps."""
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


def summary(found: Sequence[Compared]) -> list[str]:
    """How many predictions are as good as asked, and the worst one: of what the calibration has not
    seen, and of all."""
    lines = []
    held_out = [one for one in found if one.held_out]
    groups = [(found, "")]
    if 0 < len(held_out) < len(found):
        groups.insert(0, (held_out, " held out"))
    for kind, limit in WITHIN.items():
        for ones, which in groups:
            these = [one for one in ones if (one.name == "step") == (kind == "step")]
            if these:
                worst = max(these, key=lambda one: abs(one.error))
                good = sum(one.within for one in these)
                load = worst.load
                lines.append(
                    f"{kind}s{which} within {limit:.0%}: {good} of {len(these)}; the worst is "
                    f"{worst.name} at {load.sequences} sequences of "
                    f"{load.context // load.sequences} tokens, {worst.error:+.0%}"
                )
    loads = {one.load: one.held_out for one in found}
    lines.append(f"loads that were not calibrated with: {sum(loads.values())} of {len(loads)}")
    return lines


def compare(
    made: Scenario,
    seen: Sequence[Observed],
    known: Sequence[Measurement] = (),
) -> list[Compared]:
    """Returns the stages and steps of a trace beside the predictions.

    Args:
      known: what the deployment's calibration was made from.
    """
    calibrated = {load_of(one) for one in known}
    found = []
    for one in seen:
        times = made.rooflines().step(_rows(made, one))
        held_out = load_of(_measurement(made, one.load, "attend", 0)) not in calibrated
        for (stage, layers), timed in one.stages.items():
            if stage != "host":  # a step's time where it is measured
                seconds = _predicted(made, times, stage, layers)
                found.append(Compared(stage, layers, one.load, *timed, seconds, held_out))
        if one.step is not None:
            seconds = step_seconds(times, made.layout.lanes, made.layout.dp)
            found.append(Compared("step", 0, one.load, *one.step, seconds, held_out))
    return found


def _rows(made: Scenario, one: Observed) -> Rows:
    slots = made.deployment.scheduler.slots
    return rows_of_load(one.load, made.layout.dp, made.deployment.cache.page_size, slots)


def _predicted(made: Scenario, times: StepTimes, stage: MeasuredStage, layers: int) -> float:
    """Seconds of a stage, of layers of this group."""
    kinds = layer_kinds(made.attention.model)
    match stage:
        case "enter":
            return float(np.max(times.attend[0]))
        case "attend":  # the first one enters
            return float(np.max(times.attend[1 + [a for a, _ in kinds[1:]].index(layers)]))
        case "ffn":
            return float(times.ffn[[f for _, f in kinds].index(layers)])
    return float(np.max(getattr(times, stage)))


def step_seconds(times: StepTimes, lanes: int, groups: int) -> float:
    """Seconds from one step of a lane to its next one, when all lanes take these times: along the
    engine's schedule, with a host that enqueues a lane's step once it has read the lane's step
    before the last."""
    pipeline = Disaggregated(layers=len(times.ffn), lanes=lanes, groups=groups)
    ends: list[list[float]] = [[] for _ in range(lanes)]
    host = 0.0
    for lane in range(lanes):
        pipeline.begin(lane, 0, 0.0, times)
    while len(ends[0]) < _SETTLE + _COUNTED:
        lane, end = pipeline.advance(host)
        read = ends[lane][-1] if ends[lane] else 0.0
        ends[lane].append(end)
        if times.host:
            host = max(host, read) + times.host
        pipeline.begin(lane, len(ends[lane]), host, times)
    return (ends[0][-1] - ends[0][_SETTLE - 1]) / _COUNTED


def measurements(made: Scenario, seen: Sequence[Observed]) -> list[Measurement]:
    """The stages of a trace as measurements: their own work, without collectives, which are taken
    off as predicted."""
    found = []
    asked = Asked(Path(made.deployment.model).name)
    plain = made.measured_by(asked)
    for one in seen:
        asked.terms.clear()
        times = plain.rooflines().step(_rows(made, one))
        own = {(key.stage, key.layers): roof for key, (_, roof) in asked.terms.items()}
        for (stage, layers), timed in one.stages.items():
            beside = _predicted(made, times, stage, layers) - own[stage, layers]
            seconds = max(timed.seconds - beside, _LEAST)
            found.append(_measurement(made, one.load, stage, layers, seconds))
    return found


def _measurement(
    made: Scenario,
    load: StepLoad,
    stage: MeasuredStage,
    layers: int,
    seconds: float = 1.0,
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
        combine=formats.combine,
        dp=layout.dp,
        tp=layout.tp,
        ep=layout.ep,
        ffn_tp=layout.ffn_tp,
        rows=formats.rows,
        held=formats.held,
        layers=layers,
        tokens=-(-load.tokens // layout.dp),
        pairs=-(-load.pairs // layout.dp),
        padded=load.bucket_tokens,
        reach=load.bucket_pages * made.deployment.cache.page_size,
        sampled=min(load.bucket_tokens, made.deployment.scheduler.slots),
    )


def load_of(one: Measurement) -> tuple[int, ...]:
    """Returns the load of a measurement; contexts that are alike are the same."""
    context = round(math.log(one.context, ALIKE))
    return one.batch, context, one.tokens or one.batch, one.padded, one.reach
