"""Results of a storm, by kind of fault and role, and their limits.

Used by `storm.py` and `__main__.py`. Pure: takes records and times, gives measures.
"""

import itertools
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from jaxserve.bench.report import Measure, Part
from jaxserve.chaos.load import Record
from jaxserve.chaos.resources import Life, held

NOTICE_SECONDS, BACK_SECONDS, P99_RATIO = 2.0, 10.0, 2.0
NOTICED = frozenset({"kill", "stop", "drop"})
"""Kinds of faults that another process has to notice; the others only have to be borne."""
RECONNECT_SECONDS = 5.0
"""How long a gRPC channel repeats its last error although a server listens again: until its next
attempt, which takes long on a machine that is busy with starts."""
FEW = 100
"""The fewest gaps that have a p99."""


class Event(msgspec.Struct, kw_only=True):
    """A fault that happened. Times are seconds of `time.perf_counter`.

    Attributes:
      kind, role, victim, seconds, how, size: as in `schedule.Fault`.
      name: name of the process.
      at: when it began.
      until: when everything was ready again.
      noticed: seconds until another process reported it; None: none did.
      by: the log line that reported it, or /health.
      touched: numbers of the requests that lost their worker, according to the router.
    """

    kind: str
    role: str
    victim: int
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
        """Whether it took along what clients were connected to."""
        return self.kind == "kill" and self.role in ("router", "face")

    @property
    def to_be_noticed(self) -> bool:
        """Whether another process has to notice it. A pause below the limit need not be seen,
        only a service manager sees a router or a face, and only a fetch uses a pages link."""
        if self.role == "pages":
            return False
        if self.role in ("router", "face"):
            return self.kind == "kill"
        return self.kind in NOTICED and (self.kind == "kill" or self.seconds > NOTICE_SECONDS)


class Found(msgspec.Struct, kw_only=True):
    """Everything that a storm has found out.

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
    """

    events: list[Event]
    records: list[Record]
    calm: tuple[float, float]
    before: list[Life] = []
    after: list[Life] = []
    lives: list[Life] = []
    loads: list[float] = []
    left: str = ""
    late: list[str] = []
    resets: int = 0
    handed: int | None = None


def back(event: Event, until: float, records: Sequence[Record]) -> float:
    """Seconds of the longest wait for a token, of any request, that was going on at or began after
    the fault, counted from it, up to the next fault; 0: nobody asked."""
    longest = 0.0
    for record in records:
        if record.finish < event.at or record.wanted > until or record.end == "cancelled":
            continue
        for begin, end in waits(record):
            if end > event.at and begin < until:
                longest = max(longest, min(end, until) - max(begin, event.at))
    return longest


def waits(record: Record) -> Iterator[tuple[float, float]]:
    """From event to event of a request: the wish for it, its tokens."""
    return itertools.pairwise([record.wanted, *record.arrivals])


def gaps(
    records: Sequence[Record], begin: float, end: float, without: Collection[int] = ()
) -> list[float]:
    """Seconds between tokens in that time, of all requests but some and those that were cut."""
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


def undisturbed(found: Found) -> list[float]:
    """Seconds between tokens while nothing was wrong: at the beginning, and before each fault."""
    pauses = [(event.until, later.at) for event, later in itertools.pairwise(found.events)]
    return [gap for begin, end in [found.calm, *pauses] for gap in gaps(found.records, begin, end)]


def _p99(found: Sequence[float]) -> float | None:
    return statistics.quantiles(found, n=100)[98] if len(found) >= FEW else None


def trouble(record: Record) -> float:
    """When a request that did not end well met what it met."""
    if record.end in ("hung", ""):
        return max([record.start, *record.arrivals]) + 1.0  # a fault breaks off what goes on
    return record.finish


def lost(record: Record, events: Sequence[Event]) -> bool:
    """Whether a request got neither an answer nor an error that says why, and not because its own
    connection ended in a process that was killed."""
    if record.end not in ("absent", "cut"):
        return False
    return not any(
        event.closes_streams
        and record.start <= event.until + RECONNECT_SECONDS
        and record.finish >= event.at
        for event in events
    )


def parts(found: Found) -> list[Part]:
    """A part for all faults of a kind and a role, one for everything, one for what is held."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, event in enumerate(found.events):
        groups.setdefault((event.kind, event.role), []).append(number)
    calm = _p99(undisturbed(found))
    result = [
        _part(found, kind, role, numbers, calm) for (kind, role), numbers in sorted(groups.items())
    ]
    result.append(_everything(found))
    if found.before:
        result.append(held(found.before, found.after, found.lives))
    return result


def _part(found: Found, kind: str, role: str, numbers: Sequence[int], calm: float | None) -> Part:
    events = found.events
    ends = [*(event.at for event in events[1:]), float("inf")]
    own = [(events[n], ends[n]) for n in numbers]
    backs = [back(event, end, found.records) for event, end in own]
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
        Measure("longest wait for a token, longest", max(backs), "s", BACK_SECONDS),
        Measure("all processes ready again, longest", max(whole), "s"),
    ]
    others = [
        gap
        for event, _ in own
        if event.to_be_noticed or kind not in NOTICED
        for gap in gaps(found.records, event.at, event.until, set(event.touched))
    ]
    during = _p99(others)
    if during is not None and calm:
        limit = P99_RATIO if has_others(kind, role) else None
        title = "p99 between tokens of other requests ÷ undisturbed"
        measures.append(Measure(title, during / calm, "x", limit))
    for name, bad in _bad(found).items():
        here = sum(any(event.at <= trouble(one) < end for event, end in own) for one in bad)
        measures.append(Measure(name, here, "", 0))
    words: dict[str, int] = {}
    for event in seen:
        words[event.by or "nobody"] = words.get(event.by or "nobody", 0) + 1
    notes = [f"noticed by: {by} ({count})" for by, count in sorted(words.items())[:4]]
    return Part(f"{kind} {role}", f"{kind}, {role}", measures, notes, {"back": backs})


def has_others(kind: str, role: str) -> bool:
    """Whether there are requests that such a fault must not touch, and that are told apart."""
    if kind in NOTICED:
        return role not in ("router", "ffn")  # all requests need them
    return kind in ("disk", "clock")


def _bad(found: Found) -> dict[str, list[Record]]:
    """Requests of which there must be none."""
    ends = {"wrong": ("wrong",), "hung": ("hung", ""), "failed, with a reason": ("failed",)}
    bad = {name: [r for r in found.records if r.end in of] for name, of in ends.items()}
    bad["lost without a word"] = [record for record in found.records if lost(record, found.events)]
    return bad


def _everything(found: Found) -> Part:
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
    if found.handed is not None:
        measures.append(Measure("resets of the prefix caches", found.resets))
        measures.append(Measure("tokens handed over by prefill workers", found.handed))
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
