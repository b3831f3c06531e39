"""Seconds of a step, from the rooflines and the pipeline that `plan simulate` runs. Called by
`deploy_prefill.py` and `deploy_decode.py`."""

import numpy as np

from jaxserve.planner.layouts import Layout
from jaxserve.planner.pipeline import pipeline_of
from jaxserve.planner.stage_times import Rooflines, Rows, StageTimes, StepTimes


def rows_of(layout: Layout, group: np.ndarray, tokens: np.ndarray, length: np.ndarray) -> Rows:
    """A step's sequences; messages are padded to the fullest DP group."""
    most = int(np.bincount(group, tokens, layout.dp).max(initial=1))
    return Rows(layout.dp, group, tokens, length, most)


def colocated_seconds(times: Rooflines, rows: Rows) -> float:
    """Of one step of a colocated worker: as `Colocated` runs it without noise, where in every layer
    the DP groups wait for the slowest."""
    step = times.step(rows)
    at = 0.0
    for attend, there, ffn, back in zip(
        step.attend, step.dispatch, step.ffn, step.combine, strict=True
    ):
        at = at + float(attend.max()) + there + ffn + back
    return at + step.leave


def cycle_seconds(layout: Layout, steps: list[StepTimes], times: StageTimes) -> float:
    """Between two steps of a lane, when every lane goes on with a next step at once.

    Args:
      steps: of the lanes in turn, so many as are to be run, at least three a lane.
      times: which they are from.
    """
    lanes = layout.lanes
    pipeline = pipeline_of(layout.topology, times, lanes=lanes, groups=layout.dp)
    ends: dict[int, list[float]] = {lane: [] for lane in range(lanes)}
    for number, step in enumerate(steps[:lanes]):
        pipeline.begin(number, number, 0.0, step)
    for number in range(lanes, len(steps)):
        lane, end = pipeline.advance(0.0)
        ends[lane].append(end)
        pipeline.begin(lane, number, 0.0, steps[number])
    for _ in range(lanes):
        lane, end = pipeline.advance(0.0)
        ends[lane].append(end)
    # The first steps fill the pipeline, and the last of every lane run in an emptying one.
    cycles = [(one[-2] - one[0]) / (len(one) - 2) for one in ends.values()]
    return float(np.mean(cycles))
