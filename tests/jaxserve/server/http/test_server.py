"""A server's own life: ports, draining, clients that go, stall or never speak."""

import contextlib
import http.client
import os
import socket
import threading
import time

import httpx
import pytest

from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.server.http import exchange, server
from jaxserve.server.http.server import HttpServer
from jaxserve.text.generator import TextGenerator
from tests.jaxserve.server.http.rig import SECONDS, HttpRig, events
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import LETTERS, Verbose, ids_of
from tests.jaxserve.waiting import until

STREAM = {"prompt": "hi", "stream": True}


def test_health_over_a_life():
    life = HttpServer(Server(http_port=0))
    client = httpx.Client(base_url=f"http://{life.start()}", timeout=SECONDS)
    assert client.get("/health").json() == {"status": "starting"}
    assert client.get("/ready").status_code == 503
    response = client.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the server is starting"
    engine = FakeEngine(ids_of("one"))
    generator = TextGenerator(engine, LETTERS)
    life.open(generator)
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/health").json() == {"status": "ready"}
    engine.problems = ["domain worker 1: silent for 1.6 s"]
    assert client.get("/health").json() == {"status": "ready", "problems": engine.problems}
    engine.problems = [
        "worker 10.0.0.7:9100: [fd00::1]:99 and host-a.b:9101 refuse (fleet.x, 1.6 s)"
    ]
    shown = ["worker …: … and … refuse (fleet.x, 1.6 s)"]
    assert client.get("/health").json()["problems"] == shown
    life.refuse()
    response = client.get("/ready")
    assert response.status_code == 503
    assert "shuts down" in response.json()["error"]["message"]
    assert client.get("/health").status_code == 200  # alive to the end
    engine.fail("gone")
    assert client.get("/health").status_code == 503
    client.close()
    start = time.monotonic()
    life.stop(10)
    assert time.monotonic() - start < 5
    generator.close()
    engine.close()


def test_what_is_served(shared):
    models = shared.client.get("/v1/models").json()
    (model,) = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 100)
    assert shared.client.get("/v1/models/fake").json() == model
    assert shared.client.get("/v1/models/other").status_code == 404
    assert shared.client.get("/version").json() == {"version": "0.1.0"}


def test_unknown_paths_and_methods(shared):
    response = shared.client.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")
    response = shared.client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "wrong_method"
    for path in ("/v1/embeddings", "/v1/audio/speech", "/rerank"):
        error = shared.client.post(path, json={}).json()["error"]
        assert error["message"].startswith(f"'{path}' is not served here: jaxserve generates text")


def test_request_ids(shared):
    named = shared.client.get("/version", headers={"X-Request-Id": "my id"})
    assert named.headers["x-request-id"] == "my id"
    made = [shared.client.get("/version").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    long = shared.client.get("/version", headers={"X-Request-Id": "x" * 200})
    assert long.headers["x-request-id"] != "x" * 200


def test_two_requests_of_one_name_do_not_meet(rig):
    rig.engine.pace = 0.02
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(rig.complete(request_id="a").status_code))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert answers == [200, 200, 200]


def test_too_many_requests_are_refused_before_they_are_read(rig, monkeypatch):
    monkeypatch.setattr(rig.server._service, "max_active", 1)
    with rig.streaming():
        response = httpx.post(f"{rig.url}/v1/completions", content=b"no JSON", timeout=SECONDS)
        assert response.status_code == 429
        assert rig.client.get("/health").status_code == 200
    assert rig.engine.wait_until_idle()
    rig.engine.allowed = None
    until(lambda: rig.complete().status_code == 200)


def test_draining_finishes_what_runs_and_refuses_the_rest(rig):
    rig.engine.pace = 0.03
    with rig.streaming() as lines:
        rig.engine.allowed = None
        rig.server.refuse()
        late = httpx.post(f"{rig.url}/v1/completions", json={"prompt": "x"}, timeout=SECONDS)
        assert late.status_code == 503
        stopping = threading.Thread(target=lambda: (rig.engine.drain(10), rig.server.stop(10)))
        stopping.start()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    stopping.join(10)
    assert not stopping.is_alive()


def test_what_does_not_finish_in_time_is_cut_with_a_word(rig):
    with rig.streaming() as lines:
        rig.server.refuse()
        assert rig.engine.drain(0.1) is False
        rig.engine.close()
        rest = [line for line in lines if line]
    assert "shut down before the request was complete" in rest[-1]


def test_a_request_that_runs_too_long_is_given_up(make_rig):
    rig = make_rig(request_seconds=0.3)
    rig.engine.allowed = 3
    response = rig.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert rig.engine.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_vanishes_returns_the_pages(rig, stream, reset):
    rig.engine.allowed = 3
    client = raw(rig)
    client.sendall(request_bytes({"prompt": "hi", "stream": stream, "n": 2}))
    until(lambda: rig.engine.running == 2)
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.close()
    assert rig.engine.wait_until_idle()
    until(lambda: rig.generator.live == 0)
    rig.engine.allowed = None
    assert rig.complete().status_code == 200  # nobody else noticed


