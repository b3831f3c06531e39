"""When every stage of every lane of a colocated deployment runs, device by device.

Called by `pipeline.py`. A step is one program: `Colocated` runs one after the other. `Overlapped`
has two batches at once, which hide each other's messages.
"""

from typing import NamedTuple

import numpy as np

from jaxserve.observe.spans import STAGES, AFDStage, Span
from jaxserve.planner.lanes import Busy, Disturb, Note, undisturbed
from jaxserve.planner.stage_times import StepTimes


class Seen(NamedTuple):
    """The duration of a collective as devices see it, waiting for the others included."""

    mean: float
    least: float
    most: float


class Colocated:
    """Attention and FFN on one mesh, one step after the other; a layer's rows cross in collectives
    that wait for the last device.

    Args:
      layers, lanes, groups, disturb, note: as of `Disaggregated`; experts are divided over the DP
        groups, and each disturbs its ffn stage by itself.
    """

    def __init__(
        self,
        *,
        layers: int,
        lanes: int,
        groups: int,
        disturb: Disturb = undisturbed,
        note: Note | None = None,
    ):
        self._layers, self._disturb, self._note = layers, disturb, note
        self._free = np.zeros(groups)
        self._begun: list[tuple[int, int, StepTimes]] = []
        self._all_lanes = range(lanes)
        self._busy = np.zeros(4)
        self._seen: dict[AFDStage, list[tuple[float, float, float]]] = {
            "dispatch": [],
            "combine": [],
        }

    @property
    def active(self) -> bool:
        """Whether a step waits."""
        return bool(self._begun)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        begun = {lane for lane, _, _ in self._begun}
        return [lane for lane in self._all_lanes if lane not in begun]

    @property
    def busy(self) -> Busy:
        """What was done so far; of collectives the part without waiting."""
        return Busy(*map(float, self._busy))

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        """A step enters."""
        self._begun.append((lane, number, times))

    def advance(self, now: float) -> tuple[int, float]:
        """Runs the step that waited longest: (lane, when its last device had sampled)."""
        lane, number, times = self._begun.pop(0)
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
        """[stages, layers, groups] seconds with noise, drawn in the order in which stages run."""
        attend = np.stack(times.attend)
        others = np.array([times.dispatch, times.ffn, times.combine])
        seconds = np.stack([attend, *np.broadcast_to(others[..., None], (3, *attend.shape))])
        for layer in range(self._layers if self._disturb is not undisturbed else 0):
            for place, stage in enumerate(STAGES):
                seconds[place, layer] = self._disturb(stage, seconds[place, layer])
        return seconds

    def _wait(self, stage: AFDStage, at: np.ndarray, end: np.ndarray) -> None:
        """Notes how long devices were in the layers' collectives, [layers, groups]."""
        waited = end - at
        columns = waited.mean(axis=1), waited.min(axis=1), waited.max(axis=1)
        self._seen[stage] += zip(*(column.tolist() for column in columns), strict=True)

    def _leave(self, lane: int, number: int, at: np.ndarray, seconds: float) -> float:
        """Head and sampling; returns when the last device has sampled."""
        self._free = at + seconds
        self._busy[0] += seconds
        self._tell("attend", lane, number, self._layers, at, self._free)
        return float(self._free.max())

    def seen(self, stage: AFDStage) -> Seen:
        """Durations of a collective over all layers, steps and devices."""
        means, least, most = zip(*self._seen[stage], strict=True)
        return Seen(float(np.mean(means)), min(least), max(most))

    def _tell(
        self, stage: AFDStage, lane: int, number: int, layer: int, at: np.ndarray, end: np.ndarray
    ) -> None:
        if self._note is not None:
            begin = round(float(at.min()) * 1e9)
            last = round(float(end.max()) * 1e9)
            self._note(Span(stage, lane, layer, number, begin, last, 0, begin))


class _Batch:
    """The progress of a batch of `Overlapped`."""

    def __init__(self, lane: int, number: int, times: StepTimes, begun: float):
        self.lane, self.number, self.times, self.begun = lane, number, times, begun
        self.layer = 0
        self.attended = False
        """Whether its rows of this layer are to go to the FFN."""


class Overlapped(Colocated):
    """A colocated deployment whose two lanes hide each other's messages, as in DeepSeek's decoding
    (profile-data, "Decoding"): while one lane attends, in two parts, the rows of the other go to
    the experts, are multiplied between the parts, and come back. A lane that is alone runs one
    stage after the other."""

    def __init__(
        self,
        *,
        layers: int,
        groups: int,
        disturb: Disturb = undisturbed,
        note: Note | None = None,
    ):
        super().__init__(layers=layers, lanes=2, groups=groups, disturb=disturb, note=note)
        self._inside: list[_Batch] = []

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step."""
        return bool(self._inside)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        inside = {batch.lane for batch in self._inside}
        return [lane for lane in self._all_lanes if lane not in inside]

    def begin(self, lane: int, number: int, now: float, times: StepTimes) -> None:
        """A step enters."""
        self._inside.append(_Batch(lane, number, times, now))

    def advance(self, now: float) -> tuple[int, float]:
        """Runs on until a lane leaves: (lane, when its last device had sampled)."""
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
        """One lane attends a layer while the other one passes the experts."""
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
            at = self._work("ffn", lane, number, layer, at, np.full_like(at, times.ffn[layer]))
            end = at + (1 - share) * attend
            self._free = np.maximum(end, self._exchange("combine", lane, number, layer, at, back))
        else:
            self._free = end
        if attending is not None:
            self._tell("attend", attending.lane, attending.number, attending.layer, start, end)

    def _work(
        self, stage: AFDStage, lane: int, number: int, layer: int, at: np.ndarray, work: np.ndarray
    ) -> np.ndarray:
        seconds = self._disturb(stage, work)
        self._busy[0 if stage == "attend" else 1] += seconds.mean()
        self._tell(stage, lane, number, layer, at, at + seconds)
        return at + seconds

    def _exchange(
        self, stage: AFDStage, lane: int, number: int, layer: int, at: np.ndarray, seconds: float
    ) -> np.ndarray:
        moving = self._disturb(stage, np.full_like(at, seconds))
        end = np.full_like(at, (at + moving).max())
        self._wait(stage, at[None], end[None])
        self._busy[2 if stage == "dispatch" else 3] += seconds
        self._tell(stage, lane, number, layer, at, end)
        return end
