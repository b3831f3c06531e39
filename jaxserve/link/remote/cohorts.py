"""Cohorts of lanes that an expert pool runs together, with a price on waiting.

Lanes that were served together return together, so independent attention workers stay in step while
all is calm. A straggler would break that for good unless the others wait for it, or it for them.
Where smaller passes are better, a cohort runs in parts, each as a cohort of its own (`parts.py`).
See `docs/decisions/expert-pools-batch-by-cohort.md`.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from jaxserve.link.remote.batching import NEVER, Decision, Key, Turns, Waiting, batches
from jaxserve.link.remote.parts import Parts

FIRST_ITERATION = 0.05
"""Seconds that an iteration of a lane is taken to last before one was seen."""


class _Lane:
    """A lane that has been served, and when its next message is expected: a moving mean after the
    answer. The first layers have their own, since they follow the sampler or fill the lane's
    pipeline."""

    def __init__(self) -> None:
        self.cohort: Hashable = None
        self.home = _Cohort()
        """Cohort that its messages name, none before the first; the part of it that it runs in."""
        self.layer = self._last = -1
        self.answered = self.due = self.came = 0.0
        self._means = [0.0] * 4

    def arrives(self, layer: int, now: float) -> None:
        """Learns from a message how long the lane takes, and after which layer its step ends. A
        stall moves the mean little: the pool would wait for the lane in the next steps, too."""
        self.came = now
        if self.answered:
            self._last = self.layer if layer <= self.layer else self._last
            at, seconds = min(layer, 3), now - self.answered
            mean = self._means[at] or seconds
            weight = 0.2 if seconds < 1.5 * mean else 0.02
            self._means[at] = mean + weight * (min(seconds, 8 * mean) - mean)

    def leaves(self, layer: int, now: float) -> None:
        """Expects the next message; `now` is when the answer was computed."""
        self.layer, self.answered = layer, now
        self.due = now + 1.02 * self._means[min(0 if layer == self._last else layer + 1, 3)]


class _Cohort:
    """Lanes that are to run together: a part of a cohort, or all of it. Those of its last pass are
    *in step*; all others wait at their layer until the cohort comes by."""

    def __init__(self) -> None:
        self.layer, self.ran, self.began, self.look = -1, 0.0, 0.0, 0.0
        """Layer and time of the last pass; when it last passed the first layer; when the price is
        to be looked at again."""
        self.in_step: set[Key] = set()
        self.missing: set[Key] = set()
        """Lanes in step whose next message has not arrived."""
        self.waiting: dict[int, dict[Key, Waiting]] = {}
        """Messages by layer and lane."""

    @property
    def position(self) -> int:
        """Next layer to run: the first behind the last one at which a lane in step waits. Lanes
        whose step ends earlier, having no drafts, say, wait at layer 0 for the others."""
        here = [at for at, own in self.waiting.items() if not self.in_step.isdisjoint(own)]
        return min(here or self.waiting, key=lambda at: (at <= self.layer, at))


class Cohorts(Turns):
    """Runs cohorts layer by layer, with a price on waiting.

    A cohort's layer runs when the messages of all its lanes in step are there, or when waiting
    costs more than going on: messages present × further wait > messages missing × price. Lanes that
    were left behind wait for their cohort's next iteration.

    Args:
      most: most messages of a batch.
      price: what a lane that is left behind costs, in iterations. Lower values favour throughput;
        with infinite ones cohorts run in lockstep.
      longest: iterations after which a message is served without its cohort, and a lane that is
        overdue is no longer expected.
    """

    def __init__(self, most: int, price: float = 1 / 3, longest: float = 1.3):
        super().__init__(most)
        self._price, self._longest = price, longest
        self._lanes: dict[Key, _Lane] = defaultdict(_Lane)
        self._cohorts: dict[Hashable, _Cohort] = defaultdict(_Cohort)
        self._places: dict[Hashable, int] = {}
        """Numbers of the domains, by which they are dealt to the parts of a cohort."""
        self._parts, self._ended = Parts(), 0.0
        """Number of parts; when the last pass ended."""
        self._ready: deque[list[Waiting]] = deque()
        """Batches of a cohort whose layer runs, which needs several if shapes differ."""
        self.iteration = FIRST_ITERATION
        """Moving mean of the seconds that a cohort takes for all layers."""

    def put(self, message: Waiting, now: float) -> None:
        """See `Turns`."""
        message.arrived, key = now, message.key
        if key in self._waiting:
            self._remove(self._waiting[key])
        lane = self._lanes[key]
        if message.cohort != lane.cohort:
            lane.cohort, lane.home = message.cohort, self._home(key, message.cohort)
        cohort = lane.home
        self._waiting[key] = cohort.waiting.setdefault(message.layer, {})[key] = message
        if lane.due:
            self.misjudged += 0.01 * (min(abs(now - lane.due), self.iteration) - self.misjudged)
        lane.arrives(message.layer, now)
        cohort.missing.discard(key)

    def take(self, now: float, *, idle: bool) -> Decision:
        """See `Turns`. A cohort that lacks messages runs only once the pool is idle."""
        at = NEVER
        if not self._ready and self._waiting:
            chosen, at = self._choose(now, idle)
            self._ready.extend(batches(chosen, self.most))
        if not self._ready:
            return Decision(at=at)
        batch = self._ready.popleft()
        batch[0].taken = now
        return Decision(batch)

    def served(self, batch: Sequence[Waiting], now: float) -> None:
        """See `Turns`."""
        for message in batch:
            if message.key in self._lanes:
                self._lanes[message.key].leaves(message.layer, now)
        domains, begin, self._ended = len(self._places), max(batch[0].taken, self._ended), now
        if domains < 2 or self._price == NEVER:
            return
        self._parts.passed(len(batch), now - begin)
        if self._parts.review(now, self.iteration, domains, len(self._lanes) / domains, self.most):
            self._divide()

    def forget(self, domain: Hashable) -> None:
        """See `Turns`."""
        for message in [one for one in self._waiting.values() if one.domain == domain]:
            self._remove(message)
        gone = {key for key in self._lanes if key[0] == domain}
        for cohort in self._cohorts.values():
            cohort.in_step -= gone
            cohort.missing -= gone
        for key in gone:
            del self._lanes[key]
        self._places.pop(domain, None)
        rest = ([one for one in batch if one.domain != domain] for batch in self._ready)
        self._ready = deque(filter(None, rest))

    def _home(self, key: Key, cohort: Hashable) -> _Cohort:
        """Returns the part of its cohort that a lane runs in."""
        place = self._places.setdefault(key[0], max(self._places.values(), default=-1) + 1)
        return self._cohorts[cohort, place % self._parts.count]

    def _divide(self) -> None:
        """Deals the lanes to the present number of parts. A part goes on where the largest share of
        its lanes in step is."""
        old = sorted(self._cohorts.values(), key=lambda one: len(one.in_step), reverse=True)
        self._cohorts, sources = defaultdict(_Cohort), dict[_Cohort, _Cohort]()
        for key, lane in self._lanes.items():
            lane.home = self._home(key, lane.cohort)
        for cohort in old:
            for key in cohort.in_step:
                home = self._lanes[key].home
                if sources.setdefault(home, cohort) is cohort:
                    home.layer, home.ran, home.began = cohort.layer, cohort.ran, cohort.began
                    home.in_step.add(key)
                    home.missing = home.in_step & cohort.missing
        for key, message in self._waiting.items():
            self._lanes[key].home.waiting.setdefault(message.layer, {})[key] = message

    def _remove(self, message: Waiting) -> None:
        del self._waiting[message.key]
        waiting = self._lanes[message.key].home.waiting
        del waiting[message.layer][message.key]
        if not waiting[message.layer]:
            del waiting[message.layer]

    def _choose(self, now: float, idle: bool) -> tuple[list[Waiting], float]:
        """Returns the messages to run, or none and when to look again."""
        oldest = next(iter(self._waiting.values()))
        overdue = oldest.arrived + self._longest * self.iteration
        if idle and now >= overdue:
            return self._overdue(oldest, now), now
        looks = {
            cohort: self._look(cohort, now) if idle else NEVER if cohort.missing else now
            for cohort in self._cohorts.values()
            if cohort.waiting
        }
        if due := [cohort for cohort, at in looks.items() if at <= now]:
            cohort = min(due, key=lambda cohort: cohort.ran)
            return self._run(cohort, cohort.position, now), now
        return [], max(now, min(overdue, *looks.values()))

    def _run(self, cohort: _Cohort, layer: int, now: float) -> list[Waiting]:
        """Takes the cohort's messages of a layer; lanes in step without one are left behind."""
        batch = self._at(cohort, layer)
        keys = {message.key for message in batch}
        if layer <= cohort.layer or not cohort.began:
            if cohort.began and not keys.isdisjoint(cohort.in_step):
                # A pause between requests is no iteration.
                lasted = min(now - cohort.began, 2 * self.iteration)
                self.iteration += 0.3 * (lasted - self.iteration)
            cohort.began = now
        self.left_behind += len(cohort.in_step - keys)
        cohort.layer, cohort.ran, cohort.look = layer, now, 0.0
        cohort.in_step, cohort.missing = keys, set(keys)
        return batch

    def _overdue(self, oldest: Waiting, now: float) -> list[Waiting]:
        """Takes the message that waited longest, with those of its cohort that wait beside it. They
        go on as the cohort if they are more than the lanes in step: else a cohort that fell apart
        would never be whole again, since passes of few messages keep the pool busy."""
        cohort, layer = self._lanes[oldest.key].home, oldest.layer
        beside = cohort.waiting[layer]
        if layer == cohort.position or len(beside) > len(cohort.in_step):
            return self._run(cohort, layer, now)
        cohort.in_step.difference_update(beside)
        return self._at(cohort, layer)

    def _at(self, cohort: _Cohort, layer: int) -> list[Waiting]:
        """Takes the cohort's messages of a layer."""
        batch = list(cohort.waiting[layer].values())
        for message in batch:
            self._remove(message)
        return batch

    def _look(self, cohort: _Cohort, now: float) -> float:
        """Returns when to look again at a cohort while the pool is idle; now if it is to run."""
        if cohort.missing and now < cohort.look:
            return cohort.look
        dues = {key: self._lanes[key].due for key in cohort.missing}
        gone = {key for key, due in dues.items() if now - due > self._longest * self.iteration}
        cohort.missing -= gone
        cohort.in_step -= gone
        # A domain takes its answers in order, so it sends nothing before its older message has run.
        held = {one.domain: one.arrived for one in reversed(self._waiting.values())}
        if all(held.get(key[0], now) < self._lanes[key].came for key in dues):
            return now
        # A lane that is overdue is assumed to take as long again.
        waits = sorted(max(dues[key] - now, now - dues[key]) for key in cohort.missing)
        present, cost, left = len(cohort.waiting[cohort.position]), self._price * self.iteration, 0
        while left < len(waits):
            # Leave the last ones behind if waiting for them costs more than they are worth.
            left += 1
            kept = waits[-left - 1] if left < len(waits) else 0.0
            if (present + len(waits) - left) * (waits[-1] - kept) > left * cost:
                del waits[-left:]
                left = 0
        if not waits:
            return now
        cohort.look = now + min(max(waits[-1], self.iteration / 2048), self.iteration / 128)
        return cohort.look
