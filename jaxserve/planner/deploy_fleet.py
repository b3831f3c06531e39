"""A fleet of prefill workers and decode units, and what its requests wait for.

Called by `deploy.py`. A request waits for a DP group of a prefill worker, is computed in chunks,
waits for the pages link, crosses it, waits for a slot of a unit, and gets its first token from the
second step that begins after that: a lane's next step is enqueued before the last one's result is
there. By Little's law as many sequences decode at a time as requests come a second, times the
seconds that one of them decodes.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.planner.deploy_decode import DecodeUnit
from jaxserve.planner.deploy_demand import SAMPLE, Requests
from jaxserve.planner.deploy_prefill import PrefillWorker, Steps, prefill_times
from jaxserve.planner.deploy_queue import waiting

SHARES = {"mean": None, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
"""What is told of a distribution."""


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
        """Of prompts of so many tokens, without waiting."""
        tokens = (prompt - 1) // self.page * self.page
        moving = self.latency + tokens * self.token_bytes / self.bytes_per_second
        return np.where(tokens > 0, moving, 0.0)


class Fleet(NamedTuple):
    """What is rented, without spares."""

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
        """Of requests alike in weight."""
        found = {
            name: float(samples.mean() if share is None else np.percentile(samples, share))
            for name, share in SHARES.items()
        }
        return cls(**found)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of a fleet get.

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
    """Why a fleet cannot do it: what is short, and how much of it there would have to be."""

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
    """What requests at so many a second get.

    Args:
      percents: of TTFT and of TPOT, that were asked for.
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
    percent: float,
    seconds: float,
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
        return float(np.percentile(waited + times.compute + rest, percent)) <= seconds

    return _fewest(meets)


def units_for(
    unit: DecodeUnit, requests: Requests, rate: float, percent: float, tpot: float
) -> int | None:
    """The fewest units whose sequences are paced by `tpot` at a percentile, and have slots in all
    but one moment of a thousand; None: no number of them does."""

    def meets(units: int) -> bool:
        found = decoding(unit, units, requests, rate)
        if found is None or occupied(found.sequences, 99.9) > units * unit.sequences:
            return False
        return unit.tpot(occupied(found.sequences, percent) / units) <= tpot

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