def test_a_thousand_vanishing_clients_leave_nothing_behind(rig):
    """No page, no task, no file descriptor."""
    rig.complete()
    rig.engine.allowed = 1
    state = rig.server._server.server_state
    until(lambda: len(state.tasks) == 0)
    before = descriptors()
    body = request_bytes(STREAM)
    for number in range(1000):
        client = raw(rig)
        # One in four says nothing, stops in the headers, in the body, or after the request.
        client.sendall((b"", body[:20], body[:-3], body)[number % 4])
        if number % 8 == 3:
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        client.close()
    assert rig.engine.wait_until_idle(SECONDS)
    until(lambda: rig.generator.live == 0)
    until(lambda: len(state.tasks) == 0 and len(state.connections) <= 1)
    until(lambda: descriptors() <= before)
    rig.engine.allowed = None
    assert rig.complete().json()["choices"][0]["text"] == "one two three"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("pending", [20, 10**6])
def test_a_reader_that_stalls_is_dropped(make_rig, monkeypatch, pending):
    """The limit is the number of tokens that wait, or the clock once the engine has finished."""
    monkeypatch.setattr(exchange, "STALL_SECONDS", 0.5)
    rig = make_rig(tokenizer=Verbose("y" * 200_000), max_pending_tokens=pending)
    rig.engine.script = ids_of("x" * 90)
    rig.engine.pace = 0.001
    client = raw(rig)
    client.sendall(request_bytes({**STREAM, "max_tokens": 90}))
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    assert rig.engine.wait_until_idle(SECONDS)
    state = rig.server._server.server_state
    until(lambda: not state.connections and not state.tasks)
    assert rig.generator.live == 0
    client.close()


def test_a_connection_that_says_nothing_is_closed(make_rig, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    rig = make_rig()
    silent, slow, second = raw(rig), raw(rig), raw(rig)
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    second.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert second.recv(15) == b"HTTP/1.1 200 OK"
    second.sendall(b"GET /version HT")
    for client in (silent, slow, second):
        wait_until_ended(client)
        client.close()
    # A request that is under way has its time.
    rig.engine.pace = 0.05
    assert events(rig.complete(stream=True))


def test_a_body_that_does_not_come_is_given_up(make_rig, monkeypatch):
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.3)
    rig = make_rig()
    with raw(rig) as client:
        client.sendall(request_bytes(STREAM)[:-3])
        assert client.makefile("rb").readline() == b"HTTP/1.1 408 Request Timeout\r\n"


def test_a_body_that_is_no_http_is_answered_once(rig, caplog):
    head = "POST /v1/nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with raw(rig) as client:
        client.sendall(f"{head}no number of bytes\r\n".encode())
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert rig.client.get("/health").status_code == 200
    assert {record.levelname for record in caplog.records} <= {"INFO", "WARNING"}


def test_a_body_that_is_too_large_gets_its_answer(rig):
    """While the client still sends; its connection goes on after that."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with raw(rig) as client:
        for _ in range(2):
            client.sendall(head + b"Content-Length: 5242880\r\n\r\n")
            client.sendall(b"x" * 5242880)
            response = http.client.HTTPResponse(client)
            response.begin()
            assert response.status == 413
            assert b"the body has more than 4194304 bytes" in response.read()


@pytest.mark.parametrize("limit", ["REST_SECONDS", "REST_BYTES"])
def test_a_body_that_goes_on_after_its_answer_is_cut_off(make_rig, monkeypatch, limit):
    monkeypatch.setattr(server, limit, 0.3)
    rig = make_rig()
    with raw(rig) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        assert b" 404 " in client.makefile("rb").readline()
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < SECONDS:
                client.sendall(b"x" * 100)
                time.sleep(0.01)
        assert time.monotonic() - start < SECONDS / 2


def wait_until_ended(client: socket.socket) -> None:
    """Waits until the server has ended a connection."""
    with contextlib.suppress(ConnectionError):
        while client.recv(4096):
            pass


def raw(rig: HttpRig) -> socket.socket:
    host, _, port = rig.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def request_bytes(fields: dict[str, object]) -> bytes:
    request = httpx.Request("POST", "http://x/v1/completions", json=fields)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content


def test_version_6():
    life = HttpServer(Server(host="::1", http_port=0))
    try:
        address = life.start()
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert address.startswith("[::1]:")
    assert httpx.get(f"http://{address}/health", timeout=SECONDS).status_code == 200
    life.stop(0)
