"""`plan calibrate` and `plan verify`: measurements against predictions, printed."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.planner.calibration import Calibration
from jaxserve.planner.comparison import Compared, compare, measurements, summary
from jaxserve.planner.measurements import (
    Measurement,
    calibration,
    expected,
    joined,
    read_measurements,
)
from jaxserve.planner.models import model_config
from jaxserve.planner.observed import Observed, kinds_of, observe, read_spans, with_load
from jaxserve.planner.options import read_scenario
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.stage_times import layer_kinds
from jaxserve.planner.view import Part, Report, json_text, show
from jaxserve.roles.layout import StepLoad

UNDETERMINED = (
    "? measured at too few batches and contexts to tell memory, compute and constant apart: what "
    "lies beyond them is a guess"
)


def verify(options: argparse.Namespace) -> None:
    """Compares predictions with measurements, stage by stage and load by load."""
    if options.timeline is None:
        raise ConfigError("--timeline is missing: a folder that serve --timeline wrote")
    made, seen = observed(options)
    known = read_measurements(options.calibration) if options.calibration else []
    found = compare(made, seen, known)
    rows = [["", "sequences", "tokens", "context", "bucket", "", "µs", "predicted", "error"]]
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
    tree = [
        {**one._asdict(), "load": msgspec.to_builtins(one.load), "error": one.error}
        for one in found
    ]
    parts = [Part(rows=rows, lines=summary(found))]
    show(options, Report("Predicted against measured", parts, tree))


def _name(made: Scenario, one: Compared) -> str:
    """The name of a stage, with the kind of its layers if the model has several kinds."""
    if one.name == "ffn" and len(made.ffn.model.ffn) > 1:
        return f"ffn, {'MoE' if made.ffn.model.ffn[one.layers].experts else 'dense'}"
    if one.name == "attend" and len(made.attention.model.attention) > 1:
        window = made.attention.model.attention[one.layers].window
        return f"attend, {f'window {window}' if window else 'full'}"
    return one.name


def observed(options: argparse.Namespace) -> tuple[Scenario, list[Observed]]:
    """Returns the deployment of the options, and the stages and steps in their timeline.

    Raises:
      ConfigError: the deployment is colocated, or the trace is of another deployment.
    """
    made = read_scenario(options, options.context)
    if made.layout.topology.has("colocated"):
        raise ConfigError("a colocated deployment runs whole steps: its trace has no stages")
    batch = options.batch or made.deployment.scheduler.slots
    count, context = made.layout.dp * batch, made.attention.context
    pages = -(-context // made.deployment.cache.page_size)
    unsaid = StepLoad(batch, pages, count, count, count * context, count * context)
    kinds = kinds_of(model_config(Path(made.deployment.model)), made.attention.model)
    kinds[0] = layer_kinds(made.attention.model)[0][0], kinds[0][1]  # as steps are computed
    return made, observe(with_load(read_spans(options.timeline), unsaid), kinds)


def calibrate(options: argparse.Namespace) -> None:
    """Collects measurements, and shows what follows from them."""
    if options.timeline is None and (options.batches or options.contexts):
        raise ConfigError("--batches, --contexts: loads of a --timeline, which is missing")
    lists = [read_measurements(path) for path in options.measured]
    if options.write is not None and options.write.is_file():
        lists.insert(0, read_measurements(options.write))
    if options.timeline is not None:
        made, seen = observed(options)
        lists.append(_chosen(measurements(made, seen), options))
    found = joined(lists)
    if not found:
        raise ConfigError("nothing to calibrate with: give --measured or --timeline")
    fits = calibration(found, options.configs)
    if options.write is not None:
        options.write.write_text(json_text(found) + "\n")
    points = _point_rows(found, fits, options.configs)
    sure = all(one.determined for one in fits.fits.values())
    parts = [
        Part(rows=_fit_rows(fits)),
        Part(rows=points, lines=[] if sure else [UNDETERMINED]),
    ]
    tree = [{**key._asdict(), **one._asdict()} for key, one in fits.fits.items()]
    show(options, Report("Calibration", parts, tree))


def _chosen(found: Sequence[Measurement], options: argparse.Namespace) -> list[Measurement]:
    """Selects measurements of the batches and contexts that the options name.

    Raises:
      ConfigError: none has them.
    """
    chosen = [
        one
        for one in found
        if (not options.batches or one.batch in options.batches)
        and (not options.contexts or one.context in options.contexts)
    ]
    if found and not chosen:
        there = sorted({(one.batch, one.context) for one in found})
        loads = ", ".join(f"{batch} of {context} tokens" for batch, context in there)
        raise ConfigError(f"--batches, --contexts: the timeline has {loads}")
    return chosen


def _fit_rows(fits: Calibration) -> list[list[str]]:
    """Returns a heading, and the fit of each stage."""
    rows = [["", "format", "constant µs", "× bytes", "× FLOPs", "points", "worst error"]]
    for key, one in fits.fits.items():
        name = f"{key.stage} {key.layers}, {key.model} on {key.hardware}"
        factors = f"{one.constant * 1e6:.1f}", f"{one.memory:.2f}", f"{one.compute:.2f}"
        error = f"{one.error:.1%}{'' if one.determined else ' ?'}"
        rows.append([name, key.format, *factors, str(one.points), error])
    return rows


def _point_rows(found: Sequence[Measurement], fits: Calibration, configs: Path) -> list[list[str]]:
    """Returns a heading, and each measurement with its roofline and what its fit says."""
    rows = [["", "batch", "context", "padded", "roofline µs", "measured", "fit"]]
    for one in found:
        key, terms, roofline = expected(one, configs)
        name = f"{one.op} {key.layers}, {key.model} on {one.device_kind}"
        padded = f"{one.padded or one.tokens or one.batch}x{one.reach or one.context}"
        seconds = roofline, one.seconds, fits.fits[key].seconds(terms)
        times = (f"{value * 1e6:.1f}" for value in seconds)
        rows.append([name, str(one.batch), str(one.context), padded, *times])
    return rows
