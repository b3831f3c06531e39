"""Results of a storm, by kind of fault and roles, and their limits.

Used by `storm.py` and `__main__.py`. Pure: turns records and times into measures.
"""

import itertools
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from jaxserve.bench.report import Measure, Part, percentile
from jaxserve.chaos.load import Record
from jaxserve.chaos.resources import ProcessLife, held

NOTICE_SECONDS, BACK_SECONDS, P99_RATIO = 2.0, 10.0, 2.0
TOGETHER_BACK_SECONDS, TOGETHER_READY_SECONDS = 15.0, 30.0
"""Limits of faults of several processes: clients' longest wait; time until all are ready again."""
NOTICED = frozenset({"kill", "stop", "drop"})
"""Kinds of faults that another process has to notice; the others only have to be survived."""
RECONNECT_SECONDS = 5.0
"""How long a gRPC channel repeats its last error although a server listens again: until its next
attempt, which takes long on a machine that is busy with starts."""
FEW = 100
"""Fewest gaps for which a p99 is computed."""
MOMENTS = 10
"""Moments of each time without faults at which delays of tokens are looked at."""


class Event(msgspec.Struct, kw_only=True):
    """A fault that happened. Times are seconds of `time.perf_counter`.

    Attributes:
      kind, seconds, how, size: as in `schedule.Fault`.
      roles: roles of the victims.
      name: names of the victims.
      at: when it began.
      until: when everything was ready again.
      noticed: seconds until another process reported it; None: none did.
      by: the log line that reported it, or /health.
      touched: numbers of the requests that lost their worker, according to the router.
    """

    kind: str
    roles: tuple[str, ...]
    seconds: float
    how: str
    size: float
    name: str
    at: float
    until: float = 0.0
    noticed: float | None = None
    by: str = ""
    touched: list[int] = []

    @property
    def closes_streams(self) -> bool:
        """True if the fault killed a process that clients were connected to."""
        return self.kind == "kill" and not {"router", "face"}.isdisjoint(self.roles)

    @property
    def to_be_noticed(self) -> bool:
        """True if another process has to notice the fault. A pause below the limit need not be
        seen, only a service manager sees a router or a face, and only a fetch uses a pages link."""
        if self.kind == "kill":
            return True
        seen = {"router", "face", "pages"}.isdisjoint(self.roles)
        return seen and self.kind in NOTICED and self.seconds > NOTICE_SECONDS


class Found(msgspec.Struct, kw_only=True):
    """Findings of a storm.

    Attributes:
      events: faults, in their order.
      records: requests.
      calm: begin and end of the undisturbed time at the beginning.
      before, after: resources of processes without load, before the first fault and after the last.
      lives: resources of processes in between.
      loads: load averages of the machine.
      left: counts that the deployment still reports after the last request has ended; empty: none.
      late: processes that did not come back, or ended early, in words.
      resets: resets of all prefix caches.
      handed: tokens whose pages prefill workers have handed over; None: not asked for.
      stored: KV pages that the workers of the end have found in `cache.storage` alone.
    """

    events: list[Event]
    records: list[Record]
    calm: tuple[float, float]
    before: list[ProcessLife] = []
    after: list[ProcessLife] = []
    lives: list[ProcessLife] = []
    loads: list[float] = []
    left: str = ""
    late: list[str] = []
    resets: int = 0
    handed: int | None = None
    stored: int = 0


def back(event: Event, until: float, records: Sequence[Record]) -> float:
    """Returns the longest wait for a token, in seconds, of any request between the fault and the
    next one. Only the part of a wait within that time counts. 0: no request waited."""
    longest = 0.0
    for record in records:
        if record.finish < event.at or record.wanted > until or record.end == "cancelled":
            continue
        for begin, end in waits(record):
            if end > event.at and begin < until:
                longest = max(longest, min(end, until) - max(begin, event.at))
    return longest


def waits(record: Record) -> Iterator[tuple[float, float]]:
    """Yields the begin and the end of each wait of a request: for its first token, for the next."""
    return itertools.pairwise([record.wanted, *record.arrivals])


def silence(event: Event, until: float, records: Sequence[Record]) -> float:
    """Returns the longest time without a token of any request, in seconds, from the fault until
    everything was ready again or the next fault came, and the first token after that."""
    arrivals = sorted(at for record in records for at in record.arrivals if event.at < at < until)
    near = [event.at, *itertools.takewhile(lambda at: at < event.until, arrivals)]
    near += arrivals[len(near) - 1 : len(near)]
    steps = [later - earlier for earlier, later in itertools.pairwise(near)]
    return max(steps, default=float("inf"))


