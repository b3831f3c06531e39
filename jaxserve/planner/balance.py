"""How much attention an ffn role can serve: analytic rules for the ratio of the two roles.

`Balance` is for the size of one attention worker, `advice` for the number of attention workers that
share an ffn role, `next_workers` for the step towards it that a running fleet may take. They take
the seconds of a lane's step on each role: predicted ones from `search.py`, measured ones from
`verify.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.planner.layouts import Layout

WORTH = 0.05
"""Part of a token's cost from which on a change of the number of workers is advised."""


class Balance(NamedTuple):
    """Seconds of a lane's step in all layers, with a layout's batch: of attention in a DP group,
    whose sequences do not depend on the number of groups; of the ffn role; and of that with twice
    as many DP groups (`doubled`)."""

    attend: float
    ffn: float
    doubled: float

    def attention_devices(self, layout: Layout, prices: tuple[float, float]) -> float:
        """Returns the attention devices for which a token costs least (Song et al. 2026), at the
        prices of a device of either role.

        The ffn role takes a constant, its weights, and a time for each DP group. Up to as many
        groups as keep it busy for as long as a group attends, more cost nothing but themselves.
        Behind that they make all wait, and pay only while the constant weighs more.
        """
        each = (self.doubled - self.ffn) / layout.dp
        constant = self.ffn - each * layout.dp
        if each <= 0:
            return float("inf")
        attention, ffn = prices[0] * layout.tp, prices[1] * layout.ffn_devices
        cheapest = max(0.0, constant / each * ffn / attention) ** 0.5
        return layout.tp * max((self.attend - constant) / each, cheapest)

    def text(self, layout: Layout, prices: tuple[float, float]) -> str:
        return (
            f"{layout.attention_devices} attention devices beside {layout.ffn_devices} for the "
            f"FFN; by the analytic rule {self.attention_devices(layout, prices):.0f} cost least "
            f"with this batch (a lane's step: {self.attend * 1e3:.1f} and {self.ffn * 1e3:.1f} ms)"
        )


class Advice(NamedTuple):
    """The number of attention workers for which a token costs least (`wanted`), beside those of the
    ffn role now, and the part of a token's cost that these save."""

    workers: int
    wanted: int
    saving: float

    @property
    def advised(self) -> int:
        """Returns the number that is worth a change, or the present one."""
        return self.wanted if self.saving >= WORTH else self.workers

    @classmethod
    def settled(cls, found: Sequence["Advice"]) -> "Advice":
        """Returns the median of several advices: a sample of a few steps says little by itself."""
        return sorted(found, key=lambda one: one.advised)[len(found) // 2]

    @property
    def text(self) -> str:
        more = self.advised - self.workers
        if not more:
            return f"attention workers: {self.workers}, as many as this ffn role should have"
        change = f"{'add' if more > 0 else 'remove'} {abs(more)}, to {self.advised}"
        return f"attention workers: {change}: a token would cost {self.saving:.0%} less"


def advice(
    workers: int,
    lanes: int,
    times: Balance,
    moving: tuple[float, float],
    prices: tuple[float, float],
) -> Advice:
    """Returns how many attention workers with this load, of `lanes` lanes each, an ffn role should
    serve, which has `workers` now. A lane's messages take the seconds in `moving` in all layers, to
    the ffn role and back; prices are USD an hour of an attention worker and of the ffn role.

    A lane's step takes at least the sum of its stages, a worker's lanes take turns on its attention
    devices, and the lanes of all workers take turns on the ffn role and on its end of the link.
    Until that is what all wait for, another worker costs only itself; then it adds no tokens.
    """
    alone = max(times.attend + times.ffn + sum(moving), lanes * times.attend)
    shared = lanes * max(times.ffn, *moving)

    def cost(count: int) -> float:
        return (count * prices[0] + prices[1]) * max(alone, count * shared) / count

    most = alone / shared
    wanted = min({max(1, math.floor(most)), math.ceil(most)}, key=cost)
    return Advice(workers, wanted, max(0.0, 1 - cost(wanted) / cost(workers)))


class RoleLoad(NamedTuple):
    """Connected workers of a role, the requests that they have or that wait, slots of a worker."""

    workers: int
    held: int
    slots: int

    def fits(self, more: int) -> bool:
        """Whether all held requests could run on `more` additional workers (negative: fewer)."""
        workers = self.workers + more
        return workers > 0 and self.held <= workers * self.slots

    def load(self, more: int) -> float:
        """Load of a worker with `more` workers, over its load now."""
        each, later = (
            min(self.slots, self.held / workers)
            for workers in (self.workers, max(1, self.workers + more))
        )
        return later / each if each else 1.0


def next_workers(
    now: Advice, advised: Callable[[int, float], Advice], domains: RoleLoad, prefills: RoleLoad
) -> int:
    """Returns how many domains a fleet should have next: one more, one fewer, or as many.

    A worker changes its role only if the others of its role have slots for all requests there, and
    if the load that follows does not ask for it back. Else a fleet would swing: with more workers
    each has fewer sequences, for which the same ffn role should serve fewer workers. `now` is the
    settled advice; `advised` gives it for a number of domains, each with a part of the present
    load.
    """
    step = (now.advised > now.workers) - (now.advised < now.workers)
    after = now.workers + step
    if not step or not (prefills if step > 0 else domains).fits(-1):
        return now.workers
    back = advised(after, domains.load(step)).advised - after
    return now.workers if back * step < 0 else after
