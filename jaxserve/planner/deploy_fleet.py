"""A fleet of prefill workers and decode units: how long they take, and what requests wait for.

Called by `deploy.py`. A prefill worker is a colocated deployment that computes prompts in chunks:
every DP group works on a prompt of its own, and all groups step together, because the experts are
divided over them. A decode unit decodes by itself: an attention and an ffn role together, or a
colocated worker. Its sequences have lengths of their own, so that every layer waits for the DP
group with the longest ones, as in `plan simulate`.

A request waits for a DP group of a prefill worker, is computed in chunks, waits for the pages link,
crosses it, waits for a slot of a unit, and gets its first token from the second step that begins
after that: a lane's next step is enqueued before the last one's result is there. By Little's law
the sequences that decode at a time are requests a second times the seconds that one decodes.

Waiting is that of Poisson arrivals and any spread of service times (M/G/c), by the approximation of
Allen and Cunneen: an M/M/c queue's waiting times the mean of the squared variations of arrivals (1)
and of services. Requests that wait at all wait exponentially long, so that percentiles follow and
not means alone.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.planner.deploy_demand import SAMPLE, Level, Requests
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.lanes import pipeline_of
from jaxserve.planner.layouts import Layout
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.search import Searcher
from jaxserve.planner.stage_times import Rooflines, Rows, StageTimes, StepTimes
from jaxserve.planner.stages import Calculator

MOST_BUSY = 0.999
"""Share of the time that servers may be busy; above it the queue counts as without an end."""
CHUNKS = (1024, 2048, 4096, 8192)
"""Tokens of a DP group and step, to try."""
DRAWS = 48
"""Chunks that stand for all, and DP groups of full steps."""
POINTS = (0.1, 0.4, 0.7, 1.0)
"""Parts of the slots at which the pace is worked out; between them it is a line."""
STEPS = 4
"""Steps of every lane that are run for a pace."""
SHARES = {"mean": None, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
"""Figures that are shown of a distribution."""


class Waiting(NamedTuple):
    """Waiting in a queue.

    Attributes:
      chance: probability that a request waits.
      mean: seconds of the requests that wait.
      busy: share of the time that a server is busy.
    """

    chance: float
    mean: float
    busy: float

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws the seconds that `count` requests wait."""
        waits = random.random(count) < self.chance
        return waits * random.exponential(1.0, count) * self.mean


def waiting(rate: float, service: np.ndarray, servers: int) -> Waiting | None:
    """Returns the waiting of requests for one of several servers; None: they are too many.

    Args:
      rate: requests a second.
      service: seconds of one server, of equally likely requests.
    """
    mean = float(service.mean())
    busy = rate * mean / servers
    if busy >= MOST_BUSY:
        return None
    if busy <= 0:
        return Waiting(0.0, 0.0, 0.0)
    variation = float(service.var()) / mean**2
    chance = erlang_c(rate * mean, servers)
    return Waiting(chance, (1 + variation) / 2 * mean / (servers * (1 - busy)), busy)


def erlang_c(load: float, servers: int) -> float:
    """The chance that all servers are busy (Erlang's formula C).

    Args:
      load: services that begin a second times their mean seconds, below `servers`.
    """
    blocked = 1.0  # formula B of none, one, two, … servers
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def rows_of(layout: Layout, group: np.ndarray, tokens: np.ndarray, length: np.ndarray) -> Rows:
    """A step's sequences; messages are padded to the fullest DP group."""
    most = int(np.bincount(group, tokens, layout.dp).max(initial=1))
    return Rows(layout.dp, group, tokens, length, most)


def colocated_seconds(times: Rooflines, rows: Rows) -> float:
    """Seconds of one step of a colocated worker, as `Colocated` runs it without noise: in every
    layer the DP groups wait for the slowest."""
    step = times.step(rows)
    at = 0.0
    for attend, there, ffn, back in zip(
        step.attend, step.dispatch, step.ffn, step.combine, strict=True
    ):
        at = at + float(attend.max()) + there + ffn + back
    return at + step.leave


def cycle_seconds(layout: Layout, steps: list[StepTimes], times: StageTimes) -> float:
    """Seconds between two steps of a lane, when every lane goes on with a next step at once.

    Args:
      steps: steps of the lanes in turn, at least three a lane.
      times: the source of the steps' times.
    """
    lanes = layout.lanes
    pipeline = pipeline_of(layout.topology, times, lanes=lanes, groups=layout.dp)
    ends: dict[int, list[float]] = {lane: [] for lane in range(lanes)}
    for number, step in enumerate(steps[:lanes]):
        pipeline.begin(number, number, 0.0, step)
    for number in range(lanes, len(steps)):
        lane, end = pipeline.advance(0.0)
        ends[lane].append(end)
        pipeline.begin(lane, number, 0.0, steps[number])
    for _ in range(lanes):
        lane, end = pipeline.advance(0.0)
        ends[lane].append(end)
    # The first steps fill the pipeline, and the last of every lane run in an emptying one.
    cycles = [(one[-2] - one[0]) / (len(one) - 2) for one in ends.values()]
    return float(np.mean(cycles))


