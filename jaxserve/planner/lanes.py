"""Computes when every stage of every lane runs, device by device: the core of the simulator.

Called by `simulate.py` and `deploy.py`. `Disaggregated` follows the order of
`roles/schedule.py`, in which the driver enqueues, so no event queue is needed: a stage starts when
its input has arrived, its devices are free (they work in the order of enqueueing) and the host has
enqueued it. Each direction between the roles is a link of its own. Lanes of all domains are
numbered together; lane i belongs to domain i mod domains. `OneDispatch` runs the steps of all lanes
as one program of each role, and `Colocated` one step, which is one program, after the other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.observe.spans import STAGES, AFDStage, Span
from jaxserve.planner.stage_times import StepTimes
from jaxserve.roles.schedule import Rotation

Disturb = Callable[[AFDStage, np.ndarray], np.ndarray]
"""Takes a stage and its seconds, one entry per device, and returns the seconds with noise."""

Note = Callable[[Span], None]

SETTLE, COUNTED = 4, 8
"""Steps of every lane that fill the pipeline before a period is taken, and those of its mean."""


def undisturbed(stage: AFDStage, seconds: np.ndarray) -> np.ndarray:
    """No noise."""
    return seconds


class Busy(NamedTuple):
    """Busy seconds so far, averaged over a role's or direction's devices and the domains."""

    attention: float
    ffn: float
    dispatch: float
    combine: float


class _Step(msgspec.Struct, eq=False):
    """A lane's step in progress."""

    lane: int
    number: int
    times: StepTimes
    ready: np.ndarray
    """Times at which each DP group's devices have their input, or have sent their output."""
    on_ffn: float = 0.0
    """Time at which the ffn role has its input, or its result."""


class _Pipeline:
    """Common parts of all pipelines, of domains with as many lanes and DP groups each and one ffn
    mesh. `disturb` adds noise to a stage; `note` gets every stage as a span, from the first
    device's start to the last one's end."""

    def __init__(
        self,
        *,
        layers: int,
        lanes: int,
        groups: int,
        domains: int = 1,
        disturb: Disturb = undisturbed,
        note: Note | None = None,
    ):
        self._layers, self._groups, self._domains = layers, groups, domains
        self._disturb, self._note = disturb, note
        self._all_lanes = range(lanes * domains)
        self._inside: dict[int, _Step] = {}
        """Steps in progress by lane, the one that waited longest first."""
        self._busy = np.zeros(4)

    @property
    def busy(self) -> Busy:
        """Busy seconds so far; for collectives without the waiting."""
        return Busy(*map(float, self._busy))

    @property
    def idle_lanes(self) -> list[int]:
        return [lane for lane in self._all_lanes if lane not in self._inside]

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        """Begins a step of a lane at `now`, the host's time."""
        self._inside[lane] = _Step(lane, number, times, np.full(self._groups, now))

    def _tell(
        self,
        stage: AFDStage,
        step: _Step,
        layer: int,
        at: np.ndarray | float,
        end: np.ndarray | float,
        side: int = 0,
    ) -> None:
        if self._note is not None:
            begin, last = round(float(np.min(at)) * 1e9), round(float(np.max(end)) * 1e9)
            self._note(Span(stage, step.lane, layer, step.number, begin, last, side, begin))


