"""Who waits because a grammar has to see its last token before it can say what may follow.

Called by the scheduler, whose docstring has the policy (6).
"""

from collections import deque
from collections.abc import Sequence as Items
from typing import Literal

from jaxserve.engine.lane_slots import LaneSlots, StepInFlight

GRAMMARS_THAT_STOP_A_LANE = 4
"""A lane waits as a whole where one sequence in so many has a grammar. With fewer, their missing
every second step costs less than an eighth of the tokens."""


def waiting(slots: LaneSlots) -> Literal["none", "grammars", "lane"]:
    """Which rows of a lane wait for a token in flight: none, those with a grammar, or all."""
    if not (slots.grammar & (slots.pending > 0)).any():
        return "none"
    return "lane" if stops(slots) else "grammars"


def stops(slots: LaneSlots) -> bool:
    """Whether so many of a lane's sequences have a grammar that all of it waits for them."""
    running, grammars = int(slots.running.sum()), int((slots.running & slots.grammar).sum())
    return 0 < running <= GRAMMARS_THAT_STOP_A_LANE * grammars


def others_are_late(
    lane: int,
    lanes: Items[LaneSlots],
    in_flight: Items[deque[StepInFlight]],
    completed_at: Items[int],
) -> bool:
    """Whether a lane that stops for grammars should wait for another such lane, whose step in
    flight was issued before this lane's last one was complete.

    Args:
      lanes, in_flight: of the domain, and their steps.
      completed_at: how many steps the domain had issued when each lane's last one was complete.
    """
    if in_flight[lane]:
        return False
    return stops(lanes[lane]) and any(
        steps and steps[-1].number < completed_at[lane] and waiting(lanes[other]) == "lane"
        for other, steps in enumerate(in_flight)
    )
