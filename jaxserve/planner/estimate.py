"""`plan estimate`: stage times from counted programs, which no device has run.

The command compiles a deployment's programs and counts them, or reads earlier counts, and shows the
speed that follows. Preflight shows it beside what it measured. Numbers that no program shows are in
`pallas_kernels/estimate/assumptions.py`. A program takes its launches, its bytes, its kernels' time
beyond bytes, and its collectives, one after the other. The engine's schedule makes a step of them.
"""

import argparse
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import NCCL_HOST, Assumptions, measured_speed
from jaxserve.planner.calibration import MeasuredStage
from jaxserve.planner.counts import Counts, count, role_of
from jaxserve.planner.hardware import (
    Hardware,
    read_struct,
)
from jaxserve.planner.lanes import Disaggregated, OneDispatch, step_seconds
from jaxserve.planner.measurements import SIZES, Measurement, read_measurements
from jaxserve.planner.options import read_deployment
from jaxserve.planner.stage_times import WAITS, StepTimes
from jaxserve.planner.view import json_text, reported, show
from pallas_kernels.estimate.assumptions import assumed

ASSUMED = Assumptions()
ESTIMATES = CONFIGS / "estimates"
"""Counts of shipped deployments."""
COMMITTED = ESTIMATES / "step3.json"
"""Counts shown when no deployment is named."""
STAGES: dict[MeasuredStage, str] = {"attend": "attend_moe", "ffn": "ffn_moe", "leave": "leave"}
"""The stages that become measurements, each with its program."""


