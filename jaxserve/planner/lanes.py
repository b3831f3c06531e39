"""Computes when every stage of every lane runs, device by device: the core of the simulator.

Called by `simulate.py` and `deploy.py`. `Disaggregated` follows the order of
`roles/schedule.py`, in which the driver enqueues, so no event queue is needed: a stage starts when
its input has arrived, its devices are free (they work in the order of enqueueing) and the host has
enqueued it. Lanes of all domains are numbered together; lane i belongs to domain i mod domains.
`Colocated` runs one step, which is one program, after the other. `Overlapped` runs two batches
concurrently: one computes while the messages of the other are in flight.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Required, TypedDict, Unpack

import numpy as np

from jaxserve.config.topology import Topology
from jaxserve.observe.spans import STAGES, AFDStage, Span
from jaxserve.planner.stage_times import StageTimes, StepTimes
from jaxserve.roles.schedule import Rotation

LinkMode = Literal["duplex", "shared", "sender"]
"""`duplex`: each direction is a link of its own; `shared`: both directions take turns; `sender`: a
message keeps its sender busy until it has arrived."""

Disturb = Callable[[AFDStage, np.ndarray], np.ndarray]
"""Takes a stage and its seconds, one entry per device, and returns the seconds with noise."""

Note = Callable[[Span], None]


def undisturbed(stage: AFDStage, seconds: np.ndarray) -> np.ndarray:
    """No noise."""
    return seconds


class Busy(NamedTuple):
    """Busy seconds so far, averaged over the devices of a role or direction and over the
    domains."""

    attention: float
    ffn: float
    dispatch: float
    combine: float


class Seen(NamedTuple):
    """Duration of a collective in seconds, including the wait for slower devices."""

    mean: float
    least: float
    most: float


class _Waited:
    """Statistics of the seconds that devices spent in one kind of collective so far."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.least, self.most = float("inf"), 0.0


class Setting(TypedDict, total=False):
    """Arguments of a pipeline."""

    layers: Required[int]
    """Number of layers of the model."""
    lanes: Required[int]
    groups: Required[int]
    """Lanes and DP groups of a domain."""
    domains: int
    """Attention meshes, served by one ffn mesh; 1 unless given."""
    link: LinkMode
    disturb: Disturb
    """Adds noise to a stage."""
    note: Note | None
    """Called with every stage as a span, from the first device's start to the last one's end."""


class _Pipeline:
    """Common parts of all pipelines."""

    def __init__(self, **setting: Unpack[Setting]):
        self._layers, self._groups = setting["layers"], setting["groups"]
        self._domains = setting.get("domains", 1)
        self._all_lanes = range(setting["lanes"] * self._domains)
        self._link = setting.get("link", "duplex")
        self._disturb = setting.get("disturb", undisturbed)
        self._note = setting.get("note")
        self._busy = np.zeros(4)

    @property
    def busy(self) -> Busy:
        """Busy seconds so far; for collectives without the waiting."""
        return Busy(*map(float, self._busy))

    def _tell(
        self,
        stage: AFDStage,
        lane: int,
        number: int,
        layer: int,
        at: np.ndarray | float,
        end: np.ndarray | float,
        side: int = 0,
    ) -> None:
        """Notes a stage, if anything listens."""
        if self._note is not None:
            begin, last = round(float(np.min(at)) * 1e9), round(float(np.max(end)) * 1e9)
            self._note(Span(stage, lane, layer, number, begin, last, side, begin))


class _Lane:
    """The progress of a lane; arrays have one entry per DP group."""

    def __init__(self, groups: int):
        self.times: StepTimes
        self.number = 0
        self.ready = np.zeros(groups)
        """Times at which the attention devices have their input, or have sent their output."""
        self.on_ffn = 0.0
        """Time at which the ffn role has its input, or its result."""


