"""In how many parts, one after the other, an expert pool runs a cohort of lanes.

A pass of n messages takes `fixed + each * n` seconds. A cohort that runs whole pays the fixed part
once, but its first message waits until the last one is computed. Where passes are bound by their
rows, and the pool idles while messages travel, parts are faster: each is answered sooner, and the
pool has the time for more passes. Used by `cohorts.py`; knows nothing of lanes.
"""

import numpy as np

from jaxserve.link.remote.batching import NEVER

WINDOW = 4
"""Iterations from one review to the next."""
AGAIN = 64
"""Reviews after which numbers of parts that were tried before may be tried again."""
WHOLE = 0.9
"""Least messages of a pass, as a share of those of a whole one, for an undivided cohort's cycle to
count, and least lanes in step for the others to catch up: cohorts that are still forming, or have
fallen apart, say nothing about parts, and come together by waiting."""
GAIN = 0.98
"""Longest cycle worth more parts, as a share of the cycle with fewer."""


class Parts:
    """Chooses the number of parts with the shortest cycle: the time of a lane for a layer.

    A cycle takes at least the time of all passes in it. Otherwise it is shorter than the present
    one by as much as a lane's own pass is. Once a number of parts was tried, its measured cycle
    counts instead: where attention is the bound, for example, shorter passes gain nothing.
    """

    def __init__(self) -> None:
        self.count = 1
        """Number of parts."""
        self._passes: dict[int, tuple[float, int]] = {}
        """Mean seconds of passes, and their number, by messages. Sizes vary while cohorts form."""
        self._cycles: dict[int, float] = {}
        """Measured cycles in seconds, by the number of parts."""
        self._reviewed, self._served, self.layers, self._reviews = 0.0, 0, 0, 0
        """Time of the last review; messages served and layers run by cohorts since then, without
        passes in which lanes catch up; number of reviews."""
        self._settled, self._lanes = 0, (0, 0.0)
        """Reviews since the number of parts has changed; domains and cohorts."""

    def passed(self, messages: int, seconds: float) -> None:
        """Notes a pass, of a cohort or of lanes that catch up with it."""
        mean, count = self._passes.get(messages, (seconds, 0))
        weight = max(1 / (count + 1), 0.02)
        self._passes[messages] = mean + weight * (min(seconds, 4 * mean) - mean), count + 1
        self._served += messages

    def seconds(self, messages: int) -> float:
        """Returns the time of a pass at most: the least mean of passes as large or larger."""
        return min((mean for n, (mean, _) in self._passes.items() if n >= messages), default=NEVER)

    def review(
        self, now: float, iteration: float, domains: int, cohorts: float, limit: int
    ) -> bool:
        """Chooses the number of parts if a window has passed; returns whether it has changed.

        Args:
          iteration: seconds that a cohort takes for all layers.
          domains, cohorts: lanes of a cohort, and cohorts.
          limit: most messages of a pass.
        """
        seconds = now - self._reviewed
        if seconds < WINDOW * iteration:
            return False
        cycle = domains * cohorts * seconds / self._served
        whole = self._served > WHOLE * domains * self.layers
        self._settled += 1
        self._reviewed, self._served, self.layers, self._reviews = now, 0, 0, self._reviews + 1
        if (domains, cohorts) != self._lanes or self._reviews % AGAIN == 0:
            self._lanes, self._cycles = (domains, cohorts), {}
        elif self._settled > 2 and (whole or self.count > 1) and len(self._passes) > 1:
            # After two windows: lanes get into step in the first, and sometimes in the second.
            self._cycles[self.count] = 0.7 * self._cycles.get(self.count, cycle) + 0.3 * cycle
            if (best := self._best(domains, cohorts, limit)) != self.count:
                self.count, self._settled = best, 0
        return not self._settled

    def _best(self, domains: int, cohorts: float, limit: int) -> int:
        """Returns the fewest parts whose expected cycle is close to the shortest one."""
        means, counts = zip(*self._passes.values(), strict=True)
        weights = np.sqrt(np.minimum(counts, 64))
        each, fixed = np.maximum(np.polyfit([*self._passes], means, 1, w=weights), 0.0).tolist()
        numbers = np.arange(1, domains + 1)
        largest = -(-domains // numbers)
        fixed = -(-largest // limit) * fixed
        alone = fixed + each * largest
        other = self._cycles[self.count] - alone[min(self.count, domains) - 1]
        cycles = np.maximum(cohorts * (numbers * fixed + each * domains), other + alone).tolist()
        expected = dict(enumerate(cycles, 1)) | self._cycles
        return next(n for n, cycle in expected.items() if GAIN * cycle <= min(expected.values()))
