"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

SECONDS = 30.0


def until[Found](condition: Callable[[], Found], seconds: float = SECONDS) -> Found:
    """Calls a condition until its result is true, and returns that result.

    Raises:
        AssertionError: it is still false after `seconds`.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"still false after {seconds} s"
        time.sleep(0.005)
    return found
