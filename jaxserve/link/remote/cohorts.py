"""Cohorts of lanes that an expert pool runs together, with a price on waiting.

Lanes that were served together return together, so independent attention workers stay in step while
all is calm. A straggler would break that for good unless the others wait for it, or it for them.

A cohort may run in parts (`parts.py`), each as a cohort of its own. See
`docs/decisions/expert-pools-batch-by-cohort.md`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence

from jaxserve.link.remote.batching import NEVER, Decision, Key, Turns, Waiting, batches
from jaxserve.link.remote.parts import WHOLE, Parts

FORGETS = 0.9
"""Factor by which a lane's `waited` shrinks with every layer."""
LEAST = 1 / 12
"""Least price of a lane that others have waited for, as a share of the price of the others."""
STOP, UNSTEADY, STEADY = 0.2, 0.7, 0.9
"""Iterations by which a lane left behind is late if its domain has stopped; part of the way to 1
that the domain's `unsteady` goes then; factor by which it shrinks with every iteration."""
USUAL = 14
"""Mean deviations up to which a late message is taken to come at once. Of hundreds of calm lanes
one is always late; only beyond what chance explains does one stall."""
FIRST_ITERATION = 0.05
"""Seconds that an iteration of a lane is taken to last before one was seen."""


class _Lane:
    """A lane that has been served, and when its next message is expected: a moving mean after the
    answer. The first layers have their own means and deviations. They follow the sampler, and a
    worker goes from one lane to the next without a break, so the delays of all its lanes add up.
    The first values say little: passes of few messages follow each other at the start.
    """

    def __init__(self, siblings: "list[_Lane]") -> None:
        self.siblings = siblings
        """All lanes of its domain."""
        self.cohort: Hashable = None
        self.home = _Cohort()
        """Cohort that its messages name, none before the first; the part of it that it runs in."""
        self.layer = self.last = self.left = -1
        """Layer of the last pass, the last one of a step, and the one at which its cohort went on
        without it."""
        self.answered = self.due = self.came = self.usual = 0.0
        """When the last answer was computed; when the next message is due, when the last one came,
        and the seconds by which a message is late as usual."""
        self.late = self.waited = self.unsteady = 0.0
        """Seconds that the messages of others waited for this lane: at its last layer, and lately
        at layers that followed one at which they waited as long. A straggler is late at every
        layer, by less than its price each time; a single stall foretells nothing. And how surely
        its domain stops again and again, from 0 to 1."""
        self._means, self._deviations = [0.0] * 4, [0.0] * 4
        """Seconds, for each of the first three layers and for the others. The last deviation is one
        of all layers, because those of the first ones are learned slowly."""

    def arrives(self, layer: int, now: float) -> None:
        """Learns from a message how long the lane takes, and after which layer its step ends. A
        stall moves the mean little: the pool would wait for the lane in the next steps, too."""
        self.came = now
        if self.answered:
            self.last = self.layer if layer <= self.layer else self.last
            at, seconds = layer if layer < 3 else 3, now - self.answered
            mean = self._means[at] or seconds
            late = seconds - mean
            if late < mean / 2:
                for each in {at, 3}:
                    self._deviations[each] += 0.02 * (abs(late) - self._deviations[each])
                late *= 0.5 if late < -mean / 2 else 0.2
            else:
                late = 0.02 * min(late, 7 * mean)
            self._means[at] = mean + late

    def leaves(self, layer: int, now: float) -> None:
        """Expects the next message; `now` is when the answer was computed."""
        self.layer, self.answered = layer, now
        at = 0 if layer == self.last else min(layer + 1, 3)
        self.due = now + 1.02 * self._means[at]
        self.usual = USUAL * max(self._deviations[at], self._deviations[3])

    def further(self, now: float, others: float, price: float) -> tuple[float, float]:
        """Returns how many seconds from now the message is expected, and what it costs to leave the
        lane behind: the price, less what others have waited for it. A message that is later than
        usual, compared with the rest of its cohort, which is `others` seconds late on the mean, is
        assumed to take as long again."""
        late = now - self.due - others
        cost = (1 - self.unsteady) * max(price - self.waited, LEAST * price)
        return 0.0 if 0 < late < self.usual else abs(late), cost


