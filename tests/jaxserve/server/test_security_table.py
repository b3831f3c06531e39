"""Rules learnt from CVEs of other servers, over both faces: one test a rule.

Each attack ends in bounded time with an error that says what is wrong, none reaches the engine,
and afterwards everybody else is served as before. Finer points of HTTP are in
`http/test_security.py`.
"""

import ast
import functools
import hmac
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.server import access as access_module
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.access import Access, ApiKeys
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.document import document
from jaxserve.server.http.routes import ADMIN_ENDPOINTS, ENDPOINTS
from jaxserve.server.http.server import HttpServer
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve import layouts
from tests.jaxserve.server.faces import ALICE, BOB, SECONDS, Faces, rpc_error
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import raw_letters

ROOT = Path(__file__).resolve().parents[3]
OPEN = ("/health", "/ping", "/ready", "/")
"""Paths without a key: probes, and the page, which is the same for all and asks for a key."""


class Source(NamedTuple):
    """Imports and calls of one of our modules, and the values that it gives `allow_pickle`."""

    path: Path
    imports: set[str]
    calls: set[str]
    pickles: list[object]


@functools.cache
def sources() -> list[Source]:
    """Every module of both packages."""
    found = [Source(path, set(), set(), []) for path in (ROOT / "jaxserve").rglob("*.py")]
    found += [Source(path, set(), set(), []) for path in (ROOT / "pallas_kernels").rglob("*.py")]
    for source in found:
        for node in ast.walk(ast.parse(source.path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    source.imports.update(alias.name.partition(".")[0] for alias in names)
                case ast.ImportFrom(module=str(module)):
                    source.imports.add(module.partition(".")[0])
                case ast.Call(func=ast.Name(id=name)):
                    source.calls.add(name)
                case ast.keyword(arg="allow_pickle", value=value):
                    source.pickles.append(ast.literal_eval(value))
    return found


def test_no_pickle_on_any_wire_or_file(faces):
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for source in sources():
        assert not unsafe & source.imports, source.path
        assert not any(source.pickles), source.path
    headers = {"Content-Type": "application/json"}
    body = pickle.dumps({"prompt": "hi"})
    response = faces.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert faces.untouched()


def test_addresses():
    """Explicit bind address, loopback by default, refused elsewhere without more."""
    assert Server().host == "127.0.0.1"
    anywhere = Server(host="0.0.0.0", grpc_port=0, http_port=0)
    for face in (GrpcServer, HttpServer):
        for host in ("0.0.0.0", "::", "192.0.2.1", ""):
            with pytest.raises(ConfigError, match=r"server\.host = .* --insecure-bind"):
                face(Server(host=host, grpc_port=0, http_port=0))
        face(anywhere, access=Access(ApiKeys([ALICE])))
        face(anywhere, insecure_bind=True)


def test_keys(locked, monkeypatch):
    """Authenticate everything but liveness and readiness, constant-time compare."""
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{model}", "fake")
        for shown in (None, "", "Bearer", "Bearer wrong", f"Basic {ALICE}", ALICE):
            headers = {} if shown is None else {"Authorization": shown}
            answer = locked.client.request(endpoint.method, path, headers=headers)
            assert (answer.status_code == 401) == (path not in OPEN), path
            assert answer.headers.get("www-authenticate", "Bearer") == "Bearer"
    assert not any(endpoint.public for endpoint in ADMIN_ENDPOINTS)
    service = pb.DESCRIPTOR.services_by_name["Inference"]
    for method in service.methods:
        call = locked.channel.unary_unary(f"/{service.full_name}/{method.name}")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            code, _ = rpc_error(call, b"", metadata=metadata, timeout=SECONDS)
            assert code == "UNAUTHENTICATED", method.name
    compared = []
    really = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return really(one, other)

    monkeypatch.setattr(access_module.hmac, "compare_digest", compare)
    keys = ApiKeys([ALICE, BOB])
    for shown in (f"Bearer {ALICE}", f"Bearer {BOB}", "Bearer x", None):
        keys.tenant(shown)
    assert compared == [(32, 32)] * 8  # all keys, as digests, whoever asks


def test_bounds():
    """Bound every int and list at the schema."""
    """Bounds of the documented schemas; `golden/server/` has those over both faces."""
    schemas = json.loads(document(ENDPOINTS, keys=False))["components"]["schemas"]
    taken = {endpoint.takes.__name__ for endpoint in ENDPOINTS if endpoint.takes is not None}

    def unbounded(name: str, schema: Any, place: str) -> Iterator[str]:
        if isinstance(schema, list):
            for number, part in enumerate(schema):
                yield from unbounded(name, part, f"{place}[{number}]")
        if not isinstance(schema, dict):
            return
        limits = {"integer": ("minimum", "maximum"), "number": (), "array": ("maxItems",)}
        needed = limits.get(str(schema.get("type")), ())
        if any(limit not in schema and f"exclusive{limit}" not in schema for limit in needed):
            yield f"{name}{place}"
        if "$ref" in schema:
            inner = schema["$ref"].rpartition("/")[2]
            yield from unbounded(inner, schemas[inner], "")
        for key, part in schema.items():
            yield from unbounded(name, part, f"{place}.{key}")

    assert [place for name in taken for place in unbounded(name, schemas[name], "")] == []


def test_sizes(faces):
    """Header and body caps."""
    start = time.monotonic()
    host, _, port = faces.address.rpartition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
        client.sendall(head + b"Content-Length: 100000000\r\n\r\n")
        assert b" 413 " in client.makefile("rb").readline()  # before the 100 MB are sent
    with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
        try:
            client.sendall(head + b"X: " + b"y" * 10**6)
            assert client.makefile("rb").readline()[:12] in (b"", b"HTTP/1.1 431")
        except ConnectionError:
            pass
    code, message = faces.grpc_error(text="x" * 5 * 10**6)
    assert (code, "larger than max" in message) == ("RESOURCE_EXHAUSTED", True)
    assert time.monotonic() - start < SECONDS
    assert faces.untouched()


HOSTILE: list[tuple[str, Any]] = [  # more in `text/test_structured.py`
    ("regex", "(" * 30_000),
    ("json", {"$ref": "http://evil.example/x"}),
    ("grammar", "start: nowhere"),
    ("choice", ["x" * 70_000]),
]
"""Compiled off the event loop, with limits; the engine never sees them."""


@pytest.mark.parametrize(("kind", "source"), HOSTILE)
def test_hostile_grammars(faces, kind, source):
    start = time.monotonic()
    error = faces.http_error(structured_outputs={kind: source})
    assert error == (400, f"structured_outputs.{kind}")
    value = json.dumps(source) if isinstance(source, dict) else source
    asked = pb.StructuredOutputs(**{kind: pb.Choices(texts=value) if kind == "choice" else value})
    code, message = faces.grpc_error(structured_outputs=asked)
    assert code == "INVALID_ARGUMENT"
    assert message.startswith(f"structured_outputs.{kind}: ")
    assert time.monotonic() - start < SECONDS
    assert faces.untouched()


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((a{0,100}){0,100}){0,100}"])
def test_grammars_that_begin_well(faces, regex):
    """Where a step takes too much work, that request ends, and says why."""
    start = time.monotonic()
    response = faces.post(structured_outputs={"regex": regex})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert response.json()["error"]["message"].startswith("structured")
        code, message = faces.grpc_error(structured_outputs=pb.StructuredOutputs(regex=regex))
        assert code == "INVALID_ARGUMENT"
        assert message.startswith("structured_outputs")
    assert time.monotonic() - start < SECONDS
    assert faces.post().json()["choices"][0]["text"] == "one two three"


def test_long_prompts_are_tokenised_beside_the_event_loop(faces, monkeypatch):
    begun, go_on = threading.Semaphore(0), threading.Event()
    encode = faces.generator.encode

    def slow(*arguments: Any, **options: Any) -> list[int]:
        begun.release()
        assert go_on.wait(SECONDS)
        return encode(*arguments, **options)

    monkeypatch.setattr(faces.generator, "encode", slow)
    long = "x" * 1000
    attacks: list[Callable[[], object]] = [
        lambda: faces.post(prompt=long),
        lambda: faces.grpc_error(text=long),
    ]
    threads = [threading.Thread(target=attack) for attack in attacks]
    for thread in threads:
        thread.start()
    assert begun.acquire(timeout=SECONDS)
    assert begun.acquire(timeout=SECONDS)
    assert httpx.get(f"http://{faces.address}/health", timeout=SECONDS).status_code == 200
    code, _ = rpc_error(faces.stub.Abort, pb.AbortRequest(request_id="x"), timeout=SECONDS)
    assert code == "NOT_FOUND"
    go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert faces.untouched()


def test_templates():
    """Templates with fuel, kwargs by allow-list."""
    loop = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    faces = Faces(template="{% if forever %}" + loop + "{% endif %}x")
    messages = [{"role": "user", "content": "hi"}]
    faces.client.timeout = 60  # two seconds of processor time take longer on a busy machine
    chat = "/v1/chat/completions"
    kwargs = {"forever": True}
    error = faces.http_error(chat, messages=messages, chat_template_kwargs=kwargs)
    assert error == (400, "messages")
    for kwargs in ({"messages": []}, {"bos_token": "x"}, {"__class__": "x"}, {"anything": 1}):
        found = faces.http_error(chat, messages=messages, chat_template_kwargs=kwargs)
        assert found == (400, f"chat_template_kwargs.{next(iter(kwargs))}")
    assert faces.untouched()
    faces.close()


def test_a_model_folder_runs_no_code(tmp_path):
    """No auto_map, no remote code, config.json parsed by us."""
    folder = layouts.write_model(tmp_path)
    marker = folder / "ran"
    for name in ("evil.py", "modeling_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')")
    auto_map = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, "auto_map": auto_map}))
    raw_letters().save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    read_config(str(folder), ())
    assert Tokenizer.from_folder(folder).encode("a")
    assert ChatTemplate.from_folder(folder) is None
    assert not marker.exists()
    for source in sources():
        assert not source.calls & {"eval", "exec", "__import__"}, source.path
        assert "trust_remote_code" not in source.path.read_text(encoding="utf-8")


