"""Metrics on the public port; state, abort, log level and drain on the admin port."""

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import pytest

from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.fleet.request_frames import has_key, keyed_id
from jaxserve.fleet.rolling import Rolling, WorkerStatus
from jaxserve.roles.worker import Proposal
from jaxserve.server.http.routes import ADMIN_ENDPOINTS
from jaxserve.server.http.server import HttpServer
from tests import golden
from tests.jaxserve.server.http.rig import SECONDS, HttpRig

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def drained() -> threading.Event:
    return threading.Event()


@pytest.fixture
def admin(rig: HttpRig, drained: threading.Event) -> Iterator[httpx.Client]:
    server = HttpServer(Server(http_port=0, unknown_fields="refuse"), endpoints=ADMIN_ENDPOINTS)
    address = server.start()
    server.operate(rig.generator, rig.metrics, drained.set)
    with httpx.Client(base_url=f"http://{address}", timeout=SECONDS) as client:
        yield client
    server.stop(0)


def test_state_and_abort(rig, admin):
    with rig.streaming(request_id="mine") as lines:
        state = admin.get("/state").json()
        (live,) = state["live"]
        assert live.startswith("mine.")
        assert state["load"]["running"] == 1
        assert admin.post("/abort", json={"request_id": "other"}).status_code == 404
        assert admin.post("/abort", json={"request_id": live}).json() == {"status": "aborted"}
        assert rig.engine.wait_until_idle()
        rest = "".join(lines)
        assert '"message":"the request was aborted"' in rest
        assert "[DONE]" not in rest


def test_a_request_with_a_key_has_the_same_id_when_it_comes_again(rig, admin):
    fields, key = {"prompt": "hi", "stream": True}, {"Idempotency-Key": "mine"}
    with rig.streaming(key):
        asked = b'/v1/completions\n{"prompt":"hi","stream":true}'
        assert admin.get("/state").json()["live"] == [keyed_id("", "mine", asked) + ".0"]
        turned = {"stream": True, "prompt": "hi"}
        for again in (fields, turned):
            answer = rig.client.post("/v1/completions", json=again, headers=key)
            assert answer.status_code == 409
            assert "is already running" in answer.text
    assert rig.engine.wait_until_idle()


@pytest.mark.parametrize("other", [{"seed": 2}, {"logprobs": 1}, {"n": 2}, {"stop": "x"}])
def test_a_key_with_other_parameters_is_refused(rig, other):
    fields, key = {"prompt": "hi", "stream": True, "seed": 1}, {"Idempotency-Key": "mine"}
    with rig.streaming(key, **fields):
        answer = rig.client.post("/v1/completions", json=fields | other, headers=key)
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "idempotency_conflict"
    assert rig.engine.wait_until_idle()


def test_no_client_chooses_the_id_of_a_request_with_a_key(rig, admin):
    with rig.streaming(request_id=keyed_id("", "mine", b"")):
        (live,) = admin.get("/state").json()["live"]
        assert not has_key(live)
    assert rig.engine.wait_until_idle()