class Disaggregated(_Pipeline):
    """Attention and FFN on submeshes of their own."""

    def __init__(self, **setting: Unpack[Setting]):
        super().__init__(**setting)
        groups, domains = self._groups, range(self._domains)
        self._rotation = Rotation(self._layers, len(self._all_lanes))
        self._lanes = [_Lane(groups) for _ in self._all_lanes]
        self._attention_free = [np.zeros(groups) for _ in domains]
        self._link_free = [[np.zeros(groups) for _ in domains] for _ in range(2)]
        self._side_free = [0.0, 0.0]  # the ffn role's end of the link, by direction
        self._ffn_free = 0.0

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step."""
        return bool(self._rotation.active)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        inside = set(self._rotation.active)
        return [lane for lane in self._all_lanes if lane not in inside]

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        """Begins a step of a lane at `now`, the host's time."""
        self._rotation.begin(lane)
        state = self._lanes[lane]
        state.times, state.number = times, number
        state.ready = np.maximum(state.ready, now)

    def advance(self, now: float) -> tuple[int, float]:
        """Runs stages until a lane leaves: (lane, time when its last device had sampled).

        Args:
          now: the host's time, at which all these stages are enqueued.
        """
        runs: dict[str, Callable[[int, int, float], float]] = {
            "attend": self._attend,
            "dispatch": self._dispatch,
            "ffn": self._ffn,
            "combine": self._combine,
            "leave": self._leave,
        }
        for turn in self._rotation.turns:
            for stage in turn:
                end = runs[stage.name](stage.lane, stage.layer, now)
            if stage.name == "leave":
                return stage.lane, end
        raise AssertionError("the rotation has no end")

    def _attend(self, index: int, layer: int, now: float) -> float:
        lane, domain = self._lanes[index], index % self._domains
        start = np.maximum(np.maximum(lane.ready, self._attention_free[domain]), now)
        seconds = self._disturb("attend", lane.times.attend[layer])
        return self._on_attention(lane, index, layer, start, seconds)

    def _leave(self, index: int, layer: int, now: float) -> float:
        lane, domain = self._lanes[index], index % self._domains
        start = np.maximum(np.maximum(lane.ready, self._attention_free[domain]), now)
        return self._on_attention(lane, index, layer, start, np.full_like(start, lane.times.leave))

    def _on_attention(
        self, lane: _Lane, index: int, layer: int, start: np.ndarray, seconds: np.ndarray
    ) -> float:
        end = start + seconds
        self._attention_free[index % self._domains] = end
        lane.ready = end
        self._busy[0] += seconds.mean() / self._domains
        return self._span("attend", index, layer, float(start.min()), float(end.max()))

    def _dispatch(self, index: int, layer: int, now: float) -> float:
        lane, domain = self._lanes[index], index % self._domains
        free = self._link_free[0]
        start = lane.ready if self._link == "sender" else np.maximum(lane.ready, free[domain])
        seconds = self._disturb("dispatch", np.full_like(start, lane.times.dispatch[layer]))
        end = start + seconds
        self._taken(0, domain, end)
        if self._link == "sender":
            self._attention_free[domain] = end
        # The ffn role receives one message at a time; it has arrived when its last part has.
        side = self._side_free[0] + lane.times.dispatch[layer] if self._domains > 1 else 0.0
        arrived = max(float(end.max()), side)
        self._side_free[0] = arrived
        lane.ready = end
        lane.on_ffn = arrived
        self._busy[2] += seconds.mean()
        return self._span("dispatch", index, layer, float(start.min()), arrived)

    def _ffn(self, index: int, layer: int, now: float) -> float:
        lane = self._lanes[index]
        start = max(lane.on_ffn, self._ffn_free, now)
        seconds = float(self._disturb("ffn", np.array([lane.times.ffn[layer]]))[0])
        self._ffn_free = lane.on_ffn = start + seconds
        self._busy[1] += seconds
        return self._span("ffn", index, layer, start, self._ffn_free)

    def _combine(self, index: int, layer: int, now: float) -> float:
        lane, domain = self._lanes[index], index % self._domains
        free = self._link_free[1]
        start = np.full_like(lane.ready, lane.on_ffn)
        if self._link == "sender":
            start = np.maximum(start, self._ffn_free)
        else:
            start = np.maximum(start, free[domain])
        if self._domains > 1:
            start = np.maximum(start, self._side_free[1])
            self._side_free[1] = float(start.max()) + lane.times.combine[layer]
        seconds = self._disturb("combine", np.full_like(start, lane.times.combine[layer]))
        end = start + seconds
        self._taken(1, domain, end)
        if self._link == "sender":
            self._ffn_free = float(end.max())
        lane.ready = end
        self._busy[3] += seconds.mean()
        return self._span("combine", index, layer, float(start.min()), float(end.max()))

    def _taken(self, direction: int, domain: int, end: np.ndarray) -> None:
        for other in (0, 1) if self._link == "shared" else (direction,):
            self._link_free[other][domain] = end

    def _span(self, stage: AFDStage, lane: int, layer: int, start: float, end: float) -> float:
        side = self._domains if stage in ("dispatch", "ffn") else lane % self._domains
        self._tell(stage, lane, self._lanes[lane].number, layer, start, end, side)
        return end