class Disaggregated(_Pipeline):
    """Attention and FFN on submeshes of their own."""

    def __init__(self, **setting: Any):
        super().__init__(**setting)
        self._rotation = Rotation(self._layers, len(self._all_lanes))
        free = np.zeros((3, self._domains, self._groups))
        self._attention_free, *self._link_free = free
        self._side_free = [0.0, 0.0]  # the ffn role's end of the link, by direction
        self._ffn_free = 0.0

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        self._rotation.begin(lane)
        super().begin(lane, number, now, times)

    def advance(self, now: float) -> tuple[int, float]:
        """Runs stages, enqueued at `now`, until a lane leaves: (lane, when it had sampled)."""
        runs: dict[str, Callable[[_Step, int, int, float], float]] = {
            "attend": self._attend,
            "dispatch": self._dispatch,
            "ffn": self._ffn,
            "combine": self._combine,
            "leave": self._attend,
        }
        for turn in self._rotation.turns:
            for stage in turn:
                step, domain = self._inside[stage.lane], stage.lane % self._domains
                end = runs[stage.name](step, stage.layer, domain, now)
            if stage.name == "leave":
                del self._inside[stage.lane]
                return stage.lane, end
        raise AssertionError("the rotation has no end")

    def _attend(self, step: _Step, layer: int, domain: int, now: float) -> float:
        """Runs attention; behind the last layer, head and sampling, which nothing disturbs."""
        start = np.maximum(np.maximum(step.ready, self._attention_free[domain]), now)
        if layer < self._layers:
            seconds = self._disturb("attend", step.times.attend[layer])
        else:
            seconds = np.full_like(start, step.times.leave)
        self._attention_free[domain] = step.ready = start + seconds
        self._busy[0] += seconds.mean() / self._domains
        self._tell("attend", step, layer, start, step.ready, domain)
        return float(step.ready.max())

    def _dispatch(self, step: _Step, layer: int, domain: int, now: float) -> float:
        usual = step.times.dispatch[layer]
        start = np.maximum(step.ready, self._link_free[0][domain])
        step.ready = end = self._crossed("dispatch", usual, start, domain)
        # The ffn role receives one message at a time; it has arrived when its last part has.
        side = self._side_free[0] + usual if self._domains > 1 else 0.0
        self._side_free[0] = step.on_ffn = max(float(end.max()), side)
        self._tell("dispatch", step, layer, start, step.on_ffn, self._domains)
        return step.on_ffn

    def _ffn(self, step: _Step, layer: int, domain: int, now: float) -> float:
        start = max(step.on_ffn, self._ffn_free, now)
        seconds = float(self._disturb("ffn", np.array([step.times.ffn[layer]]))[0])
        self._ffn_free = step.on_ffn = start + seconds
        self._busy[1] += seconds
        self._tell("ffn", step, layer, start, self._ffn_free, self._domains)
        return self._ffn_free

    def _combine(self, step: _Step, layer: int, domain: int, now: float) -> float:
        usual = step.times.combine[layer]
        start = np.maximum(np.full(self._groups, step.on_ffn), self._link_free[1][domain])
        if self._domains > 1:
            start = np.maximum(start, self._side_free[1])
            self._side_free[1] = float(start.max()) + usual
        step.ready = end = self._crossed("combine", usual, start, domain)
        self._tell("combine", step, layer, start, end, domain)
        return float(end.max())

    def _crossed(self, stage: AFDStage, usual: float, start: np.ndarray, domain: int) -> np.ndarray:
        """When a message's parts have crossed; this direction is taken until then."""
        seconds, direction = self._disturb(stage, np.full_like(start, usual)), stage == "combine"
        self._busy[2 + direction] += seconds.mean()
        self._link_free[direction][domain] = start + seconds
        return start + seconds


class OneDispatch(_Pipeline):
    """Attention and FFN where one dispatch runs the steps that have begun, with the messages
    between the roles (`pipeline: step`, `roles/step_programs.py`).

    Roles take turns together. With three lanes and more, a turn has a layer of attention, the FFN
    of the message two turns before, and two exchanges, beside which the roles compute but for
    `StepTimes.waits`. With two lanes a message and an answer cross at once, before the FFN. A lane
    alone does one after the other. The last results end the dispatch, and the roles wait for it.
    """

    def __init__(self, **setting: Any):
        super().__init__(**(setting | {"domains": 1}))
        self._free = 0.0
        self._left = deque[int]()

    def advance(self, now: float) -> tuple[int, float]:
        """Runs the steps that have begun, or returns the next lane that ran: (lane, its end)."""
        if not self._left:
            self._run([*self._inside.values()], max(self._free, now))
            self._left.extend(self._inside)
        lane = self._left.popleft()
        return lane, self._inside.pop(lane).on_ffn

    def _run(self, steps: Sequence[_Step], at: float) -> None:
        """Runs one dispatch, after which `on_ffn` of its steps is their end."""
        order = [(step, layer) for layer in range(self._layers) for step in steps]
        late = min(len(steps), 3) - 1
        for turn in range(len(order) + late):
            step, layer = order[min(turn, len(order) - 1)]
            times, attend, ffn = step.times, 0.0, 0.0
            there, back = times.dispatch[layer], times.combine[layer]
            if turn < len(order):
                each = self._disturb("attend", times.attend[layer])
                attend = float(each.max())
                self._busy += (each.mean(), 0.0, there, back)
                self._tell("attend", step, layer, at, at + each)
                self._tell("dispatch", step, layer, at, at + there)
                self._tell("combine", step, layer, at, at + back)
            if turn >= late:
                step, layer = order[turn - late]
                ffn = float(self._disturb("ffn", np.array([step.times.ffn[layer]]))[0])
                begun = at if late else at + attend + there
                self._busy[1] += ffn
                self._tell("ffn", step, layer, begun, begun + ffn)
            if late < 2:
                at += max(attend, ffn) + max(there, back) if late else attend + ffn + there + back
            else:
                waits = [share * (there + back) for share in times.waits]
                at += max(attend + waits[0], ffn + waits[1], there + back)
        for step in steps:
            self._tell("attend", step, self._layers, at, at + step.times.leave)
            self._busy[0] += step.times.leave
            at += step.times.leave
        for step in steps:
            step.on_ffn = self._free = float(at)