def gaps(
    records: Sequence[Record], begin: float, end: float, without: Collection[int] = ()
) -> list[float]:
    """Returns the seconds between tokens from `begin` to `end`. Leaves out the requests named in
    `without` and those whose connection was cut."""
    return [
        later - earlier
        for record in records
        if record.start < end
        and record.finish > begin
        and record.number not in without
        and not (record.resumed or record.end in ("absent", "cut"))
        for earlier, later in itertools.pairwise(record.arrivals)
        if begin < later < end
    ]


def between(begin: float, seconds: float, records: Sequence[Record]) -> float:
    """Returns the longest time between two tokens of a request, in seconds, of those that were
    awaited at some moment of this time: from a fault until it was noticed, say."""
    end = begin + seconds
    near = (one for one in records if one.start < end and one.finish > begin)
    pairs = [pair for record in near for pair in itertools.pairwise(record.arrivals)]
    own = (later - earlier for earlier, later in pairs if earlier < end and later > begin)
    return max(own, default=0.0)


def quiet_times(found: Found) -> list[tuple[float, float]]:
    """Returns begin and end of the calm beginning and of the pauses before faults."""
    pauses = [(event.until, later.at) for event, later in itertools.pairwise(found.events)]
    return [found.calm, *pauses]


def undisturbed(found: Found) -> list[float]:
    """Returns the seconds between tokens in times without faults."""
    return [gap for begin, end in quiet_times(found) for gap in gaps(found.records, begin, end)]


def _p99(found: Sequence[float]) -> float | None:
    return percentile(found, 99) if len(found) >= FEW else None


def trouble(record: Record) -> float:
    """Returns when trouble began for a request that did not end well."""
    if record.end in ("hung", ""):
        return max([record.start, *record.arrivals]) + 1.0  # the fault came after its last token
    return record.finish


def lost(record: Record, events: Sequence[Event]) -> bool:
    """Tells whether a request got neither an answer nor an error that says why. A request whose
    own connection ended in a killed process is not lost."""
    if record.end not in ("absent", "cut"):
        return False
    return not any(
        event.closes_streams
        and record.start <= event.until + RECONNECT_SECONDS
        and record.finish >= event.at
        for event in events
    )