class _Batch:
    """The progress of a colocated batch."""

    def __init__(self, lane: int, number: int, times: StepTimes, begun: float):
        self.lane, self.number, self.times, self.begun = lane, number, times, begun
        self.layer = 0
        self.attended = False
        """Whether attention of this layer is done, so that its rows go to the FFN next."""


class Colocated(_Pipeline):
    """Attention and FFN on one mesh, one step after the other; a layer's rows cross in collectives
    that wait for the last device.

    Experts are divided over the DP groups, and each disturbs its ffn stage by itself.
    """

    def __init__(self, **setting: Unpack[Setting]):
        super().__init__(**(setting | {"domains": 1}))
        self._free = np.zeros(self._groups)
        self._inside: list[_Batch] = []
        self._seen: dict[AFDStage, _Waited] = {"dispatch": _Waited(), "combine": _Waited()}

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step, or waits for it to run."""
        return bool(self._inside)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        inside = {batch.lane for batch in self._inside}
        return [lane for lane in self._all_lanes if lane not in inside]

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        """Adds a step of a lane."""
        self._inside.append(_Batch(lane, number, times, now))

    def advance(self, now: float) -> tuple[int, float]:
        """Runs the step that waited longest: (lane, time when its last device had sampled)."""
        batch = self._inside.pop(0)
        lane, number, times = batch.lane, batch.number, batch.times
        first = np.maximum(self._free, now)
        attend, there, ffn, back = self._disturbed(times)
        # A collective ends for all devices at once, so each layer's two follow those before.
        lasting = np.stack([(attend + there).max(axis=1), (ffn + back).max(axis=1)], axis=1)
        lasting[0, 0] = (first + attend[0] + there[0]).max()
        dispatched, combined = np.cumsum(lasting).reshape(-1, 2, 1).swapaxes(0, 1)
        begun = np.concatenate([first[None], np.broadcast_to(combined[:-1], attend[1:].shape)])
        attended, done = begun + attend, dispatched + ffn
        self._wait("dispatch", attended, dispatched)
        self._wait("combine", done, combined)
        self._busy += (
            attend.mean(axis=1).sum(),
            ffn.mean(axis=1).sum(),
            sum(times.dispatch),
            sum(times.combine),
        )
        for layer in range(self._layers if self._note else 0):
            at = begun[layer], attended[layer], dispatched[layer], done[layer], combined[layer]
            for stage, begin, end in zip(STAGES, at[:-1], at[1:], strict=True):
                self._tell(stage, lane, number, layer, begin, end)
        return lane, self._leave(lane, number, np.full_like(first, combined[-1]), times.leave)

    def _disturbed(self, times: StepTimes) -> np.ndarray:
        """Seconds with noise [stages, layers, groups], drawn in the order in which stages run."""
        attend = np.stack(times.attend)
        others = np.array([times.dispatch, times.ffn, times.combine])
        seconds = np.stack([attend, *np.broadcast_to(others[..., None], (3, *attend.shape))])
        for layer in range(self._layers if self._disturb is not undisturbed else 0):
            for place, stage in enumerate(STAGES):
                seconds[place, layer] = self._disturb(stage, seconds[place, layer])
        return seconds

    def _wait(self, stage: AFDStage, at: np.ndarray, end: np.ndarray) -> None:
        """Records how long devices were in the collectives; times [layers, groups]."""
        waited, seen = end - at, self._seen[stage]
        seen.total += float(waited.sum())
        seen.count += waited.size
        seen.least = min(seen.least, float(waited.min()))
        seen.most = max(seen.most, float(waited.max()))

    def _leave(self, lane: int, number: int, at: np.ndarray, seconds: float) -> float:
        """Runs head and sampling; returns the time when the last device has sampled."""
        self._free = at + seconds
        self._busy[0] += seconds
        self._tell("attend", lane, number, self._layers, at, self._free)
        return float(self._free.max())

    def seen(self, stage: AFDStage) -> Seen:
        """Durations of a collective over all layers, steps and devices."""
        seen = self._seen[stage]
        return Seen(seen.total / seen.count, seen.least, seen.most)


class Overlapped(Colocated):
    """A colocated deployment whose two lanes hide each other's messages, as in DeepSeek's decoding
    (profile-data, "Decoding"). One lane attends in two parts. Meanwhile the rows of the other lane
    travel to the experts, are computed between the parts, and travel back. A single lane runs its
    stages one after the other."""

    def advance(self, now: float) -> tuple[int, float]:
        """Runs stages until a lane leaves: (lane, time when its last device had sampled)."""
        while True:
            passing = next((batch for batch in self._inside if batch.attended), None)
            attending = next((batch for batch in self._inside if not batch.attended), None)
            if attending is not None:
                self._free = np.maximum(self._free, attending.begun)
            self._phase(attending, passing)
            if attending is not None:
                attending.attended = True
            if passing is None:
                continue
            passing.attended = False
            passing.layer += 1
            if passing.layer == self._layers:
                self._inside.remove(passing)
                lane, number = passing.lane, passing.number
                return lane, self._leave(lane, number, self._free, passing.times.leave)

    def _phase(self, attending: _Batch | None, passing: _Batch | None) -> None:
        """Runs attention of one lane's layer while the other lane passes through the experts."""
        start = self._free
        attend, share = np.zeros_like(start), 1.0
        if attending is not None:
            attend = self._disturb("attend", attending.times.attend[attending.layer])
            self._busy[0] += attend.mean()
        end = start + attend
        if passing is not None:
            lane, number, layer, times = passing.lane, passing.number, passing.layer, passing.times
            there, back = times.dispatch[layer], times.combine[layer]
            share = there / (there + back) if there + back else 1.0
            arrived = self._exchange("dispatch", lane, number, layer, start, there)
            at = np.maximum(arrived, start + share * attend)
            work = self._disturb("ffn", np.full_like(at, times.ffn[layer]))
            self._busy[1] += work.mean()
            self._tell("ffn", lane, number, layer, at, at + work)
            at = at + work
            end = at + (1 - share) * attend
            self._free = np.maximum(end, self._exchange("combine", lane, number, layer, at, back))
        else:
            self._free = end
        if attending is not None:
            self._tell("attend", attending.lane, attending.number, attending.layer, start, end)

    def _exchange(
        self, stage: AFDStage, lane: int, number: int, layer: int, at: np.ndarray, seconds: float
    ) -> np.ndarray:
        moving = self._disturb(stage, np.full_like(at, seconds))
        end = np.full_like(at, (at + moving).max())
        self._wait(stage, at[None], end[None])
        self._busy[2 if stage == "dispatch" else 3] += seconds
        self._tell(stage, lane, number, layer, at, end)
        return end


def pipeline_of(
    topology: Topology, times: StageTimes, **setting: Unpack[Setting]
) -> Disaggregated | Colocated:
    """Makes the pipeline that runs the lanes of a deployment."""
    if topology.has("ffn"):
        return Disaggregated(**setting)
    return Overlapped(**setting) if times.overlapped else Colocated(**setting)
