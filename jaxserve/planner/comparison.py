"""Measurements beside predictions, for `plan verify` (`verify.py`), and `plan calibrate`.

Timelines are compared load by load, and become measurements to calibrate with; preflight makes its
measurements here, too.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.planner.balance import Balance
from jaxserve.planner.calibration import Asked, MeasuredStage
from jaxserve.planner.lanes import step_seconds
from jaxserve.planner.measurements import (
    ALIKE,
    SIZES,
    Measurement,
    Observed,
    calibration,
    expected,
    joined,
    observe,
    read_measurements,
    read_spans,
)
from jaxserve.planner.options import read_scenario
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.stage_times import Rows, StepTimes, even_rows
from jaxserve.planner.view import json_text, reported, show
from jaxserve.roles.layout import StepLoad

WITHIN = {"stage": 0.15, "step": 0.10}
"""Relative errors that a calibrated prediction should keep to."""
PARTED = 0.25
"""Relative error of a running fleet's stages and steps from which on there is an alarm."""
_LEAST = 1e-9
"""Seconds: no stage takes less."""


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
        return self.predicted / self.measured - 1

    @property
    def parted(self) -> bool:
        """Whether a running fleet is so far from its plan that there is an alarm."""
        return abs(self.error) > PARTED

    @property
    def within(self) -> bool:
        return abs(self.error) <= WITHIN["step" if self.name == "step" else "stage"]


def summary(found: Sequence[Compared]) -> list[str]:
    """Counts predictions that are as good as asked, of unseen loads and of all."""
    lines = []
    held_out = [one for one in found if one.held_out]
    groups = {" held out": held_out} if 0 < len(held_out) < len(found) else {}
    for kind, limit in WITHIN.items():
        for which, ones in (groups | {"": found}).items():
            if these := [one for one in ones if (one.name == "step") == (kind == "step")]:
                worst = max(these, key=lambda one: abs(one.error))
                good, load = sum(one.within for one in these), worst.load
                lines.append(
                    f"{kind}s{which} within {limit:.0%}: {good} of {len(these)}; the worst is "
                    f"{worst.name} at {load.sequences} sequences of "
                    f"{load.context // load.sequences} tokens, {worst.error:+.0%}"
                )
    loads = {one.load: one.held_out for one in found}
    return [*lines, f"loads that were not calibrated with: {sum(loads.values())} of {len(loads)}"]


def compare(
    made: Scenario,
    seen: Sequence[Observed],
    known: Sequence[Measurement] = (),
) -> list[Compared]:
    """Returns stages and steps of a trace beside predictions, which were calibrated by `known`."""
    calibrated = {load_of(one) for one in known}
    found = []
    for one in seen:
        times = made.rooflines().step(_rows(made, one.load))
        held_out = load_of(_measurement(made, one.load, "attend", 0)) not in calibrated
        for (stage, layers), timed in one.stages.items():
            if stage != "host":  # a step's time where it is measured
                seconds = _predicted(made, times, stage, layers)
                found.append(Compared(stage, layers, one.load, *timed, seconds, held_out))
        if one.step is not None:
            seconds = step_seconds(times, made.layout.lanes, made.layout.dp)
            found.append(Compared("step", 0, one.load, *one.step, seconds, held_out))
    return found


def _padding(made: Scenario, load: StepLoad) -> dict[str, Any]:
    """Sizes of the step's bucket, as `Rows` and `Measurement` name them."""
    return {
        "padded": load.bucket_tokens,
        "reach": load.bucket_pages * made.deployment.cache.page_size,
        "sampled": min(load.bucket_tokens, made.deployment.scheduler.slots),
    }


def _rows(made: Scenario, load: StepLoad) -> Rows:
    totals = load.tokens, load.context, load.pairs
    count = max(1, load.sequences)
    return even_rows(made.layout.dp, count, *totals, **_padding(made, load))


def _predicted(made: Scenario, times: StepTimes, stage: MeasuredStage, layers: int) -> float:
    kinds = made.attention.model.order
    match stage:
        case "enter":
            return float(np.max(times.attend[0]))
        case "attend":  # the first one enters
            return float(np.max(times.attend[1 + [a for a, _ in kinds[1:]].index(layers)]))
        case "ffn":
            return float(times.ffn[[f for _, f in kinds].index(layers)])
    return float(np.max(getattr(times, stage)))


