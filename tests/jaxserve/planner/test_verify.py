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

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve import ports
from jaxserve.planner.balance import Balance, advice
from jaxserve.planner.lanes import step_seconds
from jaxserve.planner.stage_times import StepTimes
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
    demo += ["--set", "server.http_port=0", "--set", "server.grpc_port=0"]
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