def test_rebalance(rig, admin):
    answer = admin.post("/experts/rebalance", json={"dry_run": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_experts")
    asked = []

    def rebalance(*, dry_run: bool) -> Proposal:
        asked.append(dry_run)
        if len(asked) > 2:
            raise ValueError("3 rounds of moves are still to come")
        return Proposal(
            balance_now=0.4, balance_then=0.9, gain=0.5, moves=3, move_bytes=30, seconds=0.1
        )

    rig.engine.experts = Mock(rebalance=rebalance)
    answer = admin.post("/experts/rebalance", json={"dry_run": True})
    assert answer.json()["balance_then"] == 0.9
    assert admin.post("/experts/rebalance", json={}).status_code == 200
    assert admin.post("/experts/rebalance", json={}).status_code == 409
    assert admin.post("/experts/rebalance", json={"dry_run": "yes"}).status_code == 400
    assert asked == [True, False, False]


def test_roles(rig, admin):
    answer = admin.get("/roles")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_fleet")
    one = WorkerStatus(worker="a:1", role="domain", status="ready", weights="f00d")
    rolling = Mock(spec=Rolling)
    rolling.workers.return_value = [one]
    rolling.drain.return_value = rolling.add.return_value = one
    rolling.remove.side_effect = ConfigError("worker a:1: is ready; drain it first")
    rig.engine.rolling = rolling
    assert admin.get("/roles").json()["workers"][0]["weights"] == "f00d"
    for name, body in (
        ("drain", {"worker": "a:1", "mode": "move"}),
        ("resume", {"worker": "a:1"}),
        ("add", {"worker": "b:1", "role": "prefill", "long": True}),
    ):
        assert admin.post(f"/roles/{name}", json=body).json()["worker"] == "a:1"
    assert [call.args for call in rolling.drain.call_args_list] == [("a:1", "move"), ("a:1", "")]
    rolling.add.assert_called_once_with("b:1", "prefill", True)
    answer = admin.post("/roles/remove", json={"worker": "a:1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_such_change")
    for name, body in (("drain", {}), ("drain", {"worker": "a:1", "mode": "now"}), ("add", {})):
        assert admin.post(f"/roles/{name}", json=body).status_code == 400


def test_reset_of_the_prefix_cache(rig, admin, monkeypatch):
    answer = admin.post("/reset_prefix_cache", headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_prefix_cache")
    monkeypatch.setattr(rig.engine, "reset_prefix_cache", lambda: 7, raising=False)
    assert admin.post("/reset_prefix_cache", headers=JSON).json() == {"freed_pages": 7}
    assert rig.client.post("/reset_prefix_cache").status_code == 404


def test_log_level(admin):
    try:
        assert admin.post("/log_level", json={"level": "DEBUG"}).status_code == 200
        assert logging.getLogger("jaxserve").level == logging.DEBUG
    finally:
        logging.getLogger("jaxserve").setLevel(logging.NOTSET)
    assert admin.post("/log_level", json={"level": "LOUD"}).status_code == 400
    wrong = {"level": "DEBUG", "logger": "root"}
    assert admin.post("/log_level", json=wrong).status_code == 400


def test_drain(admin, drained):
    """Also for a page of the admin port itself."""
    assert admin.get("/drain").status_code == 405
    for headers in (JSON, JSON | {"Origin": str(admin.base_url).rstrip("/")}):
        assert admin.post("/drain", headers=headers).json() == {"status": "draining"}
        assert drained.wait(SECONDS)
        drained.clear()


@golden.table("server/web_pages.yaml")
def test_a_web_page_changes_nothing(rig, admin, drained, headers, status):
    reset = rig.engine.reset_prefix_cache = Mock(return_value=7)
    rig.engine.rolling = Mock(spec=Rolling)
    paths = [endpoint.path for endpoint in ADMIN_ENDPOINTS if endpoint.method == "POST"]
    assert len(paths) == 11
    for path in paths:
        assert admin.post(path, headers=headers, content=b"").status_code == status, path
    assert not drained.is_set()
    reset.assert_not_called()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "192.0.2.1", ""])
def test_a_name_that_is_not_ours(admin, drained, host):
    """A web page whose name points to loopback (DNS rebinding)."""
    for method, path in (("GET", "/state"), ("POST", "/drain"), ("POST", "/abort")):
        response = admin.request(method, path, headers={"Host": host})
        assert response.status_code == 403
    assert not drained.is_set()


def test_the_public_port_has_none_of_it(shared):
    for path in ("/state", "/drain", "/abort", "/log_level"):
        assert shared.client.post(path).status_code == 404


def test_responses_and_refusals_are_counted(rig):
    assert rig.complete().status_code == 200
    rig.refused(temperature=3)
    assert rig.client.get("/v1/models/other").status_code == 404
    assert rig.client.get("/nowhere/7").status_code == 404
    response = rig.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    labels = 'model_name="fake",path='
    assert f'jaxserve:http_responses_total{{{labels}"/v1/completions",status="200"}} 1.0' in text
    assert f'jaxserve:http_responses_total{{{labels}"/v1/completions",status="400"}} 1.0' in text
    assert f'jaxserve:http_responses_total{{{labels}"/v1/models/{{model}}",status="404"}}' in text
    assert f'jaxserve:http_responses_total{{{labels}"",status="404"}} 1.0' in text
    for reason in ("invalid_value", "model_not_found", "unknown_path"):
        assert f'jaxserve:http_refusals_total{{model_name="fake",reason="{reason}"}} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_a_profile_is_written_one_at_a_time(admin, tmp_path, monkeypatch):
    asked = {"directory": str(tmp_path / "new"), "seconds": 0.5}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: admin.post("/profile", json=asked), range(2)))
    done, refused = sorted(answers, key=lambda answer: answer.status_code)
    assert (done.status_code, refused.json()["error"]["code"]) == (200, "profiling")
    assert any(name.endswith(".xplane.pb") for name in done.json()["files"])
    assert all((tmp_path / "new" / name).is_file() for name in done.json()["files"])
    for wrong in ({"seconds": 61}, {"seconds": 0}, {"directory": "x"}, {"directory": "/dev/null"}):
        answer = admin.post("/profile", json=asked | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *wrong)
    monkeypatch.delitem(sys.modules, "jax")
    assert admin.post("/profile", json=asked).json()["error"]["code"] == "no_devices"
