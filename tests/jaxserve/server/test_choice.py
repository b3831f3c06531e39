"""Processes without clients answer probes and `/metrics`."""

import re
from unittest.mock import Mock, call

import httpx
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.server.choice import ProbedLoop, ProbedPort
from tests.jaxserve.text.fake_engine import FakeEngine

DEPLOYMENT = load_deployment("demo", {"server.follower_http_port": 0})


def get(caplog: pytest.LogCaptureFixture, path: str) -> httpx.Response:
    found = re.findall(r"http probes are answered on (\S+)", caplog.text)
    return httpx.get(f"http://{found[-1]}{path}", timeout=10)


def test_a_worker_of_a_fleet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    routers, engine = Mock(), FakeEngine([])
    port = ProbedPort(routers, DEPLOYMENT, False)
    port.start()
    assert [get(caplog, path).status_code for path in ("/ready", "/metrics")] == [503, 503]
    port.open(engine)
    metrics = get(caplog, "/metrics").text
    assert "jaxserve:process_ready{" in metrics
    assert "jaxserve:kv_cache_usage_perc{" in metrics
    port.refuse()
    port.stop(0.5)
    assert routers.mock_calls == [call.start(), call.open(engine), call.refuse(), call.stop(0.5)]


def test_an_ffn_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loop = ProbedLoop(DEPLOYMENT, False)
    for status, number in ((503, "0.0"), (200, "1.0")):
        assert get(caplog, "/ready").status_code == status
        assert re.search(rf"process_ready{{.*}} {number}\n", get(caplog, "/metrics").text)
        loop.turn()