def measurements(made: Scenario, seen: Sequence[Observed]) -> list[Measurement]:
    """The stages of a trace as measurements, without their collectives as predicted."""
    found = []
    asked = Asked()
    attention, ffn = (each._replace(measured=asked) for each in (made.attention, made.ffn))
    plain = made._replace(attention=attention, ffn=ffn)
    for one in seen:
        asked.terms.clear()
        times = plain.rooflines().step(_rows(made, one.load))
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
        layers=layers,
        tokens=-(-load.tokens // layout.dp),
        pairs=-(-load.pairs // layout.dp),
        **_padding(made, load),
        **_fields(formats, "dispatch", "combine", "rows", "held"),
        **_fields(layout, *SIZES),
    )


def _fields(told: object, *names: str) -> dict[str, Any]:
    return {name: getattr(told, name) for name in names}


def load_of(one: Measurement) -> tuple[int, ...]:
    """Returns the load of a measurement; contexts that are alike are the same."""
    context = round(math.log(one.context, ALIKE))
    return one.batch, context, one.tokens or one.batch, one.padded, one.reach


def balance(
    made: Scenario, one: Observed, share: float = 1.0
) -> tuple[Balance, tuple[float, float]]:
    """Returns the seconds that both roles of a deployment take for a lane's step with a share of a
    load, and those of its messages to the ffn role and back. Measured seconds are scaled as the
    prediction changes, both with the load and with twice the number of DP groups.
    """
    kinds, stages = made.attention.model.order, one.stages

    def measured(*keys: tuple[MeasuredStage, int]) -> float:
        return sum(stages[key].seconds for key in keys if key in stages)

    def predicted(dp: int, factor: float) -> StepTimes:
        names = "sequences", "tokens", "context", "pairs"
        sums = {name: max(1, round(factor * getattr(one.load, name))) for name in names}
        of = made._replace(layout=msgspec.structs.replace(made.layout, dp=dp * made.layout.dp))
        return of.rooflines().step(_rows(of, msgspec.structs.replace(one.load, **sums)))

    before, after, doubled = predicted(1, 1.0), predicted(1, share), predicted(2, 2 * share)

    def changed(name: str, then: StepTimes, *keys: tuple[MeasuredStage, int]) -> float:
        then_seconds, now = (float(np.sum(getattr(each, name))) for each in (then, before))
        return measured(*keys) * (then_seconds / now if now else 1.0)

    attends: list[tuple[MeasuredStage, int]] = [("enter", 0), ("leave", 0)]
    attends += [("attend", a) for a, _ in kinds[1:]]
    ffns: list[tuple[MeasuredStage, int]] = [("ffn", f) for _, f in kinds]
    found = Balance(
        changed("attend", after, *attends),
        changed("ffn", after, *ffns),
        changed("ffn", doubled, *ffns),
    )
    there, back = (len(kinds) * changed(name, after, (name, 0)) for name in ("dispatch", "combine"))
    return found, (there, back)


def title(made: Scenario, one: Compared) -> str:
    """The name of a stage, with the kind of its layers if the model has several kinds."""
    if one.name == "ffn" and len(made.ffn.model.ffn) > 1:
        return f"ffn, {'MoE' if made.ffn.model.ffn[one.layers].experts else 'dense'}"
    if one.name == "attend" and len(made.attention.model.attention) > 1:
        window = made.attention.model.attention[one.layers].spec.window
        return f"attend, {f'window {window}' if window else 'full'}"
    return one.name


def deployed(options: argparse.Namespace) -> Scenario:
    """Returns the deployment to compare stages of; raises ConfigError if it is colocated."""
    made = read_scenario(options, 1)
    if made.layout.topology.has("colocated"):
        raise ConfigError("a colocated deployment runs whole steps: its trace has no stages")
    return made


def observed(options: argparse.Namespace) -> tuple[Scenario, list[Observed]]:
    """Returns the deployment, and what its timeline shows. Raises as `deployed` and `observe`."""
    made = deployed(options)
    return made, observe(read_spans(options.timeline), made.attention.model.order)


def calibrate(options: argparse.Namespace) -> None:
    """Collects measurements, and shows what follows from them."""
    lists = [read_measurements(path) for path in options.measured]
    if options.write is not None and options.write.is_file():
        lists.insert(0, read_measurements(options.write))
    if options.timeline is not None:
        made, seen = observed(options)
        lists.append(measurements(made, seen))
    found = joined(lists)
    if not found:
        raise ConfigError("nothing to calibrate with: give --measured or --timeline")
    fits = calibration(found, options.configs)
    if options.write is not None:
        options.write.write_text(json_text(found) + "\n")
    sure = all(one.determined for one in fits.fits.values())
    points = []
    for one in found:
        beside = expected(one, options.configs)
        fitted = fits.fits[beside.key].seconds(beside.terms)
        points.append({"at": one, "expected": beside, "fitted": fitted})
    told = {"fits": [*fits.fits.items()], "points": points, "sure": sure}
    show(options, reported("calibrate", "Calibration", **told))