class PrefillWorker(NamedTuple):
    """One worker.

    Attributes:
      chunk: tokens of a DP group and step.
    """

    layout: Layout
    chunk: int
    hardware: Hardware


class Chunk(NamedTuple):
    """Part of a prompt that is computed in a step."""

    tokens: int
    length: int
    """Tokens in the sequence's cache after it."""


class Steps(NamedTuple):
    """Seconds of a worker's steps.

    Attributes:
      alone: with one prompt in the worker.
      full: with a chunk in every DP group.
    """

    alone: float
    full: float

    def busy(self, load: float) -> float:
        """Share of the DP groups that have something to do with `load` chunks a group and
        second."""
        rest = 1 - load * (self.full - self.alone)
        return load * self.alone / rest if rest > 0 else float("inf")

    def seconds(self, busy: float) -> float:
        """Seconds of a step with this share of the groups busy."""
        return self.alone + busy * (self.full - self.alone)


class PrefillTimes(NamedTuple):
    """Seconds of prefill."""

    queue: Waiting
    step: float
    compute: np.ndarray
    """From when a DP group is free, of equally likely requests."""


def steps_of(
    worker: PrefillWorker,
    calculator: Calculator,
    requests: Requests,
    experts: ExpertLoads | None = None,
) -> Steps:
    """Returns the seconds of a worker's steps with such prompts."""
    layout, chunk = worker.layout, worker.chunk
    hardware = worker.hardware, worker.hardware
    times = Rooflines(layout, calculator, calculator, hardware, experts)
    random = np.random.default_rng(0)

    def seconds(chunks: list[list[Chunk]]) -> float:
        """Seconds of a step with these chunks in the DP groups."""
        group = np.repeat(np.arange(len(chunks)), [len(one) for one in chunks])
        tokens, length = np.array([chunk for one in chunks for chunk in one]).T
        return colocated_seconds(times, rows_of(layout, group, tokens, length))

    alone = np.mean([seconds([[one]]) for one in typical_chunks(requests, chunk)])
    full = np.mean(
        [
            seconds([_packed(random, requests, chunk) for _ in range(layout.dp)])
            for _ in range(max(1, DRAWS // layout.dp))
        ]
    )
    return Steps(float(min(full, alone)), float(full))


def typical_chunks(requests: Requests, chunk: int) -> list[Chunk]:
    """Equally likely chunks of prompts that are computed one after the other."""
    counts = -(-requests.computed // chunk)
    which = np.repeat(np.arange(len(counts)), counts)
    begin = chunk * (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts))
    tokens = np.minimum(chunk, requests.computed[which] - begin)
    length = requests.found[which] + begin + tokens
    order = np.argsort(tokens * length, kind="stable")
    places = ((np.arange(DRAWS) + 0.5) * len(order) / DRAWS).astype(int)
    return [Chunk(int(tokens[place]), int(length[place])) for place in order[places]]


def _packed(random: np.random.Generator, requests: Requests, chunk: int) -> list[Chunk]:
    """A DP group's part of a step, into which prompts follow until it is full."""
    computed = requests.computed
    share = computed / computed.sum()
    chunks: list[Chunk] = []
    while (room := chunk - sum(one.tokens for one in chunks)) > 0:
        which = int(random.choice(len(computed), p=share))
        begin = int(random.integers(-(-computed[which] // chunk))) * chunk
        tokens = min(room, int(computed[which]) - begin)
        chunks.append(Chunk(tokens, int(requests.found[which]) + begin + tokens))
    return chunks


def prefill_times(
    worker: PrefillWorker, steps: Steps, requests: Requests, rate: float, workers: int
) -> PrefillTimes | None:
    """Returns how long requests take in `workers` workers; None: they are too few."""
    groups = workers * worker.layout.dp
    chunks = requests.computed / worker.chunk
    busy = steps.busy(rate * float(chunks.mean()) / groups)
    if not 0 <= busy < MOST_BUSY:
        return None
    step = steps.seconds(busy)
    queue = waiting(rate, chunks * step, groups)
    if queue is None:
        return None
    # Groups step together: who comes while others compute waits for the rest of their step, and
    # for the one that is enqueued.
    others = 1 - (1 - busy) ** worker.layout.dp
    compute = np.ceil(chunks) * step + others * 1.5 * step
    return PrefillTimes(queue, step, compute)


def capacity(worker: PrefillWorker, steps: Steps, requests: Requests) -> float:
    """Tokens of prompts a second of a worker that is always busy, found ones included."""
    share = float(requests.prompt.mean() / requests.computed.mean())
    return worker.layout.dp * worker.chunk / steps.full * share


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

    def tpot(self, sequences: float) -> float:
        """Seconds between a sequence's tokens, with `sequences` in the unit."""
        taken = sequences / (self.layout.dp * self.layout.lanes)
        slots, seconds = zip(*self.pace, strict=True)
        if taken <= slots[-1]:
            return float(np.interp(taken, slots, seconds))
        slope = (seconds[-1] - seconds[-2]) / max(slots[-1] - slots[-2], 1e-9)
        return seconds[-1] + slope * (taken - slots[-1])


class Pace:
    """Seconds between tokens of a layout.

    Args:
      searcher: knows what drafts cost, and has the calculator of both roles.
    """

    def __init__(
        self,
        searcher: Searcher,
        layout: Layout,
        hardware: tuple[Hardware, Hardware],
        experts: ExpertLoads | None = None,
    ):
        self._searcher, self._layout = searcher, layout
        calculator = searcher.calculator
        self._times = Rooflines(layout, calculator, calculator, hardware, experts)

    def seconds(self, requests: Requests, batch: int) -> float:
        """Seconds with `batch` sequences a DP group and lane."""
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
        # Draws differ; more sequences are never faster.
        rising = np.maximum.accumulate([seconds for _, seconds in found])
        return tuple((count, float(most)) for (count, _), most in zip(found, rising, strict=True))

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


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """The pages link.

    Attributes:
      token_bytes: of a token's entries in all layers.
      bytes_per_second: of the slower end, one worker.
      latency: seconds of a hand-off beside its bytes.
      page: tokens of a page; whole pages cross, without the prompt's last token.
    """

    token_bytes: float
    bytes_per_second: float
    latency: float
    page: int

    def seconds(self, prompt: np.ndarray) -> np.ndarray:
        """Seconds of prompts' hand-offs, without waiting."""
        tokens = (prompt - 1) // self.page * self.page
        moving = self.latency + tokens * self.token_bytes / self.bytes_per_second
        return np.where(tokens > 0, moving, 0.0)


class Fleet(NamedTuple):
    """The workers and units that are rented, without spares."""

    worker: PrefillWorker
    steps: Steps
    workers: int
    unit: DecodeUnit
    units: int


class Times(msgspec.Struct, frozen=True):
    """Seconds, of all requests."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: np.ndarray) -> "Times":
        """Returns the mean and percentiles of samples."""
        found = {
            name: float(samples.mean() if share is None else np.percentile(samples, share))
            for name, share in SHARES.items()
        }
        return cls(**found)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a fleet's requests, and how busy the fleet is.

    Attributes:
      ttft: seconds to the first token.
      ttft_asked: at the percentile that was asked for.
      tpot: seconds between tokens.
      parts: of TTFT: waiting for a prefill worker, its computing, waiting for and crossing the
        pages link, waiting for a slot and step.
      prefill_busy: share of the time, of a DP group.
      sequences: that decode at a time, on the mean.
      slots_busy: the part of all slots that they take.
      link_busy: share of the time, of a prefill worker's or a unit's end, whichever is busier.
      link_bytes: a second, all together.
    """

    ttft: Times
    ttft_asked: float
    tpot: Times
    tpot_asked: float
    parts: dict[str, Times]
    prefill_busy: float
    sequences: float
    slots_busy: float
    link_busy: float
    link_bytes: float


class Overloaded(NamedTuple):
    """Why a fleet cannot serve a demand, with numbers."""

    reason: str


class Decoding(NamedTuple):
    """The decode fleet under a load."""

    sequences: float
    tpot: float


def decoding(unit: DecodeUnit, units: int, requests: Requests, rate: float) -> Decoding | None:
    """Sequences that decode at a time, and their pace; None: they are more than the slots."""
    arriving = rate * float(requests.output.mean())
    tpot = unit.tpot(0.0)
    for _ in range(200):
        sequences = arriving * tpot
        if sequences > 4 * units * unit.sequences:
            return None
        found = unit.tpot(sequences / units)
        if abs(found - tpot) < 1e-6 * tpot:
            break
        tpot = (tpot + found) / 2
    sequences = arriving * tpot
    return Decoding(sequences, tpot) if sequences <= units * unit.sequences else None


def occupied(sequences: float, percent: float) -> float:
    """Sequences that are there at a moment, at a percentile; their number is Poisson's."""
    return sequences + NormalDist().inv_cdf(percent / 100) * sequences**0.5


def after_prefill(
    unit: DecodeUnit, units: int, workers: int, link: Handoff, requests: Requests, rate: float
) -> tuple[Decoding, dict[str, np.ndarray], float] | Overloaded:
    """(decoding, seconds by part of every request, share of the link's time)."""
    decode = decoding(unit, units, requests, rate)
    if decode is None:
        return Overloaded(f"{units} x {unit.sequences} slots do not hold the running sequences")
    crossing = link.seconds(requests.prompt)
    found = [waiting(rate / count, crossing, 1) for count in (workers, units)]
    ends = [end for end in found if end is not None]
    if len(ends) < len(found):
        need = rate * float(crossing.mean())
        return Overloaded(f"the pages link: {need:.1f} ends' time for {min(workers, units)}")
    slots = waiting(rate, requests.output * decode.tpot, units * unit.sequences)
    if slots is None:
        return Overloaded(f"{units} x {unit.sequences} slots are always taken")
    random = np.random.default_rng(2)
    for end in ends:
        crossing = crossing + end.draw(random, SAMPLE)
    step = unit.tpot(decode.sequences / units) * unit.tokens_a_step
    # The rest of a lane's step, the one that is enqueued, and its own.
    begins = (random.random(SAMPLE) / unit.layout.lanes + 2) * step
    parts = {"pages": crossing, "decode": slots.draw(random, SAMPLE) + begins}
    return decode, parts, max(end.busy for end in ends)


def predict(
    fleet: Fleet,
    link: Handoff,
    requests: Requests,
    rate: float,
    percents: tuple[float, float] = (95.0, 95.0),
) -> Prediction | Overloaded:
    """Returns what requests at `rate` a second get.

    Args:
      percents: percentiles of TTFT and TPOT that were asked for.
    """
    unit, units = fleet.unit, fleet.units
    after = after_prefill(unit, units, fleet.workers, link, requests, rate)
    if isinstance(after, Overloaded):
        return after
    decode, parts, link_busy = after
    prefill = prefill_times(fleet.worker, fleet.steps, requests, rate, fleet.workers)
    if prefill is None:
        return Overloaded(f"{fleet.workers} prefill workers are too few")
    waited = prefill.queue.draw(np.random.default_rng(1), SAMPLE)
    parts = {"wait for prefill": waited, "prefill": prefill.compute, **parts}
    ttft = sum(parts.values(), np.zeros(SAMPLE))

    def tpot(percent: float) -> float:
        return unit.tpot(max(0.0, occupied(decode.sequences, percent)) / units)

    pace = {name: tpot(share) if share else decode.tpot for name, share in SHARES.items()}
    tokens = float(((requests.prompt - 1) // link.page * link.page).mean())
    return Prediction(
        ttft=Times.of(ttft),
        ttft_asked=float(np.percentile(ttft, percents[0])),
        tpot=Times(**pace),
        tpot_asked=tpot(percents[1]),
        parts={name: Times.of(samples) for name, samples in parts.items()},
        prefill_busy=prefill.queue.busy,
        sequences=decode.sequences,
        slots_busy=decode.sequences / (units * unit.sequences),
        link_busy=link_busy,
        link_bytes=rate * tokens * link.token_bytes,
    )


def workers_for(
    worker: PrefillWorker,
    steps: Steps,
    rest: np.ndarray,
    requests: Requests,
    rate: float,
    target: Level,
) -> int | None:
    """The fewest prefill workers that meet a TTFT; None: no number of them does.

    Args:
      rest: seconds of every request after its prefill.
    """

    def meets(workers: int) -> bool:
        times = prefill_times(worker, steps, requests, rate, workers)
        if times is None:
            return False
        waited = times.queue.draw(np.random.default_rng(1), SAMPLE)
        ttft = np.percentile(waited + times.compute + rest, target.percent)
        return float(ttft) <= target.seconds

    return _fewest(meets)


def units_for(unit: DecodeUnit, requests: Requests, rate: float, target: Level) -> int | None:
    """Returns the fewest units whose sequences are paced within the target, and have slots in all
    but one moment of a thousand; None: no number of them does."""

    def meets(units: int) -> bool:
        found = decoding(unit, units, requests, rate)
        if found is None or occupied(found.sequences, 99.9) > units * unit.sequences:
            return False
        return unit.tpot(occupied(found.sequences, target.percent) / units) <= target.seconds

    return _fewest(meets)


def _fewest(meets: Callable[[int], bool]) -> int | None:
    """The least number that meets something which all larger ones meet, too; None: none up to
    65,536 does."""
    high = 1
    while not meets(high):
        high *= 2
        if high > 2**16:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
