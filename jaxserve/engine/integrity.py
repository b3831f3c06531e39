"""Whether the scheduler's books agree: what it counts against what it can look up.

Called by the scheduler, between steps.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from jaxserve.engine.lane_slots import LaneSlots, StepInFlight
from jaxserve.engine.pages import pages_for
from jaxserve.engine.sequence import Sequence


def check_lanes(lanes: Items[LaneSlots], in_flight: Items[deque[StepInFlight]]) -> None:
    """Raises RuntimeError unless every row is in the steps that it is counted in."""
    for lane, steps in zip(lanes, in_flight, strict=True):
        counted = np.zeros_like(lane.in_flight)
        pending, slack = np.zeros_like(lane.pending), np.zeros_like(lane.slack)
        for step in steps:
            counted[step.rows] += 1
            pending[step.rows] += step.samples
            slack[step.rows] += 0 if step.drafts is None else step.drafts
        for row in np.flatnonzero(~lane.resident & (counted > 0)).tolist():
            raise RuntimeError(
                f"lane {lane.lane}: row {row} lost its sequence with steps in flight"
            )
        for row in np.flatnonzero(lane.resident).tolist():
            sequence = lane.write_back(row)
            problems: dict[str, object] = {
                "is counted in the wrong number of steps": counted[row] != lane.in_flight[row],
                "has the wrong number of tokens pending": pending[row] != lane.pending[row],
                "has the wrong number of drafts in flight": slack[row] != lane.slack[row],
                "waits for pages but was stopped, or has a step": lane.fetching[row]
                and (not lane.running[row] or lane.in_flight[row]),
                "keeps its slot, with nothing in flight": not lane.running[row]
                and not lane.in_flight[row],
                "has another status in its slot": (lane.running[row], lane.ended[row])
                != (sequence.status == "running", sequence.status == "ended" or sequence.suspect),
            }
            if not lane.ended[row]:
                problems |= {
                    "has another length in its slot": lane.length[row]
                    != len(sequence.tokens) + lane.pending[row],
                    "has another last token in its slot": lane.last_token[row]
                    != sequence.tokens[-1],
                }
            _raise_first(sequence, problems)


def check_queue(lanes: Items[LaneSlots], waiting: list[Sequence], live: Iterable[Sequence]) -> None:
    """Raises RuntimeError if a live sequence is neither queued nor resident, or the queue is out
    of order."""
    for sequence in live:
        home, page_size = sequence.home, lanes[0].page_size
        slots = None if home is None else lanes[home.lane]
        cached = 0
        if slots is not None:
            row = slots.row(sequence)
            cached = int(slots.cached[row] + slots.slack[row])
        problems: dict[str, object] = {
            "has no slot but runs": sequence.status == "running" and not home,
            "is queued or not, against its status": (sequence.status == "waiting")
            != (sequence in waiting),
            "has too few pages": len(sequence.page_ids) < pages_for(cached, page_size),
        }
        _raise_first(sequence, problems)
    if [sequence.rank for sequence in waiting] != sorted(sequence.rank for sequence in waiting):
        raise RuntimeError("the queue is out of order")


def _raise_first(sequence: Sequence, problems: dict[str, object]) -> None:
    for problem, found in problems.items():
        if found:
            raise RuntimeError(f"request {sequence.request.request_id!r} {problem}")
