"""Whether the next steps verify drafts, and what has come of those that were verified.

Called by the scheduler. Pure: times are told. Drafts make a step longer and give it more tokens, so
they pay where a step's time hardly depends on its tokens: with few sequences.
"""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

ENOUGH = 8
"""Steps of a size and kind that are measured before they are compared."""
PROBE_STEPS = 4
"""Steps that are taken the other way, to see whether it is the better one by now. None are verified
in the first of them, as none were proposed before."""
FIRST_INTERVAL, LAST_INTERVAL = 256, 4096
"""Steps from probe to probe; twice as many after each that changed nothing. So probes are at most
one step in 64."""
MARGIN = 1.05
"""By so much the other way has to be faster before it is taken."""
RECENT = 0.1
"""Weight of a new measurement in a moving average."""
MOST_TIMES = 3.0
"""A step that takes longer than this times the average counts as this times the average."""


class DraftCounts(msgspec.Struct, kw_only=True):
    """Drafts since the start.

    Attributes:
      runs: how often drafts of a sequence were verified; each gave one token more than drafts held.
      drafted: drafts that were verified.
      accepted: those of them that held, by their place, the first one first.
    """

    runs: int = 0
    drafted: int = 0
    accepted: list[int] = []

    def add(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Counts a step.

        Args:
          drafts: of each of its rows.
          accepted: how many of them held.
        """
        self.runs += int((drafts > 0).sum())
        self.drafted += int(drafts.sum())
        most = int(drafts.max(initial=0))
        self.accepted += [0] * (most - len(self.accepted))
        for place in range(most):
            self.accepted[place] += int((accepted > place).sum())

    @classmethod
    def sum(cls, parts: Sequence["DraftCounts"]) -> "DraftCounts | None":
        """Of several together; None of none."""
        if not parts:
            return None
        places = itertools.zip_longest(*(part.accepted for part in parts), fillvalue=0)
        return cls(
            runs=sum(part.runs for part in parts),
            drafted=sum(part.drafted for part in parts),
            accepted=[sum(place) for place in places],
        )


class DraftPolicy:
    """Decides for all lanes of a domain, by what their steps took and how many drafts held lately.

    Lanes take turns on the same devices, so they are decided together: beside steps of the other
    kind, neither kind's time could be told.

    Args:
      most: drafts of a sequence and step.
      automatic: whether it decides anything; else every step has drafts.
      lanes: of the domain.
    """

    def __init__(self, most: int, *, automatic: bool, lanes: int = 1):
        self._most, self._automatic = most, automatic
        self._held = float(most)
        """Drafts of a sequence that hold, a moving average."""
        self._held_of = 0
        """How many steps have told."""
        self._seconds: dict[tuple[int, int], tuple[int, float]] = {}
        """By size and drafts: how many steps were measured, and their average."""
        self._probes: dict[int, tuple[int, int]] = {}
        """By size: steps until the next probe ends, and the interval."""
        self._better: dict[int, int] = {}
        self._last = [0] * lanes
        """Drafts of each lane's last complete step."""
        self._took: int | None = None
        """Drafts of the step that took its time last."""

    def choose(self, rows: int, *, prefills: bool = False) -> int:
        """Most drafts of a sequence in the next step, `most` or 0.

        Args:
          rows: sequences that take part.
          prefills: whether some of them prefill. Such steps are not measured, and nothing is tried
            in them: they are as those of about as many sequences that decode.
        """
        if not self._automatic:
            return self._most
        size = rows.bit_length()
        if prefills:
            known = min(self._better, key=lambda other: abs(other - size), default=None)
            return self._most if known is None else self._better[known]
        for drafts in (self._most, 0):
            if self._seconds.get((size, drafts), (0, 0.0))[0] < ENOUGH:
                return drafts
        with_drafts, without = self._seconds[size, self._most][1], self._seconds[size, 0][1]
        gain = (1 + self._held) * without / with_drafts
        before = self._better.get(size)
        least = {None: 1.0, 0: MARGIN, self._most: 1 / MARGIN}[before]
        better = self._most if gain >= least else 0
        left, interval = self._probes.get(size, (FIRST_INTERVAL, FIRST_INTERVAL))
        if before not in (None, better):
            left = interval = FIRST_INTERVAL
        self._better[size] = better
        if left == 0:
            interval = min(2 * interval, LAST_INTERVAL)
            left = interval
        self._probes[size] = left - 1, interval
        return self._most - better if left <= PROBE_STEPS else better

    def completed(
        self, drafts: np.ndarray | None, accepted: np.ndarray | None, lane: int = 0
    ) -> None:
        """A step of a lane is complete, in the order in which they were planned.

        Args:
          drafts: of its rows; None: it had none.
          accepted: how many held.
        """
        before, self._last[lane] = self._last[lane], 0 if drafts is None else self._most
        if drafts is None or accepted is None or not before:
            return
        full = drafts == self._most  # not those near their end
        if full.any():
            self._held_of += 1
            weight = max(RECENT, 1 / self._held_of)
            self._held += weight * (float(accepted[full].mean()) - self._held)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """How long a step took that did nothing but decode.

        It counts only after one of its kind: a prediction module runs when the tokens of its step
        are known already, in the time of the next one.

        Args:
          rows: its sequences.
          drafts: its bucket's.
        """
        before, self._took = self._took, drafts
        if before != drafts:
            return
        size = rows.bit_length()
        count, average = self._seconds.get((size, drafts), (0, seconds))
        weight = max(RECENT, 1 / (1 + count))
        seconds = min(seconds, MOST_TIMES * average)
        self._seconds[size, drafts] = count + 1, average + weight * (seconds - average)
