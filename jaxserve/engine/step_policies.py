"""Policies by measured times of steps: whether drafts pay, and how large chunks of prompts may be.

Drafts make a step longer and yield more tokens, so they pay while a step's time hardly depends on
its tokens, that is, with few sequences. A chunk makes sequences that decode in the same step wait,
the longer the more tokens it has and the more tokens it attends to. Loaded by `scheduler.py` where
`speculative` or `scheduler.token_ms` asks for them.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.roles.step_plan import StepPlan

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


def policies_of(sizes: SchedulerSizes) -> "tuple[DraftPolicy | None, ChunkPolicy | None]":
    """Returns the policies that a domain has, for drafts and for chunks."""
    drafts, seconds = None, sizes.step_seconds
    if sizes.drafts:
        drafts = DraftPolicy(sizes.drafts, automatic=sizes.automatic_drafts, lanes=sizes.lanes)
    pace = ChunkPolicy(seconds, sizes.token_buckets) if seconds else None
    return drafts, pace


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

    def step_took(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took; only steps that decode count."""
        if (plan.token_counts == np.maximum(plan.sample_counts, 1)).all():
            self.took(len(plan.rows), plan.bucket.drafts, seconds)

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


AGAIN = 128
"""Steps after which a size that took too long is tried again: other rows may decode by then."""
LEAST = 16
"""Inverse of the share of the largest size that a step may have however long it takes, so that
prompts advance where the time cannot be kept."""
NEW = 0.3
"""Weight of a new time in the average of a size."""


class ChunkPolicy:
    """Chooses the size of steps in which some sequences decode and others prefill: the largest that
    keeps a time, by the steps so far.

    Times are kept by the size and by the power of two of the longest context that a chunk attends
    to. Sizes are tried from the smallest on, so at most one step of each is too long before it is
    known. A size that was too long behind fewer tokens is not tried behind more.

    Args:
      seconds: longest time that a step should take.
      sizes: padded sizes of steps in tokens a DP group, ascending.
    """

    def __init__(self, seconds: float, sizes: Sequence[int]):
        self._limit, self._sizes = seconds, sizes
        self._seconds: dict[int, dict[int, float]] = {size: {} for size in sizes}
        """Size → power of two of the context → average seconds."""
        self._avoided = Counter[tuple[int, int]]()
        """(size, power) → steps that were smaller because this size takes too long."""

    def choose(self, used: int, context: int) -> int:
        """Returns the tokens that each DP group of the next step may have.

        Args:
          used: most tokens of a group that are decoded; the result is larger if a size is.
          context: tokens in the cache before the first chunk.
        """
        least, power = max(used, self._sizes[-1] // LEAST - 1), context.bit_length()
        sizes = [size for size in self._sizes if size > least]
        best = sizes[0] if sizes else used
        for size in sizes[1:]:  # each waits for a time of the one before
            if power < min(self._seconds[best], default=power + 1) or not self._fits(size, power):
                break
            best = size
        return best

    def _fits(self, size: int, power: int) -> bool:
        times = self._seconds[size]
        if power not in times:
            return all(times[less] <= self._limit for less in times if less < power)
        if times[power] <= self._limit:
            return True
        self._avoided[size, power] += 1
        return self._avoided[size, power] % AGAIN == 0

    def step_took(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took; only steps with chunks count."""
        chunks = plan.token_counts > plan.sample_counts
        if not chunks.any():
            return
        contexts = (plan.kv_lengths - plan.token_counts)[chunks]
        times, power = self._seconds[plan.bucket.tokens], int(contexts.max()).bit_length()
        before = times.get(power, seconds)
        times[power] = before + NEW * (min(seconds, MOST_TIMES * before) - before)
