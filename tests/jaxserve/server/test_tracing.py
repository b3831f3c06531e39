"""Spans that a collector receives of requests: with a fake engine, and of a fleet."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.ports import free_ports
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.faces import LocalFaces
from jaxserve.server.rpc import InferenceStub
from jaxserve.server.tracing import Tracing
from tests import golden
from tests.jaxserve.fleet.launched import started
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import ids_of, write_letters
from tests.jaxserve.waiting import until

SECONDS = 60
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01"}

Span = dict[str, Any]


class Collector(ThreadingHTTPServer):
    """An OTLP receiver over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[Span] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span["name"] == name]


class Receiver(BaseHTTPRequestHandler):
    """Decodes the spans of one POST by the protocol's own messages."""

    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        for group in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            process = values(group.resource.attributes)
            for span in (one for scope in group.scope_spans for one in scope.spans):
                self.server.spans.append(
                    values(span.attributes)
                    | {"process": process, "name": span.name, "kind": span.kind}
                    | {"trace": span.trace_id.hex(), "id": span.span_id.hex()}
                    | {"parent": span.parent_span_id.hex(), "failed": span.status.code == 2}
                    | {"start": span.start_time_unix_nano, "end": span.end_time_unix_nano}
                )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def values(attributes: Any) -> dict[str, Any]:
    """Attributes by name; a list as a list."""

    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        found = getattr(one, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {one.key: value(one.value) for one in attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="jaxserve[tracing] is not installed")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


def test_without_the_library_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"^server\.traces: .*pip install 'jaxserve\[tracing\]'"):
        Tracing("http://127.0.0.1:4318", "front")


def test_spans_of_both_protocols(collector: Collector, tmp_path: Path) -> None:
    engine = FakeEngine(ids_of("one two three"), cached_tokens=1)
    server = Server(http_port=0, grpc_port=0, traces=collector.url)
    faces = LocalFaces(str(write_letters(tmp_path)), server, False)
    addresses = faces.start()
    faces.open(engine)
    client = httpx.Client(base_url=f"http://{addresses['http']}", headers=HEADERS)
    asked = {"prompt": "hi", "temperature": 0.5, "n": 2}
    assert client.post("/v1/completions", json=asked).status_code == 200
    with grpc.insecure_channel(addresses["grpc"]) as channel:
        rpc = InferenceStub(channel).Generate
        rpc(pb.GenerateRequest(text="hi"), metadata=list(HEADERS.items()))
    until(lambda: len(collector.spans) == 11, SECONDS)
    engine.refusal = RuntimeError("broken")
    assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 500
    until(lambda: len(collector.spans) == 12, SECONDS)
    client.close()
    faces.stop(1)
    engine.close()
    http, rpc, failed = collector.named("text_completion fake")
    assert {span["trace"] for span in collector.spans} == {TRACE}
    assert http["parent"] == rpc["parent"] == failed["parent"] == CALLER
    assert (http["kind"], http["process"]["service.name"]) == (2, "jaxserve")
    assert (failed["failed"], failed["error.type"]) == (True, "RuntimeError")
    found = {key: value for key, value in http.items() if key.startswith("gen_ai.")}
    golden.check("server/span.json", found)
    for name in ("queue", "prefill", "decode"):
        assert [s["parent"] for s in collector.named(name)] == [http["id"], http["id"], rpc["id"]]
    inner = [span for span in collector.spans if span["parent"] == rpc["id"]]
    ends = [(span["start"], span["end"]) for span in inner]
    assert [span["name"] for span in inner] == ["queue", "prefill", "decode"]
    assert ends[0][1] == ends[1][0] <= ends[1][1] == ends[2][0] <= ends[2][1]
    assert rpc["start"] <= ends[0][0]
    assert ends[2][1] <= rpc["end"]


@pytest.mark.nightly
@pytest.mark.multihost
def test_one_trace_crosses_prefill_worker_and_attention_worker(collector: Collector) -> None:
    """The demo as a fleet whose domains share an ffn worker: router → prefill → domain."""
    prefill, ffn, *domains = (f"127.0.0.1:{port}" for port in free_ports(4))
    keys: dict[str, Any] = {"server.grpc_port": 0, "server.http_port": 0}
    keys |= {"server.traces": collector.url, "link.addresses": [ffn]}
    keys |= {"fleet.prefill": [prefill], "fleet.domains": domains}
    command = ["-m", "jaxserve.launch.local", "--fleet", "--config", "configs/demo-fleet-afd.yaml"]
    for key, value in keys.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    with started(command, os.environ | {"JAX_PLATFORMS": "cpu"}) as run:
        address = run.wait_for(r"^\[0\] ready .* http=(\S+)", 300)[1]
        asked = {"messages": [{"role": "user", "content": "def f(x): " * 20}], "max_tokens": 8}
        url = f"http://{address}/v1/chat/completions"
        answer = httpx.post(url, json=asked, headers=HEADERS, timeout=300).json()
        until(lambda: len(collector.spans) >= 7, SECONDS)
        run.process.terminate()
        run.end()
    (front,) = collector.named("chat demo")
    assert (front["trace"], front["parent"]) == (TRACE, CALLER)
    assert front["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    parts = sorted((s for s in collector.spans if s is not front), key=lambda span: span["start"])
    assert {(span["trace"], span["parent"]) for span in parts} == {(TRACE, front["id"])}
    assert [(span["process"]["jaxserve.role"], span["name"]) for span in parts] == [
        *(("prefill", "queue"), ("prefill", "prefill")),
        *(("domain", "queue"), ("domain", "hand-off"), ("domain", "prefill"), ("domain", "decode")),
    ]
    assert len({span["process"]["service.instance.id"] for span in (front, *parts)}) == 3
    assert parts[-1]["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert all(front["start"] <= span["start"] <= span["end"] for span in parts)
    assert front["end"] >= parts[-1]["start"]
