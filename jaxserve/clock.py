"""A clock for deadlines that leaves out the time in which this process could not run.

Used by code that gives up after a deadline: the leader and its followers, which wait for each other
(`fleet/`), and the engine, which waits for a step's results. Plain Python.
"""

import time
from collections.abc import Callable


class AwakeClock:
    """Counts the seconds in which this process was able to run.

    A waiter that was itself paused (SIGSTOP, a frozen container or virtual machine) or starved
    would find its deadline over when it wakes, although its peer was not late. So the waiter calls
    `tick` regularly, and a gap between two ticks counts as at most `longest`. Only one thread may
    call `tick`; any thread may read `now`.

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
