"""Processes without clients answer probes and `/metrics`."""

import re
from typing import Any

import httpx
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.server.choice import ProbedLoop, ProbedPort
from tests.jaxserve.text.fake_engine import FakeEngine


class Routers:
    """A worker's port for routers, as `Life` calls it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self) -> dict[str, str]:
        return {"routers": "here:1"}

    def open(self, engine: Any) -> None:
        self.calls.append(engine)

    def refuse(self) -> None:
        self.calls.append("refuse")

    def stop(self, grace: float) -> None:
        self.calls.append(grace)


def get(caplog: pytest.LogCaptureFixture, path: str) -> httpx.Response:
    found = re.findall(r"http probes are answered on (\S+)", caplog.text)
    return httpx.get(f"http://{found[-1]}{path}", timeout=10)


def test_a_worker_of_a_fleet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    routers, engine = Routers(), FakeEngine([])
    port = ProbedPort(routers, load_deployment("demo", {"server.follower_http_port": 0}), False)
    assert port.start() == {"routers": "here:1"}
    try:
        assert [get(caplog, path).status_code for path in ("/ready", "/metrics")] == [503, 503]
        port.open(engine)
        metrics = get(caplog, "/metrics").text
        assert re.search(r"^jaxserve:process_ready{.*} 1.0$", metrics, re.MULTILINE)
        assert "jaxserve:kv_cache_usage_perc{" in metrics
        port.refuse()
    finally:
        port.stop(0.5)
    assert routers.calls == [engine, "refuse", 0.5]


def test_an_ffn_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loop = ProbedLoop(load_deployment("demo", {"server.follower_http_port": 0}), False)
    for ready, status in ((False, 503), (True, 200)):
        if ready:
            loop.turn()
        assert (get(caplog, "/ready").status_code, get(caplog, "/health").status_code) == (
            status,
            200,
        )
        number = re.search(r"^jaxserve:process_ready{.*} (.*)$", get(caplog, "/metrics").text, re.M)
        assert number is not None
        assert float(number[1]) == ready
