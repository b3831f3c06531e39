"""A circuit breaker: a path that timed out is left alone for a while, then tried once.

Used by `client.py`, with one breaker for each prefill worker. Without it every request whose
pages are there would wait for the same deadline again.
"""

import time
from collections.abc import Callable

OPEN_SECONDS = 10.0
"""Pause after a timeout, before the path is tried again."""


class Breaker:
    """Closed while the path works, open after a timeout, half-open once the pause is over.

    Args:
      clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until = 0.0
        self.why = ""
        """Timeout that opened it; empty while it is closed."""

    def blocked(self) -> str:
        """Returns why the path must not be tried now, empty if the caller may try it.

        After the pause one caller may, and the others have to wait for another pause.
        """
        now = self._clock()
        if self.why and now < self._until:
            return (
                f"not tried for another {self._until - now:.0f} s, because it timed out: {self.why}"
            )
        self._until = now + OPEN_SECONDS
        return ""

    def timed_out(self, why: str) -> None:
        """Opens the breaker."""
        self.why, self._until = why, self._clock() + OPEN_SECONDS

    def worked(self) -> None:
        """Closes the breaker."""
        self.why = ""
