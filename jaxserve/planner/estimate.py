"""A deployment's speed, estimated from its compiled programs: no device has run them.

Called by `plan estimate`, which compiles and counts, or reads what was counted. Arithmetic over
counts; what it takes for granted is `pallas_kernels/estimate/assumptions.py`. A stage is a lane's
work for one layer on one role: launches, bytes, what its kernels take beyond their bytes, and its
collectives, one after the other, but for the kernels that the program's schedule has beside one.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.errors import ConfigError
from pallas_kernels.estimate.assumptions import assumed

SHARED = ("shared gate and up", "shared down")
"""The shared expert's kernels, each beside one of the last collectives of `ffn_moe`."""


class Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective of a program, and the kernels between its start and its end."""

    collective: str
    """As of `ProgramCounts.exchanged`."""
    size: int
    """Its share of that."""
    exchanging: int
    """Bytes that it reads and writes."""
    instructions: int
    """The kernels."""
    bytes: int
    """And theirs, without those of rows that no token chose."""


class ProgramCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was counted of one program, of one device."""

    layers: int
    """Layers that run it in a step."""
    instructions: int
    bytes: int
    """Read and written, without the pool of pages."""
    arguments: int
    """Arrays that a call takes."""
    exchanging: int = 0
    """Of the bytes those that collectives read and write: while the links move them, and faster."""
    absent: int = 0
    """Of the others, those of rows that no token chose on average: there is room for all choices,
    and kernels touch the rows of the experts that are here."""
    exchanged: dict[str, int] = {}
    """Bytes of collectives, by name and the mesh axes that they go over, or how many neighbours, if
    not all; of another one of a name behind "2. "."""
    beside: list[Beside] = []
    """Those of them that kernels run beside; all counted above, too."""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a deployment: what `plan estimate --count` writes, and `configs/estimates/` keeps."""

    config: str
    model: str
    format: str
    """Number format of weights, cache and messages."""
    topology: str
    context: int
    tokens: int
    """Of a lane in a step, on all devices of attention together."""
    dp: int
    tp: int
    ep: int
    ffn_tp: int
    process_devices: int
    """Devices of a process, which has one role; on GPUs a process a device is what starts
    (launch/README.md)."""
    lanes: int
    """Lanes that take turns: a sequence has a token when all have been through all layers."""
    kernels: dict[str, float]
    """Seconds of the kernels of `attend` and `ffn` beyond the time of their bytes, and of those of
    the shared expert (`SHARED`), where it has its own."""
    cached: int
    """Bytes of the cache that a device reads in a layer."""
    message: dict[str, int]
    """Bytes of a device's `dispatch` and `combine`."""
    programs: dict[str, ProgramCounts]
    instances: int = 1
    """Of the ffn role: copies of a message, and answers to it."""
    note: str = "estimate"

    @property
    def meshes(self) -> dict[str, tuple[int, int]]:
        """Of the roles."""
        return {"attention": (self.dp, self.tp), "ffn": (self.ep, self.ffn_tp)}

    def members(self, role: str) -> tuple[int, int]:
        """Of the role's mesh, or of an instance's, between which nothing moves."""
        outer, inner = self.meshes[role]
        return (outer // self.instances if role == "ffn" else outer), inner

    @property
    def layers(self) -> int:
        """Of the model."""
        return sum(one.layers for name, one in self.programs.items() if name.startswith("ffn"))

    @property
    def devices(self) -> dict[str, int]:
        """Of the roles."""
        return {role: outer * inner for role, (outer, inner) in self.meshes.items()}


class Bounds(NamedTuple):
    """Seconds that a lane's layer occupies each of what it passes; the longest sets the pace."""

    attention: float
    ffn: float
    network: float
    host: float

    def longest(self) -> str:
        """Its name."""
        return max(self._fields, key=lambda name: getattr(self, name))


def read(path: Path) -> Counts:
    """Counts from a file.

    Raises:
      ConfigError: it is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Counts)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def program_seconds(one: ProgramCounts, outer: int, inner: int) -> tuple[float, float]:
    """Of a program: work, and collectives, of a role whose mesh has axes of these sizes; the inner
    one is tp."""
    moved = one.bytes - one.exchanging - one.absent
    work = one.instructions * assumed("h200.node") + moved / assumed("h200.memory")
    return work, sum(
        _exchange_seconds(name, size, outer, inner) for name, size in one.exchanged.items()
    )


def hidden_seconds(
    one: ProgramCounts, outer: int, inner: int, beyond: Sequence[float] = ()
) -> float:
    """Of what `program_seconds` has one after the other, what goes by side by side.

    Whichever takes longer sets the time: the collective, or the kernels beside it. They have the
    multiprocessors that its own kernel leaves them, and the memory while it does not read and write
    it.

    Args:
      beyond: seconds that kernels beside the last collectives, one each, take beyond their bytes.
    """
    units, taken = assumed("h200.multiprocessors"), assumed("h200.collective_multiprocessors")
    total = 0.0
    first = len(one.beside) - len(beyond)
    for place, each in enumerate(one.beside):
        moving = _exchange_seconds(each.collective, each.size, outer, inner)
        launches = each.instructions * assumed("h200.node")
        longer = beyond[place - first] if place >= first else 0.0
        reading = each.bytes / assumed("h200.memory") + longer
        shared = each.exchanging / assumed("h200.memory")
        slower = launches + reading * units / (units - taken) + shared
        total += moving + launches + reading - max(moving, slower)
    return total


def _exchange_seconds(name: str, size: int, outer: int, inner: int) -> float:
    """`collective_seconds` of one by its name, as of `ProgramCounts.exchanged`."""
    members = _members(name, outer, inner)
    return collective_seconds(size, *members, apart="all-to-all" in name)


def _members(name: str, outer: int, inner: int) -> tuple[int, int]:
    """Of a collective's group: all, and those on one host; neighbours on the inner axis first."""
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


def collective_seconds(size: int, devices: int, local: int, *, apart: bool = False) -> float:
    """Over the fast links, and over one NIC a GPU where it leaves the host: what goes there is
    gathered, or summed up, among the `local` ones of a host, and each carries its share.

    Args:
      apart: every device has others' bytes (all-to-alls): each carries all that leaves the host.
    """
    if devices == 1:
        return 0.0
    inside = size * (devices - 1) / devices
    outside = inside / local if devices > local else 0.0
    if apart:
        inside, outside = size * (local - 1) / devices, size * (devices - local) / devices
    seconds = max(inside / assumed("h200.link"), outside / assumed("h200.network"))
    return assumed("h200.collective") + seconds


def stage_seconds(counts: Counts) -> dict[str, float]:
    """Of every program, collectives included where nothing hides them."""
    found = {}
    for name, one in counts.programs.items():
        role = "ffn" if name.startswith("ffn") else "attention"
        seconds = sum(program_seconds(one, *counts.members(role))) - _hidden(counts, name)
        if name.startswith(("attend", "enter")):
            seconds += counts.cached / assumed("h200.memory") + counts.kernels["attend"]
        if name.endswith("_moe") and role == "ffn":
            seconds += counts.kernels["ffn"] + sum(_shared(counts))
        found[name] = seconds
    return found


def bounds(counts: Counts, process_devices: int = 0) -> Bounds:
    """On the mean of all layers; a step's end counts as attention's.

    Args:
      process_devices: instead of those counted.
    """
    seconds = stage_seconds(counts)
    host = sum(host_parts(counts, process_devices).values())
    network = counts.instances * max(counts.message.values()) / assumed("h200.network")
    return Bounds(
        _mean(counts, seconds, ffn=False), _mean(counts, seconds, ffn=True), network, host
    )


def _mean(counts: Counts, seconds: dict[str, float], *, ffn: bool) -> float:
    """Of a role's programs, for a layer."""
    programs = counts.programs
    chosen = [name for name in programs if name.startswith("ffn") == ffn]
    return sum(programs[name].layers * seconds[name] for name in chosen) / counts.layers


def host_parts(counts: Counts, process_devices: int = 0) -> dict[str, float]:
    """Seconds that a lane's layer takes of the busiest process's thread that enqueues, by what it
    does: a call of a program, its launches, a message with its answer, and the plans to the other
    processes of its host and to other hosts, which the first of attention's sends and the first of
    each host hands on.

    The calling thread launches a single device's kernels; of several each has a thread (XLA's
    `PjRtStreamExecutorLoadedExecutable::Execute`), taken to be as fast side by side.

    Args:
      process_devices: instead of those counted.
    """
    own = process_devices or counts.process_devices
    call = assumed("host.call") + (own - 1) * assumed("host.call_device")
    argument = assumed("host.argument") + (own - 1) * assumed("host.argument_device")
    message = assumed("host.message") + (own - 1) * assumed("host.message_device")
    devices, of_host = sum(counts.devices.values()), assumed("h200.host_devices")
    here = math.ceil(min(devices, of_host) / own) - 1
    hosts = min(math.ceil(devices / of_host) - 1, assumed("host.hosts_each"))
    found = []
    for ffn in (False, True):
        of_programs = {
            "call": dict.fromkeys(counts.programs, call),
            "arguments": {name: one.arguments * argument for name, one in counts.programs.items()},
            "launches": {
                name: one.instructions * assumed("host.launch")
                for name, one in counts.programs.items()
            },
        }
        parts = {name: _mean(counts, each, ffn=ffn) for name, each in of_programs.items()}
        parts |= {"message": counts.instances * message, "driver": assumed("host.python")}
        if below := (here if hosts else 0) if ffn else here + hosts:
            plan = assumed("host.plan") + below * assumed("host.plan_below")
            parts["plans"] = plan / counts.layers
        found.append(parts)
    return max(found, key=lambda parts: sum(parts.values()))


def tokens_per_device(counts: Counts, pace: float) -> float:
    """Tokens a second of a device, all roles counted, if a lane's layer takes `pace` seconds."""
    return counts.tokens / (counts.layers * pace) / sum(counts.devices.values())


def between_tokens(counts: Counts, pace: float) -> float:
    """Seconds between two tokens of a sequence, if a lane's layer takes `pace` seconds: its lane
    comes to the same layer again when the others have been there."""
    return counts.lanes * counts.layers * pace


def lines(counts: Counts) -> list[str]:
    """For people."""
    seconds, found = stage_seconds(counts), bounds(counts)
    result = [
        f"ESTIMATE of {counts.config} on {counts.topology} at {counts.context}, read from compiled "
        "programs; nothing was measured.",
        f"{'program':<14} {'layers':>6} {'launches':>8} {'MB':>7} {'µs':>7} {'hidden':>7}",
    ]
    for name, one in counts.programs.items():
        result.append(
            f"{name:<14} {one.layers:>6} {one.instructions:>8} {one.bytes / 1e6:>7.1f} "
            f"{seconds[name] * 1e6:>7.1f} {_hidden(counts, name) * 1e6:>7.1f}"
        )
    for devices in sorted({counts.process_devices, int(assumed("h200.host_devices"))}):
        here = bounds(counts, devices)
        result.append(
            f"{devices} GPU(s) a process: {_speed(counts, here)}; {_by_resource(counts, here)}"
        )
        result.append("  of the host's µs: " + _times(host_parts(counts, devices)))
    strict = bounds(every_byte(counts))
    pace = max(strict)
    return [
        *result,
        "µs of a lane's layer: " + _times(found._asdict()),
        f"{tokens_per_device(counts, pace):.0f} tokens/s a GPU, bound by {strict.longest()}, with "
        "the bytes of collectives and of rows that no token chose, one after the other: "
        + _times(strict._asdict()),
    ]


def one_line(counts: Counts) -> str:
    """Of another deployment."""
    return (
        f"ESTIMATE of {counts.config} on {counts.topology} at {counts.context}: "
        f"{_speed(counts, bounds(counts))}; more with --config {counts.config}"
    )


def _speed(counts: Counts, found: Bounds) -> str:
    pace = max(found)
    return (
        f"{tokens_per_device(counts, pace):.0f} tokens/s a GPU, {counts.lanes * counts.tokens} "
        f"sequences with a token every {between_tokens(counts, pace) * 1e3:.1f} ms, bound by "
        f"{found.longest()}"
    )


def _hidden(counts: Counts, name: str) -> float:
    """`hidden_seconds` of a program."""
    one, role = counts.programs[name], "ffn" if name.startswith("ffn") else "attention"
    beyond = _shared(counts) if name == "ffn_moe" and one.beside else []
    return hidden_seconds(one, *counts.meshes[role], beyond)


def _shared(counts: Counts) -> list[float]:
    """Of the shared expert's kernels, if it has its own."""
    return [counts.kernels[name] for name in SHARED if name in counts.kernels]


def every_byte(counts: Counts) -> Counts:
    """As if collectives took the time of their bytes beside that of the links, nothing ran beside
    them, and kernels touched all rows there is room for."""
    programs = {
        name: msgspec.structs.replace(one, exchanging=0, absent=0, beside=[])
        for name, one in counts.programs.items()
    }
    return msgspec.structs.replace(counts, programs=programs)


def _by_resource(counts: Counts, found: Bounds) -> str:
    return "if it were alone: " + ", ".join(
        f"{name} {tokens_per_device(counts, seconds):.0f}"
        for name, seconds in found._asdict().items()
    )


def _times(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in found.items())


def measurements(counts: Counts) -> list[dict[str, object]]:
    """What `--calibration` reads: stages without their collectives, labelled as estimates."""
    seconds, found = stage_seconds(counts), []
    for op, name in (("attend", "attend_moe"), ("ffn", "ffn_moe"), ("leave", "leave")):
        if name in seconds:
            role = "ffn" if op == "ffn" else "attention"
            _, collectives = program_seconds(counts.programs[name], *counts.members(role))
            found.append(
                {
                    "device_kind": "NVIDIA H200",
                    "op": op,
                    "model": counts.model,
                    "batch": counts.tokens // counts.dp,
                    "context": counts.context,
                    "format": counts.format,
                    "dispatch": counts.format,
                    "seconds": seconds[name] - collectives,
                    "dp": counts.dp,
                    "tp": counts.tp,
                    "ep": counts.ep,
                    "ffn_tp": counts.ffn_tp,
                    "source": "estimate",
                }
            )
    return found
