"""Decides whether drafts pay. Loaded by `scheduler.py` for deployments with drafts.

Drafts make a step longer and yield more tokens, so they pay while a step's time hardly depends on
its tokens, that is, with few sequences.
"""

import numpy as np

ENOUGH = 8
"""Steps of a size, with or without drafts, measured before the two are compared."""
PROBE_STEPS = 4
"""Steps of a probe, which tries the choice not taken to see whether it has become the better one.
The first one verifies no drafts, because none were proposed before it."""
FIRST_INTERVAL, LAST_INTERVAL = 256, 4096
"""Steps from probe to probe, doubled after each probe that changed nothing. At most one step in 64
belongs to a probe."""
MARGIN = 1.05
"""Factor by which the other choice has to be faster before it is taken."""
RECENT = 0.1
"""Weight of a new measurement in a moving average."""
MOST_TIMES = 3.0
"""Times are capped at this multiple of the average."""


class DraftPolicy:
    """Decides whether steps have drafts, for all lanes of a domain, by the measured times of steps
    and the share of drafts that were right.

    Lanes take turns on the same devices, so one decision holds for all: if some lanes drafted and
    others did not, the times of the two kinds of step could not be told apart.

    Args:
      most: most drafts of a sequence in a step.
      automatic: False gives drafts to every step.
      lanes: number of lanes of the domain.
    """

    def __init__(self, most: int, *, automatic: bool, lanes: int = 1):
        self._most, self._automatic = most, automatic
        self._held = float(most)
        """Moving average of the right drafts of a sequence in a step."""
        self._held_of = 0
        """Number of steps in that average."""
        self._seconds: dict[tuple[int, int], tuple[int, float]] = {}
        """(size, drafts) → number of measured steps, and their average seconds."""
        self._probes: dict[int, tuple[int, int]] = {}
        """Size → steps until the next probe ends, and the interval between probes."""
        self._better: dict[int, int] = {}
        self._last = [0] * lanes
        """Drafts in each lane's last complete step."""
        self._took: int | None = None
        """Drafts in the step measured last."""

    def choose(self, rows: int, *, prefills: bool = False) -> int:
        """Returns the most drafts of a sequence in the next step: `most` or 0.

        Args:
          rows: sequences that take part.
          prefills: whether some of them prefill. Such steps are not measured; the decision is the
            current one for steps that decode a similar number of sequences.
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
        """Notes that a lane's step is complete. Called in the order in which steps were planned.

        Args:
          drafts: drafts of each row of the step; None: it had none.
          accepted: number of right drafts in each row.
        """
        before, self._last[lane] = self._last[lane], 0 if drafts is None else self._most
        if drafts is None or accepted is None or not before:
            return
        full = drafts == self._most  # leaves out rows near their end
        if full.any():
            self._held_of += 1
            weight = max(RECENT, 1 / self._held_of)
            self._held += weight * (float(accepted[full].mean()) - self._held)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """Notes how long a step took that only decoded.

        The time counts only if the step before had the same drafts. A prediction module runs after
        its step's tokens are known, in the time of the next step.

        Args:
          rows: sequences of the step.
          drafts: drafts of the step's bucket.
        """
        before, self._took = self._took, drafts
        if before != drafts:
            return
        size = rows.bit_length()
        count, average = self._seconds.get((size, drafts), (0, seconds))
        weight = max(RECENT, 1 / (1 + count))
        seconds = min(seconds, MOST_TIMES * average)
        self._seconds[size, drafts] = count + 1, average + weight * (seconds - average)
