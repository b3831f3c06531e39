"""The rules that somebody's CVE taught, a test or more each: the engine never sees an attack."""

import hmac
import json
import pickle
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server import access as access_module
from jaxserve.server.access import Access, ApiKeys
from jaxserve.server.http.server import HttpServer
from tests.jaxserve.server.http.rig import SECONDS, HttpRig
from tests.jaxserve.server.http.test_server import raw
from tests.jaxserve.waiting import until

KEY, OTHER = "key-of-alice-0123456789", "key-of-bob-0123456789"
PATHS = [
    "/v1/models",
    "/v1/models/fake",
    "/version",
    "/openapi.json",
    "/docs",
    "/pipeline",
    "/metrics",
]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def locked():
    rig = HttpRig(access=Access(ApiKeys([KEY, OTHER])))
    yield rig
    rig.close()


class TestKeys:
    """Everything but liveness and readiness asks for a key."""

    @pytest.mark.parametrize("header", [None, "", "Bearer", f"Basic {KEY}", "Bearer wrong", KEY])
    def test_without_a_right_one(self, locked: HttpRig, header: str | None) -> None:
        headers = {} if header is None else {"Authorization": header}
        for path in PATHS:
            response = locked.client.get(path, headers=headers)
            assert (response.status_code, path) == (401, path)
            assert response.headers["www-authenticate"] == "Bearer"
        for path in POSTS:  # before the body is looked at
            assert locked.client.post(path, content=b"x", headers=headers).status_code == 401

    def test_with_one(self, locked: HttpRig) -> None:
        for key in (KEY, OTHER):
            headers = {"Authorization": f"Bearer {key}"}
            for path in PATHS:
                assert locked.client.get(path, headers=headers).status_code == 200

    def test_probes_need_none(self, locked: HttpRig) -> None:
        assert locked.client.get("/health").status_code == 200
        assert locked.client.get("/ready").status_code == 200

    def test_the_comparison_takes_as_long_for_any_key(self, monkeypatch) -> None:
        compared = []

        really = hmac.compare_digest

        def compare(a: bytes, b: bytes) -> bool:
            compared.append((len(a), len(b)))
            return really(a, b)

        monkeypatch.setattr(access_module.hmac, "compare_digest", compare)
        keys = ApiKeys([KEY, OTHER])
        for header in (f"Bearer {KEY}", f"Bearer {OTHER}", "Bearer x", None):
            keys.tenant(header)
        assert compared == [(32, 32)] * 8

    def test_they_are_in_no_representation(self) -> None:
        assert KEY not in repr(Access(ApiKeys([KEY])))
        assert KEY not in repr(vars(ApiKeys([KEY])))


class TestAddresses:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
    def test_strangers_need_an_explicit_word(self, host: str) -> None:
        with pytest.raises(ConfigError, match=r"server\.host = .* --insecure-bind"):
            HttpServer(host, 0)
        HttpServer(host, 0, insecure_bind=True)

    def test_or_a_key(self) -> None:
        HttpServer("0.0.0.0", 0, access=Access(ApiKeys([KEY])))


