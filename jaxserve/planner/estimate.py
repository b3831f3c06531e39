"""A deployment's speed, estimated from its compiled programs: no device has run them.

Called by `plan estimate`, which compiles and counts, or reads earlier counts. Numbers that no
program shows are in `pallas_kernels/estimate/assumptions.py`. A stage is a lane's work for one
layer on one role: launches, bytes, its kernels' time beyond bytes, and its collectives. The figure
charges every byte and every kernel, one after the other; the range spans what is not known.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jaxserve.config.formats import FormatName
from jaxserve.config.topology import Role
from jaxserve.planner.calibration import MeasuredStage
from jaxserve.planner.measurements import SIZES, Measurement
from jaxserve.planner.view import declared
from pallas_kernels.estimate.assumptions import ADVERSE, PUBLISHED, assumed, assuming

SHARED = ("shared gate and up", "shared down")
"""The shared expert's kernels. Each runs during one of the last collectives of `ffn_moe`."""
ROLES: tuple[Role, Role] = ("attention", "ffn")
STAGES: dict[MeasuredStage, str] = {"attend": "attend_moe", "ffn": "ffn_moe", "leave": "leave"}
"""The stages that become measurements, each with its program."""


class Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective of a program, and the kernels scheduled between its start and its end."""

    collective: str
    """Name, a key of `ProgramCounts.exchanged`."""
    size: int
    """Bytes of `ProgramCounts.exchanged` that this collective moves."""
    exchanging: int
    """Bytes that the collective reads and writes, of existing rows only."""
    instructions: int
    """Number of kernels."""
    bytes: int
    """Bytes of the kernels, without rows that no token chose."""


class ProgramCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of one program on one device."""

    layers: int
    """Layers that run it in a step."""
    instructions: int
    bytes: int
    """Bytes read and written, without the page pool."""
    arguments: int
    """Number of arrays that a call takes."""
    exchanging: int = 0
    """Part of `bytes` that collectives read and write, while the slower links move them."""
    absent: int = 0
    """Part of the other bytes that belongs to rows no token chose on average. Buffers have room for
    all choices, but kernels touch only rows of the experts on the device."""
    exchanged: dict[str, int] = {}
    """Bytes of collectives by name and by the mesh axes, or the number of neighbours, that they go
    over. A second collective of the same name starts with "2. "."""
    beside: list[Beside] = []
    """Collectives during which kernels run; included in the counts above."""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of a deployment, written by `plan estimate --count` into `configs/estimates/`."""

    config: str
    model: str
    format: FormatName
    """Number format of weights, cache and messages."""
    topology: str
    context: int
    tokens: int
    """Tokens of a lane in a step, on all attention devices together."""
    dp: int
    tp: int
    ep: int
    ffn_tp: int
    process_devices: int
    """Devices of a process, which has one role. On GPUs `launch` starts a process a device."""
    lanes: int
    """Lanes that take turns: a sequence has a token when all lanes have passed all layers."""
    kernels: dict[str, float]
    """Seconds of the kernels of `attend` and `ffn` beyond the time of their bytes, and of the
    shared expert's own kernels (`SHARED`)."""
    cached: int
    """Bytes of the cache that a device reads in a layer."""
    message: dict[str, int]
    """Bytes of a device's `dispatch` and `combine`."""
    programs: dict[str, ProgramCounts]
    instances: int = 1
    """Instances of the ffn role: copies of a message, and answers to it."""
    sorts: int = 1
    """Calls of `sort_choices` in `ffn_moe`."""
    note: str = "estimate"

    def members(self, role: Role) -> tuple[int, int]:
        """Returns the mesh of a role, of a single instance for ffn: collectives stay inside one."""
        return (self.ep // self.instances, self.ffn_tp) if role == "ffn" else (self.dp, self.tp)

    @property
    def layers(self) -> int:
        return sum(one.layers for name, one in self.programs.items() if role_of(name) == "ffn")

    @property
    def devices(self) -> dict[str, int]:
        return {"attention": self.dp * self.tp, "ffn": self.ep * self.ffn_tp}

    def mean(self, role: Role, seconds: Callable[[str], float]) -> float:
        """Mean for a layer of the seconds of a role's programs, by name."""
        chosen = ((name, one) for name, one in self.programs.items() if role_of(name) == role)
        return sum(one.layers * seconds(name) for name, one in chosen) / self.layers


def role_of(program: str) -> Role:
    """Role that runs a program."""
    return "ffn" if program.startswith("ffn") else "attention"


def every_byte(counts: Counts) -> Counts:
    """Returns counts that charge everything: the bytes of collectives beside the links' time,
    nothing beside collectives, and all rows that buffers have room for."""
    replace, programs = msgspec.structs.replace, counts.programs.items()
    whole = {name: replace(one, exchanging=0, absent=0, beside=[]) for name, one in programs}
    return replace(counts, programs=whole)


# ------------------------------------------------------------------------------------ one program


def program_seconds(one: ProgramCounts, outer: int, inner: int) -> tuple[float, float]:
    """Returns the seconds of a program's own work and of its collectives.

    Args:
      outer: size of the role's outer mesh axis.
      inner: size of its tp axis.
    """
    moved = one.bytes - one.exchanging - one.absent
    work = one.instructions * assumed("h200.node") + moved / assumed("h200.memory")
    return work, sum(
        collective_seconds(name, size, outer, inner) for name, size in one.exchanged.items()
    )


def hidden_seconds(
    one: ProgramCounts, outer: int, inner: int, beyond: Sequence[float] = ()
) -> float:
    """Returns the seconds of `program_seconds` that collectives and kernels beside them share.

    The longer of a collective and the kernels beside it sets the time. The kernels run on the
    multiprocessors that the collective's own kernel leaves, and have the memory while the
    collective does not use it.

    Args:
      beyond: seconds that kernels beside the last collectives, one each, take beyond their bytes.
    """
    units, taken = assumed("h200.multiprocessors"), assumed("h200.collective_multiprocessors")
    total = 0.0
    first = len(one.beside) - len(beyond)
    for place, each in enumerate(one.beside):
        moving = collective_seconds(each.collective, each.size, outer, inner)
        launches = each.instructions * assumed("h200.node")
        longer = beyond[place - first] if place >= first else 0.0
        reading = each.bytes / assumed("h200.memory") + longer
        shared = each.exchanging / assumed("h200.memory")
        slower = launches + reading * units / (units - taken) + shared
        total += moving + launches + reading - max(moving, slower)
    return total


def _members(name: str, outer: int, inner: int) -> tuple[int, int]:
    """Returns a collective's group size, and its members on one host, the inner axis first."""
    host = int(assumed("h200.host_devices"))
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


def collective_seconds(name: str, size: int, outer: int, inner: int) -> float:
    """Returns the seconds of a collective over the fast links, and one NIC a GPU between hosts.

    Bytes that leave the host are gathered, or summed up, among the members on it, each of which
    carries its share. In an all-to-all every device has other bytes, and carries all of its own.

    Args:
      name: as in `ProgramCounts.exchanged`.
    """
    devices, local = _members(name, outer, inner)
    if devices == 1:
        return 0.0
    inside = size * (devices - 1) / devices
    outside = inside / local if devices > local else 0.0
    if "all-to-all" in name:
        inside, outside = size * (local - 1) / devices, size * (devices - local) / devices
    seconds = max(inside / assumed("h200.link"), outside / assumed("h200.network"))
    return assumed("h200.collective") + seconds


class ProgramSeconds(NamedTuple):
    """Seconds of a program: its own work and collectives, what both share, and its kernels' seconds
    beyond their bytes."""

    work: float
    collectives: float
    hidden: float
    kernels: float

    @property
    def seconds(self) -> float:
        """The whole stage, with the part of collectives that nothing hides."""
        return self.work + self.collectives - self.hidden + self.kernels


def stages(counts: Counts) -> dict[str, ProgramSeconds]:
    """Returns the seconds of every program."""
    shared = [counts.kernels[name] for name in SHARED if name in counts.kernels]
    found = {}
    for name, one in counts.programs.items():
        mesh, kernels, beyond = counts.members(role_of(name)), 0.0, shared[:0]
        if name.startswith(("attend", "enter")):
            kernels = counts.cached / assumed("h200.memory") + counts.kernels["attend"]
        if name == "ffn_moe":
            # A launch of each sort is among the program's instructions.
            sorting = counts.sorts * max(0.0, assumed("h200.sort") - assumed("h200.node"))
            kernels = counts.kernels["ffn"] + sum(shared) + sorting
            beyond = shared if one.beside else beyond
        hidden = hidden_seconds(one, *mesh, beyond)
        found[name] = ProgramSeconds(*program_seconds(one, *mesh), hidden, kernels)
    return found


# ----------------------------------------------------------------------------------- a deployment


class Bounds(NamedTuple):
    """Seconds that a lane's layer occupies each resource, the mean of all layers. The longest sets
    the pace."""

    attention: float
    """A step's end included."""
    ffn: float
    network: float
    host: float

    def longest(self) -> str:
        """Returns the name of the resource that sets the pace."""
        return max(self._fields, key=lambda name: getattr(self, name))


def bounds(counts: Counts) -> Bounds:
    """Returns the seconds of each resource."""
    found = stages(counts)
    attention, ffn = (counts.mean(role, lambda name: found[name].seconds) for role in ROLES)
    network = counts.instances * max(counts.message.values()) / assumed("h200.network")
    return Bounds(attention, ffn, network, sum(host_parts(counts).values()))


def host_parts(counts: Counts) -> dict[str, float]:
    """Returns the seconds that a lane's layer takes of the busiest process's enqueueing thread.

    The parts are the program's call, its arguments and launches, a message with its answer, and
    the plans that attention's first process sends and each host's first process hands on.

    The calling thread launches the kernels of a single device. With several devices each has a
    thread (XLA's `PjRtStreamExecutorLoadedExecutable::Execute`), assumed to be as fast.
    """
    own, programs = counts.process_devices, counts.programs
    call, argument, message = (
        assumed(f"host.{name}") + (own - 1) * assumed(f"host.{name}_device")
        for name in ("call", "argument", "message")
    )
    devices, of_host = sum(counts.devices.values()), assumed("h200.host_devices")
    here = math.ceil(min(devices, of_host) / own) - 1
    hosts = min(math.ceil(devices / of_host) - 1, assumed("host.hosts_each"))
    launch, found = assumed("host.launch"), []
    for role in ROLES:
        parts = {
            "call": counts.mean(role, lambda name: call),
            "arguments": counts.mean(role, lambda name: programs[name].arguments * argument),
            "launches": counts.mean(role, lambda name: programs[name].instructions * launch),
            "message": counts.instances * message,
            "driver": assumed("host.python"),
        }
        if below := (here if hosts else 0) if role == "ffn" else here + hosts:
            plan = assumed("host.plan") + below * assumed("host.plan_below")
            parts["plans"] = plan / counts.layers
        found.append(parts)
    return max(found, key=lambda parts: sum(parts.values()))


class Case(NamedTuple):
    """A set of assumptions and the speed that follows from it."""

    name: str
    pace: float
    """Seconds of a lane's layer."""
    bound: str
    """Resource that sets the pace."""

    def speed(self, counts: Counts) -> float:
        """Tokens/s a device of all roles."""
        return counts.tokens / (counts.layers * self.pace) / sum(counts.devices.values())

    def text(self, counts: Counts) -> str:
        """The speed and what it rests on."""
        return f"{self.speed(counts):.0f}, bound by {self.bound}: {self.name}"


def case(
    name: str,
    counts: Counts,
    *,
    serial: bool = False,
    waits: bool = False,
    values: Mapping[str, float] | None = None,
) -> Case:
    """Returns the speed that follows from these counts.

    Args:
      serial: receives run on the compute stream, so the network's time adds to both roles.
      waits: messages wait for a wave of attention's blocks.
      values: assumptions other than those of `pallas_kernels/estimate/assumptions.py`.
    """
    with assuming(values or {}):
        found = bounds(counts)
        receiving = found.network if serial else 0.0
        attention = found.attention + receiving + waits * assumed("h200.contention")
        found = found._replace(attention=attention, ffn=found.ffn + receiving)
    return Case(name, max(found), found.longest())


def figure(counts: Counts) -> Case:
    """Returns the figure: every byte and kernel charged, one after the other."""
    return case("everything charged, nothing side by side", every_byte(counts))


def best(counts: Counts) -> Case:
    """Returns the upper end of the range: published costs, and collectives beside kernels."""
    name = f"kernels beside collectives as scheduled, {_named(PUBLISHED)}"
    return case(name, counts, values=PUBLISHED)


def worst(counts: Counts) -> Case:
    """Returns the lower end of the range: all adverse costs together."""
    contention = f"a message waits {assumed('h200.contention') * 1e6:g} µs for attention"
    receives = "receives on the compute stream"
    name = f"everything charged, {_named(ADVERSE)}, {receives}, {contention}"
    return case(name, every_byte(counts), serial=True, waits=True, values=ADVERSE)


_WORDS = {
    "h200.node": "launches {:g} µs",
    "h200.sort": "a sort of choices {:g} µs",
    "h200.collective": "collectives {:g} µs",
    "host.message": "{:g} µs of the host a message",
}


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(_WORDS[name].format(value * 1e6) for name, value in values.items())


# ------------------------------------------------------------------------------------- the report


def lines(counts: Counts) -> list[str]:
    """Returns the report of a deployment."""
    charged, own = every_byte(counts), figure(counts)
    (part,) = declared(
        "estimate",
        counts=counts,
        title=_title(counts),
        speed=_speed(counts, own),
        own=own,
        range=_range(counts),
        worst=worst(counts),
        best=best(counts),
        stages=stages(counts),
        charged=stages(charged),
        bounds=bounds(charged),
        host=host_parts(counts),
        times=_times,
    )
    return list(part.lines)


def one_line(counts: Counts) -> str:
    """Returns the figure and range of a deployment that is not shown in full."""
    return (
        f"{_title(counts)}: {_speed(counts, figure(counts))}; range {_range(counts)}; more with "
        f"--config {counts.config}"
    )


def _title(counts: Counts) -> str:
    return f"ESTIMATE of {counts.config} on {counts.topology} at {counts.context}"


def _range(counts: Counts) -> str:
    return f"{worst(counts).speed(counts):.0f} to {best(counts).speed(counts):.0f} tokens/s a GPU"


def _speed(counts: Counts, own: Case) -> str:
    # All lanes pass a layer before the first comes back to it.
    between = counts.lanes * counts.layers * own.pace
    return (
        f"{own.speed(counts):.0f} tokens/s a GPU, {counts.lanes * counts.tokens} sequences with a "
        f"token every {between * 1e3:.1f} ms, bound by {own.bound}"
    )


def _times(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in found.items())


def measured_lines(counts: Counts, found: Iterable[Measurement]) -> list[str]:
    """Returns a line for each counted stage that was measured with the same rows, formats and
    sharding, and the figure with these in place of the counted ones; nothing where none was
    measured at this load. Collectives are in neither."""

    def load(one: Measurement) -> tuple[object, ...]:
        own = one.tp, one.batch, one.context
        if one.op == "ffn":
            own = one.ep, one.ffn_tp, one.batch * one.dp
        return one.op, one.model, one.format, one.cache or one.format, own

    # Of several measurements of a load the first counts.
    measured = {load(one): one for one in reversed([*found]) if one.source == "measured"}
    made, lines = bounds(every_byte(counts)), []
    for own in measurements(counts):
        if load(own) in measured:
            one, program = measured[load(own)], STAGES[own.op]
            role = role_of(program)
            more = (one.seconds - own.seconds) * counts.programs[program].layers / counts.layers
            made = made._replace(**{role: getattr(made, role) + more})
            lines.append(
                f"{program} counted {own.seconds * 1e6:.1f} µs, measured {one.seconds * 1e6:.1f} "
                f"on {one.device_kind}"
            )
    whole = Case("the figure with measured stages", max(made), made.longest())
    return [*lines, whole.text(counts)] if lines else []


def measurements(counts: Counts) -> list[Measurement]:
    """Returns the figure's stages without their collectives, for `--calibration`, labelled as
    estimates."""
    counts = every_byte(counts)
    found = stages(counts)
    return [
        Measurement(
            device_kind="NVIDIA H200",
            op=op,
            model=counts.model,
            batch=counts.tokens // counts.dp,
            context=counts.context,
            format=counts.format,
            dispatch=counts.format,
            seconds=found[name].seconds - found[name].collectives,
            source="estimate",
            **{size: getattr(counts, size) for size in SIZES},
        )
        for op, name in STAGES.items()
        if name in found
    ]
