"""The process around a server: its exit codes, its one line, and how it ends."""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import load_file, save_file

from jaxserve import serve
from jaxserve.checkpoint import tensors
from jaxserve.commands import following
from jaxserve.config.load import load_deployment
from jaxserve.config.sections import Cluster
from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.control import Identity
from jaxserve.fleet.follower import Follower
from jaxserve.server import choice
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.rpc import InferenceStub
from tests import golden
from tests.jaxserve.text.letters import write_letters
from tests.jaxserve.waiting import until
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyQwen3

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30

PROGRAM = golden.text("commands/serve_fake.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_letters(tmp_path)


class Process:
    """A `serve` process with a fake engine."""

    def __init__(self, folder: Path, mode: str = "", *arguments: str):
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, "--config", str(folder)),
                *("--set", "server.grpc_port=0", "--set", "server.http_port=0", *arguments),
            ],
            cwd=ROOT,
            env=os.environ | {"FAKE": mode, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._killer = threading.Timer(3 * SECONDS, self.popen.kill)
        self._killer.start()

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().rstrip("\n")

    def address(self) -> str:
        """Waits for the ready line; the address of gRPC."""
        return self.addresses()[0]

    def addresses(self) -> tuple[str, str]:
        """Waits for the ready line; the addresses of gRPC and HTTP."""
        here = r"(127\.0\.0\.1:\d+)"
        line = self.line()
        match = re.fullmatch(rf"ready  grpc={here}  http={here}  model=fake  .*", line)
        assert match is not None, line
        return match[1], match[2]

    def end(self) -> tuple[int, str]:
        """Waits for the end; exit code and standard error."""
        _, errors = self.popen.communicate(timeout=SECONDS)
        self._killer.cancel()
        return self.popen.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts processes, which are killed at the end."""
    started: list[Process] = []

    def start(*arguments: Any) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.end()


def health(channel: grpc.Channel) -> int:
    request = health_pb2.HealthCheckRequest()
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS).status


def stream(channel: grpc.Channel) -> Iterator[pb.GenerateStreamResponse]:
    request = pb.GenerateRequest(text="hi")
    return InferenceStub(channel).GenerateStream(request, timeout=SECONDS)


def until_the_first_token(events: Iterator[pb.GenerateStreamResponse]) -> None:
    assert next(event for event in events if event.HasField("delta"))


def until_not_serving(channel: grpc.Channel) -> None:
    until(lambda: health(channel) != health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("number", [0, 2])
def test_http_is_drained_as_well(folder: Path, start: Callable[..., Process], number: int) -> None:
    """A stream goes on to its end, /ready says no meanwhile, the admin port ended it all.

    With `number` processes for the faces, and with keys.
    """
    (folder / "keys").write_text("a-key-of-some-length\n")
    settings = ("server.admin_port=0", f"server.processes={number}")
    settings += (f"server.api_keys={folder / 'keys'}",)
    options = [word for setting in settings for word in ("--set", setting)]
    process = start(folder, "", *options, "--log-format", "json")
    ready = json.loads(process.line())
    assert (ready["message"], ready["model"]) == ("ready", "fake")
    admin, address = ready["admin"], ready["http"]
    url = f"http://{address}/v1/completions"
    fields = {"prompt": "hi", "stream": True, "max_tokens": 39}
    assert httpx.get(f"http://{address}/v1/models", timeout=SECONDS).status_code == 401
    key = {"Authorization": "Bearer a-key-of-some-length"}
    with httpx.stream("POST", url, json=fields, headers=key, timeout=SECONDS) as call:
        lines = call.iter_lines()
        assert "choices" in next(lines)
        assert httpx.get(f"http://{address}/ready", timeout=SECONDS).status_code == 200
        drained = httpx.post(f"http://{admin}/drain", json={}, headers=key, timeout=SECONDS)
        assert drained.status_code == 200
        until(lambda: httpx.get(f"http://{address}/ready", timeout=SECONDS).status_code != 200)
        assert httpx.post(url, json=fields, headers=key, timeout=SECONDS).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
    code, errors = process.end()
    assert code == 0, errors
    logged = [json.loads(line) for line in errors.splitlines()]
    answered = [line["status"] for line in logged if line.get("path") == "/v1/completions"]
    assert answered == [503, 200]


def test_what_does_not_finish_in_time_is_cut(folder: Path, start: Callable[..., Process]) -> None:
    process = start(folder, "stuck", "--set", "server.drain_seconds=0.3")
    with grpc.insecure_channel(process.address()) as channel:
        events = stream(channel)
        until_the_first_token(events)
        process.popen.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    code, errors = process.end()
    assert code == 0, errors
    assert "requests were still running after 0.3 s and are cut" in errors


def test_a_second_signal_ends_at_once(folder: Path, start: Callable[..., Process]) -> None:
    process = start(folder, "stuck")
    with grpc.insecure_channel(process.address()) as channel:
        until_the_first_token(stream(channel))
        process.popen.terminate()
        until_not_serving(channel)  # two signals at once count as one
        assert process.popen.poll() is None
        process.popen.terminate()
        assert process.end()[0] == 128 + signal.SIGTERM


def test_a_signal_before_ready_ends_at_once(folder: Path, start: Callable[..., Process]) -> None:
    process = start(folder, "slow start")
    assert process.line() == "starting"
    process.popen.terminate()
    assert process.end()[0] == 128 + signal.SIGTERM


def test_a_failed_engine_ends_the_process(folder: Path, start: Callable[..., Process]) -> None:
    process = start(folder, "failing")
    with grpc.insecure_channel(process.address()) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(channel))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert re.fullmatch("the engine failed; request [0-9a-f]{32}", caught.value.details())
    code, errors = process.end()
    assert code == 1
    assert "the engine failed: process 1 (ffn) is gone" in errors
    assert "Traceback" not in errors


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Answer to a wrong command: exit code 2 and one line."""
    assert serve.main(arguments) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("jaxserve: ")
    assert error.count("\n") == 1
    return error


def test_wrong_settings(folder, capsys, monkeypatch):
    """`golden/server/wrong_settings.txt` lists arguments behind those of a folder that is right."""
    monkeypatch.chdir(ROOT)

    def said(arguments: str) -> str:
        error = refused(["--config", str(folder), *arguments.split()], capsys)
        return error.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")

    golden.check_each("server/wrong_settings.txt", said)


def test_a_model_its_address_and_neither(folder, capsys: pytest.CaptureFixture[str]) -> None:
    options = serve.parse(
        serve.parser(), [str(folder), "--port", "8001", "--host", "::1", "--set", "lanes=2"]
    )
    assert (options.config, options.model) == (None, str(folder))
    assert options.set == ["lanes=2", "server.host=::1", "server.http_port=8001"]
    assert (serve.parse(serve.parser(), []).config, serve.parse(serve.parser(), []).set) == (
        "demo",
        [],
    )
    assert "--config demo is taken" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        serve.main(["one", "--model", "two"])
    assert capsys.readouterr().err.endswith("MODEL one and --model two: two models\n")


class TestCheck:
    """`--check`: what a deployment weighs, without its weights and its devices."""

    def test_fits_and_no_backend_is_started(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "jaxserve.serve", "--config", "deepseek-v3", "--check"],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "none that exists"},
            capture_output=True,
            text=True,
            timeout=4 * SECONDS,
        )
        assert (done.returncode, done.stderr) == (0, "")
        roles, weights = done.stdout.split("\n\n", 1)
        expected = "attention main dp 16 x tp 1 = 16 as started h800"
        assert " ".join(roles.splitlines()[1].split()) == expected
        assert weights.startswith("parameters   671.03 B (671,026,419,200), of which")
        assert "it was read as an architecture alone" in weights

    def test_does_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--config", str(ROOT / "configs/step3.yaml"), "--set", "ffn.memory_gb=16"]
        assert serve.main([*arguments, "--check"]) == 1
        output, error = capsys.readouterr()
        assert "21.75" in output
        assert error.startswith("jaxserve: the deployment does not fit:\n  weights 21.75 + activ")
        assert "of 16.00 GB (ffn.memory_gb) on each of the 16 ffn devices" in error

    def test_headers_of_quantised_weights_are_read_once(self, tmp_path, monkeypatch):
        """Although which parts are quantised is asked of them, too, and of two roles' workers."""
        TinyModel("checked", TinyQwen3()).write(tmp_path, shards=3)
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        read: list[str] = []
        real = tensors.read_header
        monkeypatch.setattr(
            tensors, "read_header", lambda path: (read.append(path.name), real(path))[1]
        )
        serve.main(["--model", str(tmp_path), "--check", "--set", "prefill.workers=1"])
        files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
        assert sorted(read) == files
        tensors.listed.cache_clear()
        serve.main(["--model", str(tmp_path), "--check"])  # chooses sizes first
        assert sorted(read[3:]) == files

    def test_weight_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Reads headers alone, which name missing tensors before anything is loaded."""
        TinyModel("checked", TinyQwen3()).write(tmp_path, shards=3)
        arguments = ["--model", str(tmp_path), "--check"]
        assert serve.main(arguments) == 0
        assert "weight files: all tensors there, 0.00 GB, headers read in 0." in (
            capsys.readouterr().out
        )
        last, first = (tmp_path / f"model-0000{n}-of-00003.safetensors" for n in (3, 1))
        tensors = load_file(first)
        name = min(n for n in tensors if n.endswith("_proj.weight"))
        shape = list(tensors[name].shape)
        tensors[name] = tensors[name][1:].copy()
        gone = sorted(tensors)[-1]
        del tensors[gone]
        save_file(tensors, first)
        last.unlink()
        assert serve.main(arguments) == 2
        error = capsys.readouterr().err
        assert f"{last.name} is missing, and model.safetensors.index.json names it" in error
        assert f"  missing {gone} [" in error
        assert f"  {name} is {[shape[0] - 1, shape[1]]}, not {shape}" in error
        first.unlink()
        first.with_name("model-00002-of-00003.safetensors").unlink()
        assert serve.main(arguments) == 2, "an index without files"
        assert "no .safetensors file" in capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_a_port_in_use_is_noticed_before_the_model_is_loaded(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["--config", str(folder), "--set", f"server.grpc_port={port}"]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(arguments, capsys)


@pytest.mark.usefixtures("signals")
def test_a_process_that_follows_answers_probes(folder, monkeypatch):
    """From before it has joined, on ports of its own, and nothing else."""
    started: dict[str, str] = {}
    follower = Follower(
        Identity(worker="", facts={}, digest="", process_id=1, host="here", processes=2),
        address="127.0.0.1:1",
        token="x",
        cluster=Cluster(),
    )

    def statuses() -> tuple[int, int, str]:
        """/ready, /health, and what gRPC says."""
        paths = [f"http://{started['http']}{path}" for path in ("/ready", "/health")]
        ready, alive = (httpx.get(path, timeout=SECONDS).status_code for path in paths)
        with grpc.insecure_channel(started["grpc"]) as channel:
            return ready, alive, health_pb2.HealthCheckResponse.ServingStatus.Name(health(channel))

    seen = []

    @contextlib.contextmanager
    def joined(*arguments: object) -> Iterator[Follower]:
        seen.append(statuses())
        yield follower

    def run() -> None:
        seen.append(statuses())
        metrics = httpx.get(f"http://{started['http']}/metrics", timeout=SECONDS).text
        assert re.search(r"^jaxserve:process_ready{.*} 1.0$", metrics, re.MULTILINE)
        assert "process_resident_memory_bytes" in metrics
        follower.last_turn -= 1000  # as if it hung in a step
        seen.append(statuses())
        url = f"http://{started['http']}/v1/completions"
        assert httpx.post(url, json={"prompt": "hi"}, timeout=SECONDS).status_code == 404
        with grpc.insecure_channel(started["grpc"]) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                InferenceStub(channel).Generate(pb.GenerateRequest(text="hi"), timeout=SECONDS)
            assert caught.value.details() == "this process takes no requests; the first one does"

    really = choice.probe_faces

    def faces(*arguments: object) -> dict[str, object]:
        made = really(*arguments)
        for name, face in made.items():
            start = face.start
            face.start = lambda name=name, start=start: started.setdefault(name, start())
        return made

    monkeypatch.setattr(choice, "probe_faces", faces)
    monkeypatch.setattr(following.bootstrap, "joined", joined)
    monkeypatch.setattr(following, "open_follower", lambda *_: argparse.Namespace(driver=None))

    def ready(*arguments: object) -> argparse.Namespace:
        follower.ready()
        return argparse.Namespace(run=run)

    monkeypatch.setattr(following, "Following", ready)
    ports = {"server.follower_grpc_port": 0, "server.follower_http_port": 0}
    arguments = ProcessArguments(process_id=1, processes=2)
    options = argparse.Namespace(timeline=None, insecure_bind=False)
    assert following.follow(load_deployment(folder, ports), options, arguments) == 0
    assert seen == [(503, 200, "NOT_SERVING"), (200, 200, "SERVING"), (200, 503, "SERVING")]


def test_a_process_that_follows_is_as_careful_with_addresses(folder: Path) -> None:
    strangers = {"server.host": "0.0.0.0", "server.follower_http_port": 0}
    with pytest.raises(ConfigError, match="--insecure-bind"):
        choice.probe_faces(load_deployment(folder, strangers), False)
    assert choice.probe_faces(load_deployment(folder, {"server.host": "0.0.0.0"}), False) == {}