class _Cohort:
    """Lanes that are to run together: a part of a cohort, or all of it. Those of its last pass are
    *in step*; all others wait at their layer until the cohort comes by."""

    def __init__(self) -> None:
        self.layer, self.ran, self.began, self.look = -1, 0.0, 0.0, 0.0
        """Layer and time of the last pass; when it last passed the first layer; when the price is
        to be looked at again."""
        self.in_step: set[_Lane] = set()
        self.missing: set[_Lane] = set()
        """Lanes in step whose next message has not arrived."""
        self.late = 0.0
        """Sum of the seconds by which messages of other lanes in step came late. If all lanes are
        late, for example after a pass that waited for one, that says nothing about a single one."""
        self.waiting: dict[int, dict[_Lane, Waiting]] = {}
        """Messages by layer and lane, in the order of their arrival."""

    @property
    def due(self) -> float:
        """When the next messages of all lanes in step are due."""
        return max((lane.due for lane in self.in_step), default=NEVER)

    @property
    def position(self) -> int:
        """Next layer to run: the first behind the last one at which a lane in step waits. Lanes
        whose step ends earlier, having no drafts, say, wait at layer 0 for the others."""
        here = [at for at, own in self.waiting.items() if not self.in_step.isdisjoint(own)]
        return min(here or self.waiting, key=lambda at: (at <= self.layer, at))


