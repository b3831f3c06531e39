"""`plan verify`: predicted against measured stages, of a timeline or of a running fleet.

With `--every` it is a process beside the fleet, which asks a server or a router for measured steps
again and again and serves what it finds at `/metrics`; `launch/prometheus-rules.yaml` has an alarm.

With `--act` it also has the routers' workers change their role (`fleet.rebalance_roles`), one at a
time, after as many checks as an advice takes, and never against `fleet.ttft_seconds`. It asks the
first router for the fleet's workers, and tells every router how many domains the fleet should have
(`POST /roles/domains`, `fleet/stand_ins.py`). It acts only while all workers are ready, so one
change is over before the next begins. The cheapest number of domains gives way to
`fleet.ttft_seconds`: while first tokens are late and domains have room, prompts get a worker.
"""

import argparse
import contextlib
import functools
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError
from jaxserve.observe.spans import Span
from jaxserve.planner.balance import Advice, Balance, RoleLoad, advice, next_workers
from jaxserve.planner.comparison import Compared, balance, compare, deployed, summary, title
from jaxserve.planner.measurements import (
    Measurement,
    Observed,
    ask,
    observe,
    read_measurements,
    read_spans,
    watched_spans,
)
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.view import Report, reported, show

RECENT = 15
"""Checks whose median is the advice for a running fleet."""
LATE = 0.05
"""Part of the requests whose first tokens may come later than `fleet.ttft_seconds`."""
CALM = 0.8
"""Part of the requests at which first tokens were late, below which prompts need fewer workers."""
FIRST_TOKENS = "jaxserve:time_to_first_token_seconds"
"""The routers' histogram of the seconds from a request's submission to its first token."""


class _First(NamedTuple):
    """First tokens since the routers' start."""

    all: float
    late: float


class _Worker(msgspec.Struct):
    """The part of a `WorkerStatus` that is used here."""

    role: str
    status: str
    routed: int
    others: int


class _Roles(msgspec.Struct):
    workers: list[_Worker]


class RoleBalancer:
    """The attention workers that a running fleet has, and should have. Routers are addresses of
    admin ports, as http://host:8002; without any the fleet is taken to be as its deployment says,
    and nothing is changed."""

    def __init__(self, routers: Sequence[str], deployment: Deployment):
        self._routers, self._planned = routers, deployment.domains
        parts = {role: deployment_of(deployment, role) for role in ("domain", "prefill")}
        self._slots = {
            role: one.runtime_domains * one.attention.dp * one.lanes * one.scheduler.slots
            for role, one in parts.items()
        }
        self._recent = deque[Advice](maxlen=RECENT)
        self._wanted = 0
        self._target = deployment.fleet.ttft_seconds
        self._firsts = deque[_First](maxlen=RECENT)
        self._late_at: tuple[int, float] | None = None
        """Domains beside which first tokens were late, and the requests of that time."""

    @property
    def text(self) -> str:
        """Says what first tokens allow; empty: anything."""
        if self._late_at is None:
            return ""
        return f"first tokens are later than {self._target:g} s (domains: {self._late_at[0]})"

    def settled(self, advised: Callable[[int, float], Advice]) -> Advice:
        """Returns the median of the latest advices, and has the routers act on it; `advised` as
        `Checked.advice`, for the present check. Raises ConfigError if a router does not answer, or
        refuses (`fleet.rebalance_roles`)."""
        workers = _call(self._routers[0]).workers if self._routers else []
        domains, prefills = (self._requests(workers, role) for role in ("domain", "prefill"))
        one = advised(domains.workers if workers else self._planned, 1.0)
        if any(worker.status != "ready" for worker in workers):
            self._recent.clear()
        if self._recent and self._recent[-1].workers != one.workers:
            self._recent.clear()
        if not self._recent:
            self._firsts.clear()
        self._recent.append(one)
        if self._target and workers:
            each = (_first_tokens(router, self._target) for router in self._routers)
            self._firsts.append(_First(*map(sum, zip(*each, strict=True))))
        found = Advice.settled(self._recent)
        if workers and len(self._recent) == RECENT:
            wanted = self._in_time(next_workers(found, advised, domains, prefills), domains)
            self._wanted = wanted if wanted != found.workers else self._wanted
        for router in self._routers if self._wanted else ():
            _call(router, self._wanted)
        return found

    def _in_time(self, wanted: int, domains: RoleLoad) -> int:
        """Returns how many domains to have next, so that first tokens come in time.

        First tokens that are late while domains have room wait for prefill workers: a domain
        becomes one, if the others have room for its requests, or none is taken away at least. It
        stays so until fewer requests come, or it would be asked back at once.
        """
        if not self._target:
            return wanted
        requests, late = np.subtract(self._firsts[-1], self._firsts[0]).tolist()
        beside, before = self._late_at or (0, 0.0)
        if late > LATE * requests and domains.fits(0):
            if beside != domains.workers:
                self._late_at = beside, before = domains.workers, requests
        elif requests < CALM * before:
            self._late_at = None
        if self._late_at is None:
            return wanted
        return min(wanted, max(beside - 1, domains.workers - domains.fits(-1)))

    def _requests(self, workers: Sequence[_Worker], role: str) -> RoleLoad:
        own = [worker for worker in workers if worker.role == role]
        held = sum(each.routed + each.others for each in own)
        return RoleLoad(len(own), held, self._slots[role])


