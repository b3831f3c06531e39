"""Waiting for what other threads and processes do."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

SECONDS = 30.0


class Clock:
    """A clock that goes when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


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


def failing_once(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: Exception,
    when: Callable[..., Any] = lambda *given: True,
) -> threading.Event:
    """Has a function fail the first time that `when` holds for its arguments; it is set then."""
    real, failed = getattr(owner, name), threading.Event()

    def fails(*given: Any) -> Any:
        if not failed.is_set() and when(*given):
            failed.set()
            raise error
        return real(*given)

    patch.setattr(owner, name, fails)
    return failed
