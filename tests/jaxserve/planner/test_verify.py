"""A running fleet beside its plan, and the attention workers that its times ask for."""

import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve import ports
from jaxserve.config.load import load_deployment
from jaxserve.planner import verify
from jaxserve.planner.balance import Advice, Balance, advice
from jaxserve.planner.lanes import step_seconds
from jaxserve.planner.stage_times import StepTimes
from jaxserve.planner.verify import RECENT, RoleBalancer
from jaxserve.server.metrics import Metrics
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.test_stand_ins import VALUES
from tests.jaxserve.waiting import until

ROOT = Path(__file__).parents[3]
LAYERS = 6


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    ("attend", "ffn", "link"), [(9, 2, 1), (4, 4, 0.5), (2, 5, 0.5), (8, 1.7, 6), (10, 3, 0)]
)
def test_advised_workers_cost_least_in_simulated_time(lanes, attend, ffn, link):
    """Within 5 % of the cheapest of up to nine on one ffn role, which costs as much as three."""
    attended, moved = np.full((LAYERS, 1), float(attend)), np.full(LAYERS, float(link))
    times = StepTimes(attended, moved, np.full(LAYERS, float(ffn)), moved, 0.0)
    costs = {
        count: (count + 3) * step_seconds(times, lanes, 1, count) / (count * lanes)
        for count in range(1, 10)
    }
    measured = Balance(LAYERS * attend, LAYERS * ffn, 0.0)
    for there in costs:
        found = advice(there, lanes, measured, (LAYERS * link,) * 2, (1.0, 3.0))
        assert costs[found.wanted] <= 1.05 * min(costs.values())
        assert found.saving == pytest.approx(1 - costs[found.wanted] / costs[there], abs=0.12)
        verb = "add" if found.advised > there else "remove" if found.advised < there else "as many"
        assert verb in found.text


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_running_demo_is_watched():
    """Over HTTP: figures beside the plan, an alarm for other hardware, none of a server gone."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    run = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE}
    demo = [sys.executable, "-m", "jaxserve.serve", "--config", "configs/demo.yaml"]
    demo += ["--set", "server.http_port=0", "--set", "server.grpc_port=0", "--set=pipeline=layer"]
    over, port = threading.Event(), ports.free_port()
    with contextlib.ExitStack() as ends:
        server = started(ends, demo, run)
        address = re.search(r"\bhttp=(\S+)", server.stdout.readline())[1]
        clients = [threading.Thread(target=stream, args=(address, over)) for _ in range(8)]
        ends.callback(over.set)
        for client in clients:
            client.start()
        asked = ["--config", "demo", "--hardware", "h100", "--url", f"http://{address}"]
        asked += ["--every", "1s", "--listen", str(port)]
        command = [sys.executable, "-m", "jaxserve.plan", "verify", *asked]
        watcher = started(ends, command, run | {"stderr": subprocess.STDOUT})
        line = next(line for line in watcher.stdout if "attention workers: " in line)
        assert re.search(r"attend -\d+% ALARM", line), line
        # Not every second has two equal steps of a lane one after the other, which make a "step".
        step = "jaxserve:plan_error", "step"
        found = until(lambda: step in (every := metrics(port)) and every)
        stages = {key[1] for key in found if key[0] == "jaxserve:plan_error"}
        assert {"attend", "ffn", "combine"} <= stages
        for stage in stages:
            seconds = found["jaxserve:plan_measured_seconds", stage]
            error = found["jaxserve:plan_predicted_seconds", stage] / seconds - 1
            assert found["jaxserve:plan_error", stage] == pytest.approx(error)
            assert 1e-6 < seconds < 10
        assert found["jaxserve:plan_error", "attend"] < -0.25
        assert found["jaxserve:plan_attention_workers", "there"] == 1
        assert found["jaxserve:plan_attention_workers", "advised"] >= 1
        assert time.time() - found["jaxserve:plan_checked_timestamp_seconds",] < 60
        over.set()
        for client in clients:
            client.join(60)
        server.terminate()
        assert server.wait(60) == 0
        assert address in next(line for line in watcher.stdout if line.startswith("error: --url"))
        after = metrics(port)
        assert not [key for key in after if key[0] == "jaxserve:plan_error"]
        assert after["jaxserve:plan_checks_failed_total",] >= 1
        watcher.terminate()
        assert watcher.wait(60) == 1


def started(
    ends: contextlib.ExitStack, command: list[str], run: dict[str, object]
) -> subprocess.Popen[str]:
    """Starts a process, which ends with the test."""
    process = ends.enter_context(subprocess.Popen(command, **run))
    ends.callback(process.kill)
    return process


def stream(address: str, over: threading.Event) -> None:
    """Asks the server for tokens, one request after the other."""
    for number in itertools.count():
        if over.is_set():
            return
        client = http.client.HTTPConnection(address, timeout=120)
        body = {"prompt": f"Once upon a time {number}", "max_tokens": 48, "ignore_eos": True}
        told = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body), told)
        assert client.getresponse().status == 200
        client.close()


def metrics(port: int) -> dict[tuple[str, ...], float]:
    """Samples at /metrics, by name and label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