class TestSizes:
    def test_a_body_that_says_that_it_is_large(self, shared: HttpRig) -> None:
        """Refused before it is sent: the client of 100 MB hears it after the headers."""
        client = raw(shared)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100000000\r\n\r\n"
        )
        assert b"413 " in client.recv(4096)
        client.close()

    def test_a_body_that_does_not_say_so(self, shared: HttpRig) -> None:
        def parts():
            for _ in range(100):
                yield b"x" * 10**6

        start = time.monotonic()
        try:
            response = shared.client.post(
                "/v1/completions", content=parts(), headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 413
        except httpx.TransportError:
            pass  # the server hung up before the client had sent everything
        assert time.monotonic() - start < 5

    def test_headers(self, shared: HttpRig) -> None:
        client = raw(shared)
        try:
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10**6)
            answer = client.recv(4096)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
            assert answer == b"" or b"more than 32768 bytes" in answer
        except ConnectionError:
            pass
        client.close()

    def test_headers_at_once(self, shared: HttpRig) -> None:
        few = {f"x-{number}": "y" for number in range(60)}
        assert shared.client.get("/version", headers=few).status_code == 200
        many = {f"x-{number}": "y" for number in range(110)}
        long = {"x-long": "y" * 33_000}
        for headers, message in ((many, "at most 100"), (long, "at most 32768")):
            answer = shared.client.get("/version", headers=headers)
            assert (answer.status_code, answer.headers["connection"]) == (431, "close")
            assert message in answer.json()["error"]["message"]

    @pytest.mark.parametrize("length", ["-1", "1e3", "x", "10, 20"])
    def test_lengths_that_are_none(self, shared: HttpRig, length: str) -> None:
        client = raw(shared)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: " + length.encode() + b"\r\n\r\n"
        )
        assert b" 400 " in client.recv(4096)
        client.close()

    def test_two_lengths(self, shared: HttpRig) -> None:
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

    def test_a_deeply_nested_body(self, shared: HttpRig) -> None:
        for body in (b"[" * 10**6, b'{"a":' * 10**5, b'{"messages": ' + b"[" * 10**6):
            response = shared.client.post(
                "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400
        message = {"role": "user", "content": "x"}
        for _ in range(200):
            message = {"role": "user", "content": "x", "name": message}
        assert "messages[0]" in shared.refused("/v1/chat/completions", messages=[message])["param"]


class TestForms:
    """What a web page may send without asking, and what is no JSON, is not read."""

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x"])
    def test_other_types(self, shared: HttpRig, kind: str) -> None:
        response = shared.client.post(
            "/v1/completions", content=b'{"prompt": "hi"}', headers={"Content-Type": kind}
        )
        assert response.status_code == 415

    def test_no_pickle(self, shared: HttpRig) -> None:
        body = pickle.dumps({"prompt": "hi"})
        for kind in ("application/octet-stream", "application/json"):
            response = shared.client.post(
                "/v1/completions", content=body, headers={"Content-Type": kind}
            )
            assert response.status_code in (400, 415)

    @pytest.mark.parametrize(
        "body", [b"", b"null", b"7", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"{"]
    )
    def test_no_json(self, shared: HttpRig, body: bytes) -> None:
        response = shared.client.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("body", "prompt")

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
    def test_numbers_that_are_none(self, shared: HttpRig, number: str) -> None:
        response = shared.client.post(
            "/v1/completions",
            content=f'{{"prompt": "hi", "temperature": {number}}}',
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code == 400

    def test_no_permission_for_other_origins(self, shared: HttpRig) -> None:
        response = shared.client.options(
            "/v1/completions",
            headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
        )
        assert response.status_code == 405
        assert not [name for name in response.headers if name.startswith("access-control")]

    def test_line_ends_do_not_get_into_headers(self, shared: HttpRig) -> None:
        error = shared.refused(request_id="a\r\nSet-Cookie: x")
        assert error["param"] == "request_id"


class TestTemplates:
    def test_a_template_that_would_run_forever(self) -> None:
        """Not for the other questions that a server asks when it starts: each would take 2 s."""
        forever = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
        forever = "{% if messages[0].content == 'hi' %}" + forever + "{% endif %}"
        rig = HttpRig(template=forever)
        start = time.monotonic()
        error = rig.refused("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert "the chat template failed" in error["message"]
        assert time.monotonic() - start < 10
        rig.close()

    def test_clients_bring_none(self, shared: HttpRig) -> None:
        messages = [{"role": "user", "content": "{{ 7 * 7 }}"}]
        for field in ("chat_template", "template"):
            error = shared.refused("/v1/chat/completions", messages=messages, **{field: "x"})
            assert error["param"] == field
        tokens = shared.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text = shared.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert "{{ 7 * 7 }}" in text


def test_tenants_do_not_share_prefixes(locked: HttpRig) -> None:
    """Timing tells who has asked the same before: each key has a salt of its own."""
    for key in (KEY, OTHER):
        headers = {"Authorization": f"Bearer {key}"}
        for salt in ({}, {"cache_salt": "x"}):
            fields = {"prompt": "hi", **salt}
            assert locked.client.post("/v1/completions", json=fields, headers=headers).is_success
    salts = [params.cache_salt for params in locked.engine.params]
    assert len(set(salts)) == 4
    assert all(KEY not in salt and OTHER not in salt for salt in salts)


def test_errors_are_opaque(rig: HttpRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.engine.refusal = KeyError("a secret path")
    response = rig.complete(request_id="a1")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; request a1"
    assert "request a1 failed" in caplog.text
    assert "a secret path" in caplog.text


def test_clients_do_not_write_lines_into_the_log(
    shared: HttpRig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "jaxserve.http"):
        shared.client.get("/x%0Aready%1b[2J" + "y" * 1000)
        # The line is written after the answer.
        until(lambda: "jaxserve.http" in [record.name for record in caplog.records])
    (record,) = [record for record in caplog.records if record.name == "jaxserve.http"]
    assert "path=/x\\nready\\x1b[2Jyyy" in record.getMessage()
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 1500


def test_tokenising_does_not_block_the_server(rig: HttpRig, monkeypatch) -> None:
    """Long prompts are tokenised beside the event loop, which answers meanwhile."""
    begun, go_on = threading.Event(), threading.Event()
    encode = rig.generator.encode

    def slow(*arguments, **options):  # type: ignore[no-untyped-def]
        begun.set()
        assert go_on.wait(SECONDS)
        return encode(*arguments, **options)

    monkeypatch.setattr(rig.generator, "encode", slow)
    thread = threading.Thread(target=lambda: rig.complete(prompt="x" * 1000))
    thread.start()
    assert begun.wait(SECONDS)
    assert httpx.get(f"{rig.url}/health", timeout=SECONDS).status_code == 200
    go_on.set()
    thread.join(SECONDS)


def test_token_ids_are_checked_before_the_engine_sees_them(shared: HttpRig) -> None:
    for wrong in ([300], [-1], [2**63], [2**64]):
        assert shared.refused(prompt=wrong)["param"].startswith("prompt")
    assert shared.engine.prompts == []


def test_a_model_folder_runs_no_code(tmp_path: Path) -> None:
    """What Hugging Face would import from the folder is never looked at."""
    from jaxserve.text.tokenizer import Tokenizer
    from tests.jaxserve.text.letters import raw_letters

    marker = tmp_path / "ran"
    for name in ("tokenization_evil.py", "modeling_evil.py"):
        (tmp_path / name).write_text(f"open({str(marker)!r}, 'w')")
    raw_letters().save(str(tmp_path / "tokenizer.json"))
    auto_map = {"AutoTokenizer": ["tokenization_evil.Evil", None], "AutoModel": "modeling_evil.E"}
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 0, "auto_map": auto_map}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert Tokenizer.from_folder(tmp_path).encode("a")
    assert not marker.exists()


def test_the_server_does_not_say_what_it_runs_on(shared: HttpRig) -> None:
    headers = shared.client.get("/health").headers
    assert "server" not in headers
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/pipeline", "/none"])
def test_no_answer_can_be_made_a_page_of(shared: HttpRig, path: str) -> None:
    """No frames around it, nothing run of it, nothing said of where its reader was."""
    headers = shared.client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("frame-ancestors 'none'")
    assert ("script-src" in policy) == (path == "/")
    assert headers.get_list("content-security-policy") == [policy]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_a_flood_of_pipelined_requests_is_served_in_order(shared: HttpRig) -> None:
    client = raw(shared)
    client.settimeout(SECONDS)
    client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
    client.shutdown(socket.SHUT_WR)
    answer = b""
    while answer.count(b'{"version"') < 50 and (part := client.recv(65536)):
        answer += part
    assert answer.count(b"200 OK") == 50
    client.close()
