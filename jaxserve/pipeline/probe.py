"""Measures the steps of a short while, in a server that goes on: spans, and tokens of experts.

Every process has one. Whoever decides (`engine/watch.py`; for followers, the leader's boundaries)
turns all of them on and off at the same boundaries. While it is off the driver has no observer and
nothing is counted, so that nothing is spent. Knows nothing of requests or other processes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np

from jaxserve.pipeline.driver import Observer, OnLoad
from jaxserve.pipeline.timeline import Recorder, Span

CAPACITY = 1 << 14
"""Spans of one while: 61 layers, 4 stages, 3 lanes and 4 steps are 2928."""


class Watched(Protocol):
    """What a probe needs of a driver."""

    observer: Observer | None
    on_load: OnLoad | None


class Measured(msgspec.Struct, frozen=True):
    """What one process saw of the steps that were measured."""

    spans: list[Span]
    expert_tokens: dict[int, list[int]]
    """Layer → the tokens that each expert got there, as far as this process routed them."""


class Probe:
    """Turned on and off by the thread of the driver; `take` may be called by any other.

    Args:
      driver: whose stages are measured. An observer that it has already goes on observing.
      process: index of this process.
    """

    def __init__(self, driver: Watched, process: int = 0):
        self._driver = driver
        self._always = driver.observer
        self._recorder = Recorder(process, capacity=CAPACITY, backlog=CAPACITY, paused=True)
        self._loads: list[tuple[tuple[int, ...], jax.Array]] = []
        self._on = False

    def turn(self, on: bool) -> None:
        """Whether what is enqueued from now on is measured."""
        if on == self._on:
            return
        self._on = on
        if on:
            self._recorder.clear()
            self._loads = []
            self._recorder.resume()
            both = [self._always, self._recorder]
            self._driver.observer = self._recorder if self._always is None else _Several(both)
            self._driver.on_load = self._note_load
        else:
            self._driver.observer, self._driver.on_load = self._always, None
            self._recorder.pause()

    def take(self, timeout: float) -> Measured:
        """What was measured since it was turned on last, once all of it has run.

        After `timeout` seconds, what has run by then.
        """
        self._recorder.flush(timeout)
        loads, self._loads = self._loads, []
        return Measured(self._recorder.spans(), _totals(loads))

    def close(self) -> None:
        """Ends its threads."""
        self.turn(False)
        self._recorder.close()

    def _note_load(self, layers: tuple[int, ...], counts: jax.Array) -> None:
        counts.copy_to_host_async()
        self._loads.append((layers, counts))


class _Several:
    """Observers that all hear of everything."""

    def __init__(self, observers: Sequence[Any]):
        self._observers = observers

    def observe(self, *stage: Any) -> None:
        for observer in self._observers:
            observer.observe(*stage)


def _totals(loads: Sequence[tuple[tuple[int, ...], jax.Array]]) -> dict[int, list[int]]:
    """The sums of each layer."""
    totals: dict[int, np.ndarray] = {}
    for layers, counts in loads:
        mine = [np.asarray(s.data) for s in counts.addressable_shards if s.replica_id == 0]
        for part in (part for shard in mine for part in shard):  # [layers, experts]
            for layer, row in zip(layers, part, strict=True):
                totals[layer] = totals.get(layer, 0) + row
    return {layer: total.tolist() for layer, total in totals.items()}