class Colocated(_Pipeline):
    """Attention and FFN on one mesh, one step after the other; a layer's rows cross in collectives
    that wait for the last device. Experts are divided over the DP groups, and each disturbs its ffn
    stage by itself."""

    def __init__(self, **setting: Any):
        super().__init__(**(setting | {"domains": 1}))
        self._free = np.zeros(self._groups)

    def advance(self, now: float) -> tuple[int, float]:
        """Runs the step that waited longest: (lane, time when its last device had sampled)."""
        step = self._inside.pop(next(iter(self._inside)))
        first, times = np.maximum(self._free, now), step.times
        attend, there, ffn, _ = seconds = self._disturbed(times)
        # A collective ends for all devices at once, so each layer's two follow those before.
        lasting = (seconds[::2] + seconds[1::2]).max(axis=2).T
        lasting[0, 0] = (first + attend[0] + there[0]).max()
        dispatched, combined = np.cumsum(lasting).reshape(-1, 2, 1).swapaxes(0, 1)
        begun = np.concatenate([first[None], np.broadcast_to(combined[:-1], attend[1:].shape)])
        attended, done = begun + attend, dispatched + ffn
        working = (each.mean(axis=1).sum() for each in (attend, ffn))
        self._busy += (*working, times.dispatch.sum(), times.combine.sum())
        for layer in range(self._layers if self._note else 0):
            at = begun[layer], attended[layer], dispatched[layer], done[layer], combined[layer]
            for stage, begin, end in zip(STAGES, at[:-1], at[1:], strict=True):
                self._tell(stage, step, layer, begin, end)
        return step.lane, self._leave(step, np.full_like(first, combined[-1]))

    def _disturbed(self, times: StepTimes) -> np.ndarray:
        """Seconds with noise [stages, layers, groups], drawn in the order in which stages run."""
        seconds = np.empty((len(STAGES), *times.attend.shape))
        seconds[0] = times.attend
        seconds[1:] = np.stack([times.dispatch, times.ffn, times.combine])[..., None]
        for layer in range(self._layers if self._disturb is not undisturbed else 0):
            for place, stage in enumerate(STAGES):
                seconds[place, layer] = self._disturb(stage, seconds[place, layer])
        return seconds

    def _leave(self, step: _Step, at: np.ndarray) -> float:
        """Runs head and sampling; returns the time when the last device has sampled."""
        self._free = at + step.times.leave
        self._busy[0] += step.times.leave
        self._tell("attend", step, self._layers, at, self._free)
        return float(self._free.max())


def step_seconds(
    times: StepTimes,
    lanes: int,
    groups: int,
    domains: int = 1,
    kind: type[Disaggregated] | type[OneDispatch] = Disaggregated,
) -> float:
    """Seconds from one step of a lane to its next one along the engine's schedule, when all lanes
    take these times and repeat their step at once. The host enqueues a lane's step once it has read
    the lane's step before the last. `domains` attention meshes have `lanes` lanes each."""
    pipeline = kind(layers=len(times.ffn), lanes=lanes, groups=groups, domains=domains)
    ends: list[list[float]] = [[] for _ in range(lanes * domains)]
    host = 0.0
    for lane in range(lanes * domains):
        pipeline.begin(lane, 0, 0.0, times)
    while min(map(len, ends)) < SETTLE + COUNTED:
        lane, end = pipeline.advance(host)
        if times.host:
            host = max(host, ends[lane][-1] if ends[lane] else 0.0) + times.host
        ends[lane].append(end)
        pipeline.begin(lane, len(ends[lane]), host, times)
    return float(np.mean([(one[SETTLE + COUNTED - 1] - one[SETTLE - 1]) / COUNTED for one in ends]))