def parts(found: Found) -> list[Part]:
    """Returns a part for each kind and group of roles, one for all requests, one for resources."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, event in enumerate(found.events):
        groups.setdefault((event.kind, event.roles), []).append(number)
    calm = undisturbed(found)
    result = [
        _part(found, kind, roles, numbers, calm)
        for (kind, roles), numbers in sorted(groups.items())
    ]
    result.append(_everything(found, calm))
    if found.before:
        result.append(held(found.before, found.after, found.lives))
    return result


def _part(
    found: Found, kind: str, roles: Sequence[str], numbers: Sequence[int], calm: Sequence[float]
) -> Part:
    events, together = found.events, len(roles) > 1
    ends = [*(event.at for event in events[1:]), float("inf")]
    own = [(events[n], ends[n]) for n in numbers]
    backs = [back(event, end, found.records) for event, end in own]
    quiet = [silence(event, end, found.records) for event, end in own]
    whole = [event.until - event.at - event.seconds for event, _ in own]
    seen = [event for event, _ in own if event.to_be_noticed]
    noticed = [float("inf") if event.noticed is None else event.noticed for event in seen]
    measures = [Measure("faults", len(own))]
    if noticed:
        measures += [
            Measure("noticed, median", statistics.median(noticed), "s"),
            Measure("noticed, longest", max(noticed), "s", NOTICE_SECONDS),
        ]
    measures += [
        Measure("longest wait for a token, median", statistics.median(backs), "s"),
        Measure(
            "longest wait for a token, longest",
            max(backs),
            "s",
            TOGETHER_BACK_SECONDS if together else BACK_SECONDS,
        ),
        Measure("no token of any request, median", statistics.median(quiet), "s"),
        Measure("no token of any request, longest", max(quiet), "s"),
        Measure(
            "all processes ready again, longest",
            max(whole),
            "s",
            TOGETHER_READY_SECONDS if together else None,
        ),
    ]
    others = [
        gap
        for event, _ in own
        if event.to_be_noticed or kind not in NOTICED
        for gap in gaps(found.records, event.at, event.until, set(event.touched))
    ]
    during, usual = _p99(others), _p99(calm)
    if usual:
        iteration = statistics.median(calm)
        faults = [(event.at, event.noticed or 0.0) for event, _ in own]
        # A long wait is as likely to be under way at them, and as many tokens are awaited.
        seconds = statistics.median(until for _, until in faults)
        still = [
            (begin + number * (end - begin) / MOMENTS, seconds)
            for begin, end in quiet_times(found)
            for number in range(MOMENTS)
        ]
        for when, moments in (("the fault", faults), ("moments without one", still)):
            delays = [max(0.0, between(*one, found.records) / iteration - 1) for one in moments]
            title = f"longest delay of a token at {when}, in iterations"
            measures.append(Measure(f"{title}: median", statistics.median(delays), "x"))
            measures.append(Measure(f"{title}: most", max(delays), "x"))
    if during is not None and usual:
        limit = P99_RATIO if has_others(kind, roles) else None
        title = "p99 between tokens of other requests ÷ undisturbed"
        measures.append(Measure(title, during / usual, "x", limit))
    for name, bad in _bad(found).items():
        here = sum(any(event.at <= trouble(one) < end for event, end in own) for one in bad)
        measures.append(Measure(name, here, "", 0))
    words: dict[str, int] = {}
    for event in seen:
        words[event.by or "nobody"] = words.get(event.by or "nobody", 0) + 1
    notes = [f"noticed by: {by} ({count})" for by, count in sorted(words.items())[:4]]
    victims = "+".join(roles)
    details = {"back": backs, "quiet": quiet, "ready": whole}
    return Part(f"{kind} {victims}", f"{kind}, {victims}", measures, notes, details)


def has_others(kind: str, roles: Sequence[str]) -> bool:
    """Tells whether some requests must go on as before the fault. All requests need the router and
    the ffn worker, and the loss of several processes slows all requests."""
    if kind in NOTICED:
        return len(roles) == 1 and roles[0] not in ("router", "ffn")
    return kind == "disk"


def _bad(found: Found) -> dict[str, list[Record]]:
    """Returns the requests that count as failures, by name of the measure."""
    ends = {"wrong": ("wrong",), "hung": ("hung", ""), "failed, with a reason": ("failed",)}
    bad = {name: [r for r in found.records if r.end in of] for name, of in ends.items()}
    bad["lost without a word"] = [record for record in found.records if lost(record, found.events)]
    return bad


def _everything(found: Found, calm: Sequence[float]) -> Part:
    ends = [record.end for record in found.records]
    bad = _bad(found)
    measures = [
        Measure("requests", len(ends)),
        Measure("right", ends.count("right")),
        Measure("cancelled by the client", ends.count("cancelled")),
        *(Measure(name, len(records), "", 0) for name, records in bad.items()),
        Measure("refused, with a reason, and sent again", ends.count("refused")),
        Measure("cut with the process they came through, and sent again", ends.count("cut")),
        Measure("came back with their key", sum(r.resumed > 0 for r in found.records)),
        Measure("attempts while nobody listened", ends.count("absent")),
        Measure("processes that did not come back", len(found.late), "", 0),
        Measure("kinds of state left at the end", len(found.left.split()), "", 0),
    ]
    if usual := _p99(calm):
        iteration, title = statistics.median(calm), "from token to token, undisturbed"
        measures.append(Measure(f"{title}: median (an iteration)", iteration, "s"))
        measures.append(Measure(f"{title}: p99, in iterations", usual / iteration, "x"))
        measures.append(Measure(f"{title}: longest, in iterations", max(calm) / iteration, "x"))
    if found.handed is not None:
        measures.append(Measure("resets of the prefix caches", found.resets))
        measures.append(Measure("tokens handed over by prefill workers", found.handed))
    if found.stored:
        measures.append(Measure("KV pages found in the folder at the end", found.stored))
    if found.loads:
        measures.append(Measure("load of the machine, median", statistics.median(found.loads)))
        measures.append(Measure("load of the machine, most", max(found.loads)))
    worst = [record for records in bad.values() for record in records]
    notes = [f"request {r.number} over {r.face}: {r.end}: {r.why[:300]}" for r in worst[:5]]
    notes += [f"left: {found.left}"] if found.left else []
    notes += [f"late: {line}" for line in found.late]
    return Part("all", "all requests", measures, notes, _details(found))


def _details(found: Found) -> dict[str, Any]:
    names = ("events", "before", "after", "lives", "loads")
    return {name: msgspec.to_builtins(getattr(found, name)) for name in names}