def _members(name: str, outer: int, inner: int, host: int) -> tuple[int, int]:
    """Returns a collective's group size and its members on one host, the inner axis first."""
    _, _, over = name.partition(" over ")
    axes = over.split()
    if axes[1:] == ["neighbours"]:
        size = int(axes[0])
        return size, min(size, host) if host % size == 0 or size % host == 0 else 1
    if not axes or len(axes) > 1:
        return outer * inner, min(outer * inner, host)
    if axes == ["tp"]:
        return inner, min(inner, host)
    return outer, min(outer, max(1, host // inner))


def collective_seconds(name: str, size: int, outer: int, inner: int, on: Hardware) -> float:
    """Returns the seconds of a collective, named as in `ProgramCounts.exchanged`, in a role whose
    mesh has `outer` × `inner` devices, the latter along tp.

    It goes over the links of a slice of the collective's size, or over a host's fast links and one
    NIC a GPU between hosts. Bytes that leave the host are gathered, or summed up, among the members
    on it, each of which carries its share. In an all-to-all every device has other bytes, and
    carries all of its own.
    """
    devices, local = _members(name, outer, inner, on.devices_per_host)
    if devices == 1:
        return 0.0
    local, exchanged = devices if on.torus else local, "all-to-all" in name
    inside, outside = size * (devices - 1) / devices, 0.0
    if devices > local:
        outside = size * (devices - local) / devices if exchanged else inside / local
        inside -= outside * exchanged
    bandwidth = on.alltoall_bandwidth if exchanged else on.gather_bandwidth
    moving = max(inside / bandwidth(devices), outside / on.network)
    return _latency(on, devices) + moving / ASSUMED.network


def crossing_seconds(counts: Counts, size: int, *, whole: bool) -> float:
    """Returns the seconds of a device's message or answer between the roles, `whole` as in
    `figure`. On TPUs the roles are halves of a slice, and all messages cross its middle at once."""
    on, devices, width = counts.hardware, counts.devices, counts.hardware.network
    latency = _latency(on, devices) if whole else ASSUMED.crossing_seconds
    if devices <= on.link_devices:
        width = min(on.link, on.middle_bandwidth(devices) / (counts.dp * counts.tp))
    return latency + counts.instances * size / width / ASSUMED.network


def _latency(on: Hardware, devices: int) -> float:
    return ASSUMED.collective_seconds + ASSUMED.hop_seconds * on.hops(devices)


class ProgramSeconds(NamedTuple):
    """Seconds of a program: its own work, kernels included, and its collectives."""

    work: float
    collectives: float

    @property
    def seconds(self) -> float:
        return self.work + self.collectives


def stages(counts: Counts) -> dict[str, ProgramSeconds]:
    """Returns the seconds of every program."""
    found, on = {}, counts.hardware
    node, memory = (assumed(f"{counts.generation}.{name}") for name in ("node", "memory"))
    for name, one in counts.programs.items():
        work = one.instructions * node + one.bytes / memory
        if name.startswith(("attend", "enter")):
            work += counts.cached / memory + counts.kernels["attend"]
        if name == "ffn_moe":
            # A launch of each sort is among the program's instructions.
            sorting = counts.sorts * max(0.0, assumed("h200.sort") - node)
            work += counts.kernels["ffn"] + sorting
        mesh = counts.members(role_of(name))
        moving = (collective_seconds(*each, *mesh, on) for each in one.exchanged.items())
        found[name] = ProgramSeconds(work, sum(moving))
    return found


class Figure(NamedTuple):
    """A deployment's speed, as the engine's schedule makes it of its stages, without the host."""

    counts: Counts
    step: float
    """Seconds between a sequence's tokens."""
    bounds: dict[str, float]
    """Seconds of a lane's layer by resource, the mean of all layers; attention ends the step."""

    @property
    def bound(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def speed(self) -> float:
        return self.counts.lanes * self.counts.tokens / self.step / self.counts.devices

    @property
    def text(self) -> str:
        sequences = self.counts.lanes * self.counts.tokens
        return (
            f"{self.speed:.0f} tokens/s a device, {sequences} sequences with a token every "
            f"{self.step * 1e3:.1f} ms, bound by {self.bound}"
        )


def figure(
    counts: Counts, instead: Mapping[str, float] | None = None, *, whole: bool = False
) -> Figure:
    """Returns the speed that follows from the counts, with seconds of programs by name `instead` of
    the counted ones. In `whole` steps (`pipeline: step`) messages are collectives of the programs.
    """
    seconds = {name: one.seconds for name, one in stages(counts).items()} | dict(instead or {})
    attend, ffn = counts.by_layer("attention", seconds), counts.by_layer("ffn", seconds)
    leave, layers = seconds.get("leave", 0.0), counts.layers
    crossing = {
        stage: crossing_seconds(counts, size, whole=whole) for stage, size in counts.message.items()
    }
    times = StepTimes(
        attend=np.array(attend)[:, None],
        ffn=np.array(ffn),
        leave=leave,
        dispatch=np.full(layers, crossing["dispatch"]),
        combine=np.full(layers, crossing["combine"]),
        waits=WAITS[counts.hardware.platform],
    )
    bounds = {"attention": (sum(attend) + leave) / layers, "ffn": sum(ffn) / layers}
    bounds["network"] = max(crossing.values())
    kind = OneDispatch if whole else Disaggregated
    return Figure(counts, step_seconds(times, counts.lanes, 1, kind=kind), bounds)


class Paced(NamedTuple):
    """A pipeline's host, and the time between a sequence's tokens with it, least and most."""

    pipeline: str
    host: tuple[float, float]
    """Seconds of a layer and lane."""
    step: tuple[float, float]
    """Seconds, with devices as fast beside their predictions as measured systems (p90, p10)."""


def paced(counts: Counts) -> list[Paced]:
    """Returns both pipelines; lanes share a host, whose time for all is a step's least."""
    hardware, layers = counts.hardware, counts.layers
    devices = counts.dp * counts.tp, counts.ep * counts.ffn_tp
    least = ASSUMED.host((hardware, hardware), devices, layers)
    host = least, least if hardware.torus else NCCL_HOST
    speed, turns = measured_speed().systems, counts.lanes * layers
    found = []
    for pipeline, each in (("layer", host), ("step", (0.0, 0.0))):
        alone = figure(counts, whole=pipeline == "step").step
        least, most = alone / speed.p90, alone / speed.p10
        found.append(
            Paced(pipeline, each, (max(least, turns * each[0]), max(most, turns * each[1])))
        )
    return found


def heading(counts: Counts) -> str:
    """Returns the heading of a report."""
    return f"ESTIMATE of {counts.config} on {counts.topology} at {counts.context}"


def measured_lines(counts: Counts, found: Iterable[Measurement]) -> list[str]:
    """Returns a line for each counted stage that was measured with the same rows, formats and
    sharding, on a GPU or a TPU as counted, and the figure with these in place of the counted ones;
    nothing where none was measured at this load. Collectives are as counted."""

    def load(one: Measurement) -> tuple[object, ...]:
        own = one.tp, one.batch, one.context
        if one.op == "ffn":
            own = one.ep, one.ffn_tp, one.batch * one.dp
        return one.op, one.model, one.format, one.cache or one.format, own

    # Of several measurements of a load the first counts.
    tpu = counts.hardware.device_kinds[0].startswith("TPU")
    known = [one for one in reversed([*found]) if one.device_kind.startswith("TPU") == tpu]
    measured = {load(one): one for one in known if one.source == "measured"}
    counted, instead, told = stages(counts), dict[str, float](), []
    for own in measurements(counts):
        if load(own) in measured:
            one, program = measured[load(own)], STAGES[own.op]
            instead[program] = one.seconds + counted[program].collectives
            told.append(
                f"{program} counted {own.seconds * 1e6:.1f} µs, measured {one.seconds * 1e6:.1f} "
                f"on {one.device_kind}"
            )
    return [*told, f"with measured stages {figure(counts, instead).text}"] if told else []


def measurements(counts: Counts) -> list[Measurement]:
    """Returns the stages without their collectives, for `--calibration`, labelled as estimates."""
    found = stages(counts)
    return [
        Measurement(
            device_kind=counts.hardware.device_kinds[0],
            op=op,
            model=counts.model,
            batch=counts.tokens // counts.dp,
            context=counts.context,
            format=counts.format,
            dispatch=counts.format,
            seconds=found[name].work,
            source="estimate",
            **{size: getattr(counts, size) for size in SIZES},
        )
        for op, name in STAGES.items()
        if name in found
    ]


def run(options: argparse.Namespace) -> None:
    """Counts if asked to, shows, and writes."""
    file = options.config
    path = COMMITTED if file is None else ESTIMATES / f"{file.stem}.json"
    if options.count:
        counted = count(options, read_deployment(options))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_text(counted) + "\n", encoding="utf-8")
    elif options.set:
        raise ConfigError(
            f"--set {' '.join(options.set)}: with --count alone, as {path} is counted"
        )
    elif not path.is_file():
        known = sorted(each.stem for each in ESTIMATES.glob("*.json"))
        raise ConfigError(f"--config {file}: not counted, as --count does it: {', '.join(known)}")
    counts, more = read_struct(path, Counts, json=True), list[list[str]]()
    own = measurements(counts)
    if options.calibration is not None:
        told = measured_lines(counts, read_measurements(options.calibration))
        more.append(told or ["no stage was measured at this load"])
    if options.config is None:
        others = [each for each in sorted(ESTIMATES.glob("*.json")) if each != COMMITTED]
        more.append(
            [
                f"{heading(each)}: {figure(each).text}; more with --config {each.config}"
                for each in (read_struct(path, Counts, json=True) for path in others)
            ]
        )
    if options.write is not None:
        options.write.write_text(json_text(own) + "\n", encoding="utf-8")
        more.append([f"{options.write}: stages, labelled as estimates"])
    report = reported(
        "estimate",
        f"{counts.config}, estimated",
        counts=counts,
        heading=heading(counts),
        programs=stages(counts),
        own=figure(counts),
        measured=measured_speed().systems,
        paced=paced(counts),
        more=more,
        stages=own,
    )
    show(options, report)
