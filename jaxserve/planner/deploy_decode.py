"""The decode fleet: the pace of a unit's tokens by how many sequences it holds. Called by
`deploy.py`.

A unit is what decodes by itself: an attention and an ffn role together, or a colocated worker. The
layouts come from `search.py`; here sequences have lengths of their own, so that every layer waits
for the DP group with the longest ones, as in `plan simulate`.
"""

from typing import NamedTuple

import numpy as np

from jaxserve.planner.deploy_demand import Requests
from jaxserve.planner.deploy_times import cycle_seconds, rows_of
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.search import Searcher
from jaxserve.planner.stage_times import Rooflines
from jaxserve.planner.stages import Calculator

POINTS = (0.1, 0.4, 0.7, 1.0)
"""Parts of the slots at which the pace is worked out; between them it is a line."""
STEPS = 4
"""Of every lane that are run for a pace."""


class DecodeUnit(NamedTuple):
    """One unit.

    Attributes:
      slots: sequences of a DP group and lane, at most.
      pace: (slots taken, seconds between a sequence's tokens), ascending.
      tokens_a_step: that a sequence gets, with its accepted drafts.
    """

    layout: Layout
    slots: int
    hardware: tuple[Hardware, Hardware]
    pace: tuple[tuple[float, float], ...]
    tokens_a_step: float = 1.0

    @property
    def sequences(self) -> int:
        """At most."""
        return self.layout.dp * self.layout.lanes * self.slots

    @property
    def dollars(self) -> float:
        """USD an hour."""
        a, f = self.hardware
        return a.price * self.layout.attention_devices + f.price * self.layout.ffn_devices

    @property
    def hosts(self) -> int:
        """Servers, or parts of one, of both roles."""
        a, f = self.hardware
        ffn = -(-self.layout.ffn_devices // f.devices_per_host)
        return -(-self.layout.attention_devices // a.devices_per_host) + ffn

    def tpot(self, sequences: float) -> float:
        """Seconds between a sequence's tokens, with so many in the unit."""
        taken = sequences / (self.layout.dp * self.layout.lanes)
        slots, seconds = zip(*self.pace, strict=True)
        if taken <= slots[-1]:
            return float(np.interp(taken, slots, seconds))
        slope = (seconds[-1] - seconds[-2]) / max(slots[-1] - slots[-2], 1e-9)
        return seconds[-1] + slope * (taken - slots[-1])


class Pace:
    """Seconds between tokens of a layout.

    Args:
      searcher: which knows what drafts cost.
      calculator: of both roles.
    """

    def __init__(
        self,
        searcher: Searcher,
        calculator: Calculator,
        layout: Layout,
        hardware: tuple[Hardware, Hardware],
        experts: ExpertLoads | None = None,
    ):
        self._searcher, self._layout = searcher, layout
        self._times = Rooflines(layout, calculator, calculator, hardware, experts)

    def seconds(self, requests: Requests, batch: int) -> float:
        """With `batch` sequences a DP group and lane."""
        plain = self._cycle(requests, batch)
        if not self._layout.drafts:
            return plain
        # Drafts as the search has them; what unequal lengths cost comes on top.
        even = self._cycle(requests, batch, even=True)
        return self._searcher.evaluate(self._layout, batch).tpot * plain / even

    def _cycle(self, requests: Requests, batch: int, *, even: bool = False) -> float:
        layout, random = self._layout, np.random.default_rng(batch)
        count = layout.dp * batch
        group = np.repeat(np.arange(layout.dp), batch)
        steps = []
        for _ in range(layout.lanes):
            length = np.full(count, round(requests.context))
            if not even:
                length = requests.running(random, count)
            steps.append(self._times.step(rows_of(layout, group, np.ones(count, int), length)))
        cycle = cycle_seconds(layout, steps * STEPS, self._times)
        # The hosts of a role enqueue every layer of every lane.
        host = self._searcher.host_seconds(layout)
        return max(cycle, self._times.layers * layout.lanes * host)

    def table(self, requests: Requests, slots: int) -> tuple[tuple[float, float], ...]:
        """The pace by slots taken."""
        counts = sorted({max(1, round(slots * part)) for part in POINTS})
        if len(counts) == 1:
            counts.append(counts[0] + 1)
        found = [(float(count), self.seconds(requests, count)) for count in counts]
        most = 0.0
        rising = []
        for count, seconds in found:  # draws differ; more sequences are never faster
            most = max(most, seconds)
            rising.append((count, most))
        return tuple(rising)

    def largest(self, requests: Requests, room: int, tpot: float) -> int:
        """Sequences a DP group and lane within a time, up to `room`; 0: not even one."""
        if self.seconds(requests, 1) > tpot:
            return 0
        low, high = 1, room
        if self.seconds(requests, high) <= tpot:
            return high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            if self.seconds(requests, middle) <= tpot:
                low = middle
            else:
                high = middle
        return low
