"""A clock for deadlines that leaves out the time in which this process could not run.

Used by whatever gives up on something after a time: the leader and its followers on each other
(`fleet/`), the engine on a step's results. Plain Python; knows nothing of what is waited for.
"""

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds in which this process was able to run.

    A waiter that was itself paused (SIGSTOP, a frozen container or virtual machine) or starved
    would find its deadline over when it wakes, although nobody else was late. So whoever waits
    calls `tick` regularly, and a gap between two ticks counts as at most `longest`. Not safe for
    ticks of several threads; any thread may read `now`.

    Args:
      longest: seconds that one gap may count; more than what the caller sleeps between ticks.
      clock: seconds, monotonic.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic):
        self._longest = longest
        self._clock = clock
        self._last = clock()
        self.now = 0.0
        """The time at the last tick; 0 at the start."""

    def tick(self) -> float:
        """Advances to the present and returns it."""
        present = self._clock()
        self.now += min(present - self._last, self._longest)
        self._last = present
        return self.now
