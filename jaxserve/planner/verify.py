"""`plan verify`: predicted against measured stages, of a timeline or of a running fleet.

With `--every` it is a process beside the fleet, which asks a server or a router for measured steps
again and again and serves what it finds at `/metrics`; `launch/prometheus-rules.yaml` has an alarm.
With `--act` it also has the routers' workers change their role (`fleet.rebalance_roles`), one at a
time, after as many checks as an advice takes, and never against `fleet.ttft_seconds`.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from jaxserve.errors import ConfigError
from jaxserve.observe.spans import Span
from jaxserve.planner.acting import RoleBalancer
from jaxserve.planner.balance import Advice, Balance, advice
from jaxserve.planner.comparison import Compared, balance, compare, deployed, summary, title
from jaxserve.planner.measurements import (
    Measurement,
    Observed,
    observe,
    read_measurements,
    read_spans,
    watched_spans,
)
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.view import Report, declared, show

LEAST_SECONDS = 1.0
"""Shortest time from one check to the next."""


class Checked(NamedTuple):
    """A deployment's trace beside its plan.

    Attributes:
      made: the deployment, for any number of attention workers.
      most: the measured steps with most sequences, on which the advice rests.
    """

    found: list[Compared]
    made: Scenario
    most: Observed

    @property
    def roles(self) -> Balance:
        """Seconds of a lane's step on both roles."""
        return balance(self.made, self.most)[0]

    def advice(self, workers: int, share: float = 1.0) -> Advice:
        """Returns the advised number of attention workers. The trace must have the ffn role's
        stages.

        Args:
          workers: present number of attention workers.
          share: each worker's load, as a share of the measured one.
        """
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
    """Compares a trace with the plan.

    Args:
      known: what the deployment's calibration was made from.

    Raises:
      ConfigError: the trace is of another deployment.
    """
    seen = observe(spans, made.attention.model.order)
    return Checked(compare(made, seen, known), made, seen[-1])


def run(options: argparse.Namespace) -> int:
    """Compares predictions with measurements, stage by stage and load by load; returns 1 if those
    of a running fleet part by more than `PARTED`.

    Raises:
      ConfigError: an option is wrong.
    """
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
    found, made, builtins = checked.found, checked.made, msgspec.to_builtins
    tree = [{**one._asdict(), "load": builtins(one.load), "error": one.error} for one in found]
    rows = [
        one._asdict() | {"title": title(made, one), "error": one.error, "within": one.within}
        for one in found
    ]
    told = summary(found)
    if checked.roles.ffn:
        if made.deployment.domains == 1:
            prices = made.roles.attention.price, made.roles.ffn.price
            told.append(checked.roles.text(made.layout, prices))
        told.append(checked.advice(made.deployment.domains).text)
    return Report("Predicted against measured", declared("verify", found=rows, summary=told), tree)


# ------------------------------------------------------------------------- beside a running fleet


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

    Raises:
      ConfigError: the interval is too short, or the port is taken.
    """
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