class Cohorts(Turns):
    """Runs cohorts layer by layer, with a price on waiting.

    A cohort's layer runs when the messages of all its lanes in step are there, or when waiting
    costs more than going on: messages present × further wait > messages missing × price. What the
    others have waited for a lane at earlier layers lowers its price, since a straggler is late at
    every layer. Lanes left behind catch up where the pool would idle, or wait for their cohort.

    Args:
      most: most messages of a batch.
      price: what a lane that is left behind costs, in iterations. Lower values favour throughput;
        with infinite ones cohorts run in lockstep.
      longest: iterations after which a message is served without its cohort, and a lane that is
        overdue is no longer expected.
    """

    def __init__(self, most: int, price: float = 0.5, longest: float = 1.3):
        super().__init__(most)
        self._price, self._longest = price, longest
        self._lanes: dict[Key, _Lane] = {}
        self._cohorts: dict[tuple[Hashable, int], _Cohort] = defaultdict(_Cohort)
        """Parts of cohorts, by the cohort that messages name and the number of the part."""
        self._domains: dict[Hashable, list[_Lane]] = {}
        """Lanes of each domain."""
        self._messages: dict[_Lane, Waiting] = {}
        """Messages that wait, in the order of their arrival."""
        self._parts, self._last, self._layers = Parts(), -1, 1
        """Number of parts; the one that ran last; layers of the model, as far as seen."""
        self._ended = self._apart = 0.0
        """When the last pass ended; when its part may run again, if there are several."""
        self._moved = set[_Lane]()
        """Lanes of domains that came in the middle of a step, from a pool that was lost or late."""
        self._ready: deque[list[Waiting]] = deque()
        """Batches of a cohort whose layer runs, which needs several if shapes differ."""
        self.iteration = FIRST_ITERATION
        """Moving mean of the seconds that a cohort takes for all layers."""

    def put(self, message: Waiting, now: float) -> bool:
        """See `Turns`."""
        message.arrived, key = now, message.key
        self._layers = max(self._layers, message.layer + 1)
        if (lane := self._lanes.get(key)) is None:
            siblings = self._domains.setdefault(message.domain, [])
            lane = self._lanes[key] = _Lane(siblings)
            siblings.append(lane)
        self._remove(lane)
        if message.layer not in (0, lane.layer + 1):
            self._moved.update(lane.siblings)
        if message.cohort != lane.cohort:
            lane.cohort, place = message.cohort, [*self._domains].index(message.domain)
            lane.home = self._cohorts[lane.cohort, place % self._parts.count]
        cohort = lane.home
        self._messages[lane] = cohort.waiting.setdefault(message.layer, {})[lane] = message
        if lane.due:
            self.misjudged += 0.01 * (min(abs(now - lane.due), self.iteration) - self.misjudged)
        # A domain sends nothing before its older message has run, which is no stop of its own; nor
        # has one stopped that comes soon after its cohort has gone on.
        if lane.left == message.layer:
            late = now - max(lane.due, *(one.answered for one in lane.siblings))
            for one in lane.siblings if late > STOP * self.iteration else ():
                one.unsteady += UNSTEADY * (1 - one.unsteady)
        lane.arrives(message.layer, now)
        if lane in cohort.missing:
            cohort.missing.remove(lane)
            cohort.late += now - lane.due
        return now >= cohort.look or not cohort.missing or lane not in cohort.in_step

    def take(self, now: float, *, idle: bool) -> Decision:
        """See `Turns`. A cohort that lacks messages runs only once the pool is idle."""
        at = NEVER
        if not self._ready and self._messages:
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
            if lane := self._lanes.get(message.key):
                lane.leaves(message.layer, now)
        domains, begin, self._ended = len(self._domains), max(batch[0].taken, self._ended), now
        self._apart = now + (now - begin) / 2
        if domains < 2 or self._price == NEVER:
            return
        self._parts.passed(len(batch), now - begin)
        if self._parts.review(now, self.iteration, domains, len(self._lanes) / domains, self.most):
            self._divide()

    def forget(self, domain: Hashable) -> None:
        """See `Turns`."""
        gone = self._domains.pop(domain, [])
        self._moved.difference_update(gone)
        for lane in gone:
            self._remove(lane)
        for cohort in self._cohorts.values():
            cohort.in_step.difference_update(gone)
            cohort.missing.difference_update(gone)
        self._lanes = {key: lane for key, lane in self._lanes.items() if key[0] != domain}
        rest = ([one for one in batch if one.domain != domain] for batch in self._ready)
        self._ready = deque(filter(None, rest))

    def _divide(self) -> None:
        """Deals the lanes to the present number of parts. All lanes in step stay so. A part goes on
        where those of its lanes that are ahead wait least until it comes by."""
        old, self._cohorts = [*self._cohorts.values()], defaultdict(_Cohort)
        for place, lanes in enumerate(self._domains.values()):
            for lane in lanes:
                lane.home = self._cohorts[lane.cohort, place % self._parts.count]
        sources = defaultdict[_Cohort, Counter[_Cohort]](Counter)
        for cohort in old:
            for lane in cohort.in_step:
                sources[lane.home][cohort] += 1
                lane.home.in_step.add(lane)
        for home, counts in sources.items():
            home.missing = home.in_step.difference(self._messages)
            waits = {
                at: sum(n * ((one.layer - at.layer) % self._layers) for one, n in counts.items())
                for at in counts
            }
            first = min(waits, key=waits.__getitem__)
            home.layer, home.ran, home.began = first.layer, first.ran, first.began
        for lane, message in self._messages.items():
            lane.home.waiting.setdefault(message.layer, {})[lane] = message

    def _remove(self, lane: _Lane) -> None:
        if message := self._messages.pop(lane, None):
            waiting = lane.home.waiting
            del waiting[message.layer][lane]
            if not waiting[message.layer]:
                del waiting[message.layer]

    def _choose(self, now: float, idle: bool) -> tuple[list[Waiting], float]:
        """Returns the messages to run, or none and when to look again."""
        for lane in self._moved.intersection(self._messages):
            cohort, layer = lane.home, self._messages[lane].layer
            if layer == cohort.layer:  # it has moved, too, and has just run this layer
                cohort.in_step.update(cohort.waiting[layer])
                cohort.missing.update(cohort.waiting[layer])
                return self._at(cohort, layer), now
            away = (layer - cohort.layer) % self._layers != 1  # the cohort does not come here next
            if idle and away and self._fits(cohort, layer, now):
                return self._at(cohort, layer), now
        oldest = next(iter(self._messages.values()))
        overdue = oldest.arrived + self._longest * self.iteration
        if idle and now >= overdue:
            return self._alone(oldest, now), now
        looks = dict[tuple[int, _Cohort], float]()
        for (_, part), cohort in self._cohorts.items():
            if cohort.waiting:
                at = self._look(cohort, now) if idle else NEVER if cohort.missing else now
                # Half of a pass lies between two lanes of a worker, if no other part runs then.
                # Otherwise they drift together: the worker gets both answers at once, attends to
                # one after the other, and the pool waits for it at each layer. A longer time would
                # hold up parts of one worker, whose lanes leave it one after the other.
                apart = self._parts.count > 1 and part == self._last
                looks[part, cohort] = max(at, self._apart if idle else NEVER) if apart else at
        if due := [each for each, at in looks.items() if at <= now]:
            self._last, cohort = min(due, key=lambda each: each[1].ran)
            return self._run(cohort, cohort.position, now), now
        if idle and (behind := self._behind(now)):
            return behind, now
        return [], max(now, min(overdue, *looks.values()))

    def _behind(self, now: float) -> list[Waiting]:
        """Takes messages of a layer that their cohort has passed by less than half of all layers,
        if their pass ends before any cohort's next messages are due. So lanes left behind catch up
        at no cost to the others. A lane further behind meets its cohort sooner by waiting."""
        for cohort in self._cohorts.values():
            whole = len(cohort.in_step) > WHOLE * len(self._domains) / self._parts.count
            for layer, own in sorted(cohort.waiting.items() if whole else ()):
                near = (cohort.layer - layer) % self._layers < self._layers / 2
                # A lane that was never served waits at layer 0 for its cohort.
                if near and all(lane.answered for lane in own) and self._fits(cohort, layer, now):
                    return self._at(cohort, layer)
        return []

    def _fits(self, cohort: _Cohort, layer: int, now: float) -> bool:
        """Returns whether a pass of the cohort's messages of a layer ends before others are due."""
        ends = now + self._parts.seconds(len(cohort.waiting[layer]))
        return all(ends <= each.due for each in self._cohorts.values())

    def _run(self, cohort: _Cohort, layer: int, now: float) -> list[Waiting]:
        """Takes the cohort's messages of a layer; lanes in step without one are left behind."""
        lanes = set(cohort.waiting[layer])
        if layer <= cohort.layer or not cohort.began:
            if cohort.began and not lanes.isdisjoint(cohort.in_step):
                # A pause between requests is no iteration.
                lasted = min(now - cohort.began, 2 * self.iteration)
                self.iteration += 0.3 * (lasted - self.iteration)
            cohort.began = now
        self._note_waits(cohort, layer)
        left = cohort.in_step - lanes
        self.left_behind += len(left)
        for lane in left:  # where most are left, the cohort falls apart: no fault of theirs
            lane.left = layer if 2 * len(left) < len(cohort.in_step) else -1
        cohort.layer, cohort.ran, cohort.look, cohort.late = layer, now, 0.0, 0.0
        cohort.in_step, cohort.missing = lanes, set(lanes)
        self._moved -= lanes
        self._parts.layers += 1
        return self._at(cohort, layer)

    def _note_waits(self, cohort: _Cohort, layer: int) -> None:
        """Charges lanes in step for the time in which the idle pool waited for them at a layer."""
        waiting, before, waited = cohort.waiting[layer], self._ended, 0.0
        for present, (lane, message) in enumerate(waiting.items()):
            if message.arrived > before:
                waited += (message.arrived - before) * present / (len(waiting) - present)
                before = message.arrived
            if lane in cohort.in_step:
                lane.waited = FORGETS * lane.waited + min(lane.late, waited)
                lane.late = waited
                lane.unsteady *= STEADY if layer <= cohort.layer else 1.0

    def _alone(self, message: Waiting, now: float) -> list[Waiting]:
        """Takes a message that waits no longer for its cohort, with those that wait beside it. They
        go on as the cohort if lanes in step are among them, or if they are more than these: else a
        cohort that fell apart would never be whole again, since passes of few messages keep the
        pool busy."""
        cohort, layer = self._lanes[message.key].home, message.layer
        beside = cohort.waiting[layer]
        joined = layer == cohort.position and not cohort.in_step.isdisjoint(beside)
        if joined or len(beside) > len(cohort.in_step):
            return self._run(cohort, layer, now)
        cohort.in_step.difference_update(beside)
        return self._at(cohort, layer)

    def _at(self, cohort: _Cohort, layer: int) -> list[Waiting]:
        """Takes the cohort's messages of a layer."""
        return [self._messages.pop(lane) for lane in cohort.waiting.pop(layer)]

    def _since(self, lane: _Lane, now: float) -> float:
        """Returns since when the lane's domain waits; `now` if it does not."""
        waiting = (self._messages.get(one) for one in lane.siblings)
        return min((one.arrived for one in waiting if one), default=now)

    def _look(self, cohort: _Cohort, now: float) -> float:
        """Returns when to look again at a cohort while the pool is idle; now if it is to run."""
        if cohort.missing and now < cohort.look:
            return cohort.look
        gone = [one for one in cohort.missing if now - one.due > self._longest * self.iteration]
        cohort.missing.difference_update(gone)
        cohort.in_step.difference_update(gone)
        # A domain takes its answers in order, so it sends nothing before its older message has run.
        # If all lanes in step wait so, those left behind do not take the cohort from them, but wait
        # for as long as the price says: with an infinite one nobody would ever go on.
        away = len(cohort.in_step) == len(cohort.missing) and self._price < NEVER
        if not away and all(self._since(lane, now) < lane.came for lane in cohort.missing):
            return now
        price = self._price * self.iteration
        late = max(cohort.late, 0.0) / max(len(cohort.in_step) - len(cohort.missing), 1)
        waits = sorted(lane.further(now, late, price) for lane in cohort.missing)
        present, cost, left = len(cohort.waiting[cohort.position]), 0.0, 0
        # Leave the last ones behind if waiting for them costs more than they are worth.
        while left < len(waits):
            longest, more = waits[-1][0], waits[-left - 1][1]
            if (present + len(waits) - left - 1) * longest <= cost + more:
                break
            left, cost = left + 1, cost + more
            kept = waits[-left - 1][0] if left < len(waits) else 0.0
            if (present + len(waits) - left) * (longest - kept) > cost:
                del waits[-left:]
                left, cost = 0, 0.0
        if not waits:
            return now
        cohort.look = now + min(max(waits[-1][0], self.iteration / 2048), self.iteration / 128)
        return cohort.look
