"""Two processes of faces over one fake engine: what clients see is what one process shows them."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError, OverloadedError
from jaxserve.server import face_processes
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.face_processes import FaceProcesses
from jaxserve.server.faces import LocalFaces
from jaxserve.server.rpc import InferenceStub
from tests.jaxserve.server.faces import rpc_error
from tests.jaxserve.server.http.rig import events
from tests.jaxserve.text.fake_engine import FakeEngine, pipeline_view
from tests.jaxserve.text.letters import ids_of, write_letters
from tests.jaxserve.waiting import until

SECONDS = 30


def made(folder: Path, http_port: int = 0) -> FaceProcesses:
    settings = {"grpc_port": 0, "http_port": http_port, "processes": 2}
    server = {f"server.{key}": value for key, value in settings.items()}
    return FaceProcesses(load_deployment(folder, {"mode": "colocated", **server}), False, "text")


class Rig:
    """The processes, their engine, and clients that open a connection a request."""

    def __init__(self, folder: Path):
        self.engine = FakeEngine(ids_of("one two three"), view=pipeline_view(200))
        self.faces = made(folder)
        try:
            self.addresses = self.faces.start()
            self.health = self.get("/health").json()
            self.early = self.get("/ready").status_code
            self.faces.open(self.engine)
        except BaseException:
            self.faces.stop(0)
            raise

    def close(self) -> None:
        self.engine.close()
        self.faces.stop(5)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://{self.addresses['http']}{path}", timeout=SECONDS)

    def complete(self, **fields: Any) -> httpx.Response:
        url = f"http://{self.addresses['http']}/v1/completions"
        return httpx.post(url, json={"prompt": "hi", **fields}, timeout=SECONDS)

    def pids(self) -> set[int]:
        return {process.pid for process in self.faces._processes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Rig]:
    rig = Rig(folder)
    yield rig
    rig.close()


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """The shared one, as it was."""
    yield shared
    shared.engine.allowed = shared.engine.refusal = None
    assert shared.engine.wait_until_idle(SECONDS)


def streams(rig: Rig, channel: grpc.Channel, **fields: Any) -> Any:
    return InferenceStub(channel).GenerateStream(pb.GenerateRequest(text="hi", **fields))


def connected(rig: Rig) -> Any:
    """The connection of the process that has the only live request."""
    live = rig.faces._port.live
    (connection,) = until(lambda: len(live) == 1 and [*live.values()])
    return connection


def test_ports_answer_before_the_engine_is_there(rig):
    assert (rig.health, rig.early) == ({"status": "starting"}, 503)
    assert rig.get("/ready").status_code == 200


def test_completions(rig):
    answer = rig.complete(logprobs=2, prompt_logprobs=1).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two three", "stop")
    assert choice["logprobs"]["token_logprobs"] == [-i / 100 for i in ids_of("one two three")]
    assert answer["usage"]["total_tokens"] == 15
    chunks = events(rig.complete(stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three"
    with grpc.insecure_channel(rig.addresses["grpc"]) as channel:
        seen = list(streams(rig, channel, logit_bias={5: 1.5}, stop=["two"], seed=3))
    assert "".join(event.delta.text for event in seen) == "one "
    assert (seen[-1].finish.stop_string, rig.engine.params[-1].logit_bias) == ("two", {5: 1.5})


def test_a_grammar_is_followed_at_the_engine(rig):
    """The script does not fit it, so every token is the mask's."""
    answer = rig.complete(structured_outputs={"choice": ["two"]}).json()
    assert answer["choices"][0]["text"] == "two"
    wrong = rig.complete(structured_outputs={"regex": "("})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "structured_outputs.regex")


def test_refusals_keep_their_status_and_defects_are_opaque(rig):
    rig.engine.refusal = OverloadedError("8 requests wait already", retry_after_s=1.5)
    response = rig.complete()
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    rig.engine.refusal = KeyError("a secret path")
    response = rig.complete()
    assert (response.status_code, "secret" in response.text) == (500, False)


def test_an_abandoned_stream_and_a_deadline_free_the_engine(rig):
    rig.engine.allowed = 3
    with grpc.insecure_channel(rig.addresses["grpc"]) as channel:
        call = streams(rig, channel, request_id="left")
        next(call)
        until(lambda: rig.faces.live_ids() == ["left"])
        call.cancel()
        assert rig.engine.wait_until_idle(SECONDS)
        generate = InferenceStub(channel).Generate
        code, _ = rpc_error(generate, pb.GenerateRequest(text="hi"), timeout=0.3)
        assert code == "DEADLINE_EXCEEDED"
    assert rig.engine.wait_until_idle(SECONDS)
    until(lambda: rig.faces.live_ids() == [])


