"""Attacks over HTTP that never reach the engine; `../test_security_table.py` has the main ones."""

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.server.http.test_server import raw
from tests.jaxserve.waiting import until

JSON = {"Content-Type": "application/json"}
PAGE = "https://page.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
CORS = ("access-control-allow-origin", "access-control-allow-methods")


class TestSizes:
    def test_a_body_that_does_not_say_so(self, shared):
        def parts():
            for _ in range(100):
                yield b"x" * 10**6

        start = time.monotonic()
        try:
            response = shared.client.post("/v1/completions", content=parts(), headers=JSON)
            assert response.status_code == 413
        except httpx.TransportError:
            pass  # the server hung up before the client had sent everything
        assert time.monotonic() - start < 5

    def test_headers_at_once(self, shared):
        few = {f"x-{number}": "y" for number in range(60)}
        assert shared.client.get("/version", headers=few).status_code == 200
        many = {f"x-{number}": "y" for number in range(110)}
        long = {"x-long": "y" * 33_000}
        for headers, message in ((many, "at most 100"), (long, "at most 32768")):
            answer = shared.client.get("/version", headers=headers)
            assert (answer.status_code, answer.headers["connection"]) == (431, "close")
            assert message in answer.json()["error"]["message"]

    @pytest.mark.parametrize("length", ["-1", "1e3", "x", "10, 20"])
    def test_lengths_that_are_none(self, shared, length):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with raw(shared) as client:
            client.sendall(head + b"Content-Length: " + length.encode() + b"\r\n\r\n")
            assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")

    def test_two_lengths(self, shared):
        """Request smuggling: both ways of saying where a body ends. Nothing after it is read."""
        with raw(shared) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            answers = b"".join(iter(lambda: client.recv(4096), b""))
        assert answers.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answers
        assert b"both transfer-encoding and content-length" in answers
        assert answers.count(b"HTTP/1.1") == 1

    def test_a_deeply_nested_body(self, shared):
        for body in (b"[" * 10**6, b'{"a":' * 10**5, b'{"messages": ' + b"[" * 10**6):
            response = shared.client.post("/v1/chat/completions", content=body, headers=JSON)
            assert response.status_code == 400
        message = {"role": "user", "content": "x"}
        for _ in range(200):
            message = {"role": "user", "content": "x", "name": message}
        assert "messages[0]" in shared.refused("/v1/chat/completions", messages=[message])["param"]


class TestForms:
    """Bodies that are not JSON, or of types that any web page may send, are refused."""

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x"])
    def test_other_types(self, shared, kind):
        response = shared.client.post(
            "/v1/completions", content=b'{"prompt": "hi"}', headers={"Content-Type": kind}
        )
        assert response.status_code == 415

    @pytest.mark.parametrize(
        "body", [b"", b"null", b"7", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"{"]
    )
    def test_no_json(self, shared, body):
        response = shared.client.post("/v1/completions", content=body, headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("body", "prompt")

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
    def test_numbers_that_are_none(self, shared, number):
        response = shared.client.post(
            "/v1/completions", content=f'{{"prompt": "hi", "temperature": {number}}}', headers=JSON
        )
        assert response.status_code == 400

    def test_line_ends_do_not_get_into_headers(self, shared):
        error = shared.refused(request_id="a\r\nSet-Cookie: x")
        assert error["param"] == "request_id"


def test_clients_do_not_write_lines_into_the_log(shared, caplog):
    with caplog.at_level("INFO", "jaxserve.http"):
        shared.client.get("/x%0Aready%1b[2J" + "y" * 1000)
        # Lines are written after the answers, that of the test before perhaps only now.
        (line,) = until(lambda: [m for m in caplog.messages if "path=/x" in m])
    assert "path=/x\\nready\\x1b[2Jyyy" in line
    assert line.isprintable()
    assert len(line) < 1500


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/pipeline", "/none"])
def test_no_answer_can_be_made_a_page_of(shared, path):
    """No frame around it, no script in it, no word of its reader's origin or of the server."""
    headers = shared.client.get(path).headers
    assert "server" not in headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("frame-ancestors 'none'")
    assert ("script-src" in policy) == (path == "/")
    assert headers.get_list("content-security-policy") == [policy]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_a_flood_of_pipelined_requests_is_served_in_order(shared):
    with raw(shared) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while answer.count(b'{"version"') < 50 and (part := client.recv(65536)):
            answer += part
    assert answer.count(b"200 OK") == 50


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[HttpRig]:
    with contextlib.closing(HttpRig(cors_origins=[PAGE])) as rig:
        yield rig


def preflight(rig: HttpRig, origin: str) -> httpx.Response:
    return rig.client.options("/v1/chat/completions", headers={"Origin": origin, **ASK})


def test_nobody_by_default(shared: HttpRig) -> None:
    answer = shared.client.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert preflight(shared, PAGE).status_code == 405
    for response in (answer, preflight(shared, PAGE)):
        assert not any(name in response.headers for name in CORS)


def test_a_page_that_is_named(open_to_page: HttpRig) -> None:
    asked = preflight(open_to_page, PAGE)
    assert (asked.status_code, asked.headers[CORS[0]]) == (200, PAGE)
    assert "POST" in asked.headers[CORS[1]]
    assert "content-type" in asked.headers["access-control-allow-headers"]
    messages = [{"role": "user", "content": "hi"}]
    answer = open_to_page.client.post(
        "/v1/chat/completions", json={"messages": messages}, headers={"Origin": PAGE}
    )
    assert (answer.status_code, answer.headers[CORS[0]]) == (200, PAGE)
    assert "access-control-allow-credentials" not in answer.headers


def test_another_page(open_to_page: HttpRig) -> None:
    for origin in ("https://other.example", f"{PAGE}:8443", "null", PAGE.upper()):
        assert preflight(open_to_page, origin).status_code == 400
        answer = open_to_page.client.get("/v1/models", headers={"Origin": origin})
        assert CORS[0] not in answer.headers