SLOTS, LANES, WORKERS = 64, 3, 6


class Table:
    """Six workers on a table: attention takes a time for each sequence, the ffn role its weights,
    too. What a router is told is done some checks later.

    Attributes:
      requests, prompts: at domains and at prefill workers, of the whole fleet.
      changes: numbers of domains that were asked for.
      rate: first tokens a check at either router.
    """

    def __init__(self, monkeypatch: Any, domains: int, requests: int, more: Any = ()):
        values = VALUES | {"fleet.rebalance_roles": True, "scheduler.slots": SLOTS} | dict(more)
        self.roles = RoleBalancer(["a", "b"], load_deployment(REPOSITORY, values))
        self.domains, self.requests, self.prompts = domains, requests, 0
        self.away, self.changes = 0, list[int]()
        self.rate, self.first = 0, np.zeros(2)
        monkeypatch.setattr(verify, "_call", self.call)
        monkeypatch.setattr(verify, "_first_tokens", self.first_tokens)

    def first_tokens(self, router: str, target: float) -> Any:
        """A prefill worker has ten in time from one check to the next."""
        self.first += self.rate, max(0, self.rate - 10 * (WORKERS - self.domains))
        return verify._First(*self.first)

    def call(self, router: str, wanted: int | None = None) -> Any:
        if wanted not in (None, self.domains, *self.changes[-1:]):
            assert (abs(wanted - self.domains), self.away) == (1, 0), "one after the other"
            self.changes.append(wanted)
            self.away = 4
        numbers = {"domain": self.domains, "prefill": WORKERS - self.domains}
        held = {"domain": self.requests, "prefill": self.prompts}
        status = "draining" if self.away else "ready"
        each = [(role, held[role] // n) for role, n in numbers.items() for _ in range(n)]
        return verify._Roles([verify._Worker(role, status, count, 0) for role, count in each])

    def advised(self, workers: int, share: float) -> Advice:
        load = min(SLOTS, self.requests / self.domains) * share
        times = Balance(1e-3 * load, 0.005 + 3e-4 * load, 0.0)
        return advice(workers, LANES, times, (1e-4, 1e-4), (1.0, 3.0))

    def check(self, checks: int = 8 * RECENT) -> int:
        """Checks so often; returns how many domains there are then."""
        for _ in range(checks):
            self.roles.settled(self.advised)
            self.away = max(0, self.away - 1)
            if not self.away and self.changes:
                self.domains = self.changes[-1]
        return self.domains


@pytest.mark.parametrize(
    ("requests", "domains"), [(10, {1}), (40, {2}), (130, {3}), (500, {3, 4, 5})]
)
def test_a_fleet_comes_to_rest(monkeypatch, requests, domains):
    """From any number of domains. A worker that would be asked for again stays."""
    for start in range(1, WORKERS):
        fleet = Table(monkeypatch, start, requests)
        assert (found := fleet.check()) in domains
        assert len(fleet.changes) == abs(start - found), "never back and forth"
        fleet.prompts = 10**4
        assert (fleet.check(), len(fleet.changes)) == (found, abs(start - found))
    fleet.requests = 10
    assert fleet.check() == 1, "once the load has gone"
    fleet.requests = 500
    assert fleet.check() == 1, "prefill workers are needed where they are"
    fleet.prompts = 0
    assert fleet.check() == 3


@pytest.mark.parametrize(("requests", "domains"), [(126, 2), (180, 3)])
def test_prompts_get_workers_while_first_tokens_are_late(monkeypatch, requests, domains):
    """Unless the others lack slots for its requests; back once fewer prompts come."""
    fleet = Table(monkeypatch, 3, requests, {"fleet.ttft_seconds": 2.0})
    fleet.rate = 40
    assert (fleet.check(), fleet.changes) == (domains, [2] * (domains == 2))
    assert "first tokens are later than 2 s (domains: 3)" in fleet.roles.text
    fleet.rate = 20
    assert (fleet.check(), fleet.roles.text) == (3, "")
    fleet.rate, fleet.requests = 100, 10**3
    assert fleet.check() >= 3, "requests wait for domains"


def test_late_first_tokens_are_counted(monkeypatch):
    metrics = Metrics("model")
    for seconds in (0.1, 0.4, 1.0, 2.0, 3000.0):
        metrics.first_token(seconds, 0.0)
    monkeypatch.setattr(verify, "ask", lambda option, router, path: metrics.text())
    for target, late in ((0.6, 3), (0.9, 2.5), (1.2, 2), (9999.0, 1)):
        assert verify._first_tokens("router", target) == pytest.approx((5, late))