def _call(router: str, domains: int | None = None) -> _Roles:
    """Asks a router for its workers, or for a number of domains, too; raises as `ask`."""
    path, body = "/roles", None
    if domains is not None:
        path, body = "/roles/domains", msgspec.json.encode({"domains": domains})
    try:
        return msgspec.json.decode(ask("--act", router, path, body), type=_Roles)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--act {router}: {error}") from None


def _first_tokens(router: str, target: float) -> _First:
    """Returns the first tokens of a router's requests, and how many took longer than a time, in
    seconds, within whose bucket they are taken to be spread evenly; raises as `ask`."""
    text = ask("--act", router, "/metrics").decode()
    below: dict[float, float] = {0.0: 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == FIRST_TOKENS else ():
            if "le" in sample.labels:
                bound = float(sample.labels["le"])
                below[bound] = below.get(bound, 0.0) + sample.value
    bounds = sorted(below)
    every = below[bounds.pop()]
    return _First(every, every - float(np.interp(target, bounds, [below[one] for one in bounds])))


LEAST_SECONDS = 1.0
"""Shortest time from one check to the next."""


class Checked(NamedTuple):
    """A deployment's trace beside its plan: the comparison, the deployment, and the measured steps
    with most sequences, on which the advice rests."""

    found: list[Compared]
    made: Scenario
    most: Observed

    @property
    def roles(self) -> Balance:
        return balance(self.made, self.most)[0]

    def advice(self, workers: int, share: float = 1.0) -> Advice:
        """Returns the advised number of attention workers, of which there are `workers`, each with
        a share of the measured load. The trace must have the ffn role's stages."""
        times, moving = balance(self.made, self.most, share)
        layout, roles = self.made.layout, self.made.roles
        prices = (
            layout.attention_devices * roles.attention.price,
            layout.ffn_devices * roles.ffn.price,
        )
        return advice(workers, self.made.deployment.lanes, times, moving, prices)

    @property
    def stages(self) -> dict[str, Compared]:
        """Stages by name, with their mean over the spans of all loads."""
        found: dict[str, Compared] = {}
        for one in self.found:
            have = found.get(one.name, one._replace(spans=0))
            spans = have.spans + one.spans
            measured = (have.spans * have.measured + one.spans * one.measured) / spans
            predicted = (have.spans * have.predicted + one.spans * one.predicted) / spans
            found[one.name] = have._replace(spans=spans, measured=measured, predicted=predicted)
        return found


def check(made: Scenario, spans: Sequence[Span], known: Sequence[Measurement]) -> Checked:
    """Compares a trace with the plan, whose calibration was made from `known`; raises ConfigError
    if it is of another deployment."""
    seen = observe(spans, made.attention.model.order)
    return Checked(compare(made, seen, known), made, seen[-1])


def run(options: argparse.Namespace) -> int:
    """Compares predictions with measurements, stage by stage and load by load; returns 1 if those
    of a running fleet part by more than `PARTED`."""
    if bool(options.timeline) == bool(options.url):
        raise ConfigError(
            "expected either --timeline, a folder that serve --timeline wrote, or --url of a server"
        )
    made = deployed(options)
    known = read_measurements(options.calibration) if options.calibration else []
    if options.every:
        return _watch(options, made, known)
    spans = watched_spans(options.url) if options.url else read_spans(options.timeline)
    checked = check(made, spans, known)
    show(options, _report(checked))
    parted = [one for one in checked.found if one.parted] if options.url else []
    for one in parted:
        took, planned = one.measured * 1e6, one.predicted * 1e6
        told = f"{title(made, one)} takes {took:.0f} µs, planned {planned:.0f}"
        print(f"ALARM: {told}", file=sys.stderr)
    return 1 if parted else 0


def _report(checked: Checked) -> Report:
    found, made = checked.found, checked.made
    told = summary(found)
    if checked.roles.ffn:
        if made.deployment.domains == 1:
            prices = made.roles.attention.price, made.roles.ffn.price
            told.append(checked.roles.text(made.layout, prices))
        told.append(checked.advice(made.deployment.domains).text)
    said = {"found": found, "named": functools.partial(title, made), "summary": told}
    return reported("verify", "Predicted against measured", **said)


GAUGES = {
    "measured_seconds": ("Measured mean of a stage.", "stage"),
    "predicted_seconds": ("Predicted mean of a stage for the same loads.", "stage"),
    "error": ("(predicted - measured) / measured of a stage.", "stage"),
    "attention_workers": ("Attention workers of the ffn role: there, advised.", "of"),
}
"""Metrics by name, behind `jaxserve:plan_`, with what they say and their label."""


class Gauges:
    """The metrics of the last check. If the fleet did not answer, no stage has a sample, so that no
    alarm stays up for old figures."""

    def __init__(self) -> None:
        self.registry = into = CollectorRegistry()
        prefix = "jaxserve:plan_"
        self._gauges = {
            name: Gauge(prefix + name, text, [label], registry=into)
            for name, (text, label) in GAUGES.items()
        }
        self._at = Gauge(
            f"{prefix}checked_timestamp_seconds", "The last comparison.", registry=into
        )
        self._failed = Counter(f"{prefix}checks_failed", "Without an answer.", registry=into)

    def set(self, checked: Checked | None, advised: Advice | None = None) -> None:
        """Takes a comparison with its advice; None: the fleet did not answer."""
        for gauge in self._gauges.values():
            gauge.clear()
        if checked is None:
            self._failed.inc()
            return
        for stage, one in checked.stages.items():
            found = {"measured_seconds": one.measured, "predicted_seconds": one.predicted}
            for name, value in (found | {"error": one.error}).items():
                self._gauges[name].labels(stage).set(value)
        if advised is not None:
            for which, count in (("there", advised.workers), ("advised", advised.advised)):
                self._gauges["attention_workers"].labels(which).set(count)
        self._at.set_to_current_time()


def _watch(options: argparse.Namespace, made: Scenario, known: Sequence[Measurement]) -> int:
    """Checks until SIGINT or SIGTERM; returns 1 if stages parted from the plan in the last check.
    Raises ConfigError if the interval is too short, or the port is taken."""
    if options.every < LEAST_SECONDS:
        raise ConfigError(f"--every {options.every:g}s: at least {LEAST_SECONDS:g}s")
    gauges, parted, roles = Gauges(), False, RoleBalancer(options.act, made.deployment)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.listen:
        host, port = options.listen
        try:
            start_http_server(port, host, gauges.registry)
        except OSError as error:
            raise ConfigError(f"--listen {host}:{port}: {error.strerror}") from None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            begun = time.monotonic()
            try:
                checked = check(made, watched_spans(options.url), known)
                advised = roles.settled(checked.advice) if checked.roles.ffn else None
            except ConfigError as error:
                gauges.set(None)
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                gauges.set(checked, advised)
                stages = checked.stages
                parted = any(one.parted for one in stages.values())
                told = [f"{n} {one.error:+.0%}{' ALARM' * one.parted}" for n, one in stages.items()]
                texts = filter(None, (", ".join(told), advised and advised.text, roles.text))
                print("; ".join(texts), flush=True)
            time.sleep(max(0.0, begun + options.every - time.monotonic()))
    return 1 if parted else 0
