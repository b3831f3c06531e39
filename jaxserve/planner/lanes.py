"""Computes when every stage of every lane runs, device by device: the core of the simulator.

Called by `pipeline.py`. `Disaggregated` follows the order of `roles/schedule.py`, in which the
driver enqueues, so no event queue is needed: a stage starts when its input is there, its devices
are free (they work in the order of enqueueing) and the host has enqueued it. A lane here is any
lane of any domain; lane i belongs to domain i mod domains. `colocated_lanes.py` has the deployments
without roles of their own.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.observe.spans import AFDStage, Span
from jaxserve.planner.stage_times import StepTimes
from jaxserve.roles.schedule import Rotation

LinkMode = Literal["duplex", "shared", "sender"]
"""`duplex`: each direction is a link of its own; `shared`: both directions take turns; `sender`: a
message keeps its sender busy until it has arrived."""

Disturb = Callable[[AFDStage, np.ndarray], np.ndarray]
"""Seconds of a stage on devices of their own → the same with noise."""

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


class _Lane:
    """The progress of a lane; arrays have one entry per DP group."""

    def __init__(self, groups: int):
        self.times: StepTimes
        self.number = 0
        self.ready = np.zeros(groups)
        """When the attention devices have their input, or have sent their output."""
        self.on_ffn = 0.0
        """When the ffn role has its input, or its result."""


class Disaggregated:
    """Attention and FFN on submeshes of their own.

    Args:
      layers, lanes, groups: of the model, of a domain, DP groups of a domain.
      domains: attention meshes, served by one ffn mesh.
      note: called with every stage as a span, from the first device's start to the last one's end.
    """

    def __init__(
        self,
        *,
        layers: int,
        lanes: int,
        groups: int,
        domains: int = 1,
        link: LinkMode = "duplex",
        disturb: Disturb = undisturbed,
        note: Note | None = None,
    ):
        self._layers, self._domains, self._link = layers, domains, link
        self._disturb, self._note = disturb, note
        self._rotation = Rotation(layers, lanes * domains)
        self._lanes = [_Lane(groups) for _ in range(lanes * domains)]
        self._attention_free = [np.zeros(groups) for _ in range(domains)]
        self._link_free = [[np.zeros(groups) for _ in range(domains)] for _ in range(2)]
        self._side_free = [0.0, 0.0]  # the ffn role's end of the link, by direction
        self._ffn_free = 0.0
        self._busy = np.zeros(4)

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step."""
        return bool(self._rotation.active)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        inside = set(self._rotation.active)
        return [lane for lane in range(len(self._lanes)) if lane not in inside]

    @property
    def busy(self) -> Busy:
        """What was done so far."""
        return Busy(*map(float, self._busy))

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        """A lane begins a step at `now`, the host's time."""
        self._rotation.begin(lane)
        state = self._lanes[lane]
        state.times, state.number = times, number
        state.ready = np.maximum(state.ready, now)

    def advance(self, now: float) -> tuple[int, float]:
        """Runs on until a lane leaves: (lane, when its last device had sampled).

        Args:
          now: the host's time, at which all of it is enqueued.
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
        # The ffn role takes one message at a time in; it arrives with its last device's part.
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
        if self._note is not None:
            number = self._lanes[lane].number
            side = self._domains if stage in ("dispatch", "ffn") else lane % self._domains
            begin = round(start * 1e9)
            self._note(Span(stage, lane, layer, number, begin, round(end * 1e9), side, begin))
        return end