def test_errors_are_opaque(faces, caplog):
    """Opaque errors to clients."""
    faces.engine.refusal = KeyError("a secret path")
    response = faces.post(request_id="a1")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; request a1"
    code, message = faces.grpc_error(request_id="a2")
    assert (code, message) == ("INTERNAL", "internal error; request a2")
    assert caplog.text.count("KeyError: 'a secret path'") == 2
    faces.engine.refusal = None
    assert faces.untouched()


def test_tenants_share_no_prefixes(locked):
    """Prefix-cache salt per tenant."""
    for key in (ALICE, BOB):
        for salt in ("", "x"):
            fields = {"prompt": "hi", **({"cache_salt": salt} if salt else {})}
            headers = {"Authorization": f"Bearer {key}"}
            done = locked.client.post("/v1/completions", json=fields, headers=headers)
            assert done.status_code == 200
            locked.stub.Generate(
                pb.GenerateRequest(text="hi", cache_salt=salt),
                metadata=(("authorization", f"Bearer {key}"),),
                timeout=SECONDS,
            )
    salts = [params.cache_salt for params in locked.engine.params]
    assert len(salts) == 8
    assert len(set(salts)) == 4  # the same on both faces
    assert all(ALICE not in salt and BOB not in salt for salt in salts)


def test_drain(faces):
    """Drain: readiness off, new ones refused, what runs goes on; busy is alive, stuck is not."""
    call = faces.begun()
    faces.refuse()
    assert faces.client.get("/ready").status_code == 503
    assert faces.client.get("/health").status_code == 200
    assert faces.post().status_code == 503
    assert faces.grpc_error()[0] == "UNAVAILABLE"
    faces.engine.allowed = None
    assert list(call)[-1].finish.reason == pb.FINISH_REASON_STOP


def test_liveness_is_a_step_loop_that_moves(faces, monkeypatch):
    call = faces.begun()
    assert faces.client.get("/health").status_code == 200  # however long a request takes
    last = time.monotonic() - 1000
    monkeypatch.setattr(FakeEngine, "last_turn", property(lambda engine: last))
    assert faces.client.get("/health").status_code == 503
    call.cancel()