def test_requests_of_all_processes_have_one_set_of_ids(rig):
    """Whichever process a connection is served by: an id is taken once, and aborts find it."""
    rig.engine.allowed = 3
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(rig.addresses["grpc"], options) as owner:
        call = streams(rig, owner, request_id="mine")
        until(lambda: rig.faces.live_ids() == ["mine"])
        for _ in range(6):  # connections go to either process
            with grpc.insecure_channel(rig.addresses["grpc"], options) as other:
                with pytest.raises(grpc.RpcError, match="'mine' is already running"):
                    next(streams(rig, other, request_id="mine"))
                with pytest.raises(grpc.RpcError, match="no request 'yours' is running"):
                    InferenceStub(other).Abort(pb.AbortRequest(request_id="yours"))
        with grpc.insecure_channel(rig.addresses["grpc"], options) as other:
            InferenceStub(other).Abort(pb.AbortRequest(request_id="mine"), timeout=SECONDS)
        assert rpc_error(list, call) == ("CANCELLED", "the request was aborted")
    call = None
    until(lambda: not rig.faces.abort("mine"))


def test_a_lost_connection_to_the_engine_loses_no_token(rig):
    rig.engine.allowed = 3
    with grpc.insecure_channel(rig.addresses["grpc"]) as channel:
        call = streams(rig, channel)
        text = next(call).delta.text
        connected(rig).fail("cut")
        rig.engine.allowed = None
        assert text + "".join(event.delta.text for event in call) == "one two three"


def test_metrics_are_of_all_processes(rig):
    def count() -> float:
        name = 'jaxserve:generation_tokens_total{model_name="fake"} '
        lines = rig.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    until(lambda: rig.faces.live_ids() == [])  # those that were aborted have been counted
    before = count()
    for _ in range(8):
        assert rig.complete().status_code == 200
    assert count() == before + 8 * 13
    assert rig.faces.metrics.counts().generated == count()
    assert 'jaxserve:num_requests_waiting{model_name="fake"} 2.0' in rig.get("/metrics").text
    # One answer: the next may come from the other process, which has measured nothing yet.
    measured = until(lambda: rig.get("/pipeline").json()["measured"])
    assert (measured["bubble"], len(measured["timeline"])) == (0.25, 24)


def test_a_process_that_dies_is_replaced_and_its_requests_are_cancelled(rig, monkeypatch):
    monkeypatch.setattr(face_processes, "RESTART_SECONDS", 0.1)
    rig.engine.allowed = 3
    before = rig.pids()
    with grpc.insecure_channel(rig.addresses["grpc"]) as channel:
        call = streams(rig, channel)
        next(call)
        victim = int(connected(rig).name.rpartition("pid ")[2].rstrip(")"))
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert rig.engine.wait_until_idle(SECONDS)
    rig.engine.allowed = None
    until(lambda: victim not in rig.pids())
    assert len(rig.pids() - before) == 1
    while not all(process.opened.is_set() for process in rig.faces._processes):
        assert rig.complete().status_code == 200  # the others answer until it can
    for _ in range(8):
        assert rig.complete().json()["choices"][0]["text"] == "one two three"


def test_servers_that_are_open_before_they_listen_answer_the_first_request(folder):
    ports = {"server.grpc_port": 0, "server.http_port": 0}
    server = load_deployment(folder, {"mode": "colocated", **ports}).server
    faces, silent = (LocalFaces(str(folder), server, False) for _ in range(2))
    with contextlib.closing(FakeEngine(ids_of("one"))) as engine:
        for each in faces, silent:
            each.open(engine)
        addresses = faces.start()
        url = f"http://{addresses['http']}/v1/completions"
        assert httpx.post(url, json={"prompt": "hi"}, timeout=SECONDS).status_code == 200
        with grpc.insecure_channel(addresses["grpc"]) as channel:
            stream = InferenceStub(channel).GenerateStream(pb.GenerateRequest(text="hi"))
            assert "".join(event.delta.text for event in stream) == "one"
        for each in faces, silent:
            each.stop(0)


def test_the_end(folder):
    """A failed engine: clients hear it without its text, and everything ends."""
    rig = Rig(folder)
    rig.engine.allowed = 3
    pids = rig.pids()
    port = int(rig.addresses["http"].rpartition(":")[2])
    other = made(folder, port)
    with pytest.raises(ConfigError, match=r"http_port: .* in use"):
        other.start()
    other.stop(0)
    url = f"http://{rig.addresses['http']}/v1/completions"
    fields = {"prompt": "hi", "stream": True, "request_id": "a1"}
    with httpx.stream("POST", url, json=fields, timeout=SECONDS) as call:
        lines = call.iter_lines()
        assert "choices" in next(lines)
        rig.engine.fail("process 1 (ffn, host node-17, pid 4321) is gone")
        rest = [line for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["message"] == "the engine failed; request a1"
    assert rig.get("/health").status_code == 503
    rig.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(Exception, match=r"tokenizer"):
        made(tmp_path)
