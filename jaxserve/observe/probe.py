"""Measures a few steps of a running server: spans of the stages.

Every process has one probe. `observe/watch.py` decides (followers learn it from the leader's step
boundaries), so that all probes turn on and off at the same boundaries. While it is off there is no
observer, at no cost. Knows nothing of requests or other processes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxserve.observe.recorder import Recorder
from jaxserve.observe.spans import Span
from jaxserve.roles.worker import Observer

CAPACITY = 1 << 14
"""Most spans of one measurement: 61 layers, 4 stages, 3 lanes and 4 steps make 2928."""
TAKE_SECONDS = 5.0
"""Deadline in seconds for collecting a measurement from all processes."""


class Watched(Protocol):
    """The part of a driver that a probe uses."""

    observer: Observer | None


class Probe:
    """Turned on and off by the driver's thread; `take` may be called from any thread.

    Args:
      driver: its stages are measured; an observer that it already has stays active.
      process: index of this process.
    """

    def __init__(self, driver: Watched, process: int = 0):
        self._driver = driver
        self._always = driver.observer
        self._recorder = Recorder(process, capacity=CAPACITY, backlog=CAPACITY, paused=True)
        self._on = False

    def turn(self, on: bool) -> None:
        """Turns measuring on or off for everything enqueued from now on."""
        if on == self._on:
            return
        self._on = on
        if on:
            self._recorder.clear()
            self._recorder.resume()
            both = [self._always, self._recorder]
            self._driver.observer = self._recorder if self._always is None else _Several(both)
        else:
            self._driver.observer = self._always
            self._recorder.pause()

    def take(self, timeout: float) -> list[Span]:
        """Waits until everything measured since the last start has run, and returns it.

        After `timeout` seconds it returns what has finished by then.
        """
        self._recorder.flush(timeout)
        return self._recorder.spans()

    def close(self) -> None:
        """Ends its threads."""
        self.turn(False)
        self._recorder.close()


class _Several:
    """An observer that forwards to several observers."""

    def __init__(self, observers: Sequence[Any]):
        self._observers = observers

    def observe(self, *stage: Any) -> None:
        for observer in self._observers:
            observer.observe(*stage)
