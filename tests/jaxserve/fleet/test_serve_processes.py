"""How `serve` ends when it is several processes between which arrays have crossed.

An ordinary exit of the interpreter would wait for JAX's transfer server for ever, with the ports
still bound.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.rpc import InferenceStub
from tests.jaxserve.fleet.launched import Launched, launched
from tests.jaxserve.text.letters import write_letters

pytestmark = pytest.mark.multihost


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Launched]:
    """Two processes, with the failure that the test names by its parameter."""
    monkeypatch.setenv("FAILURE", getattr(request, "param", ""))
    settings = ("--set", "server.grpc_port=0", "--set", "server.http_port=-1")
    module = "tests.jaxserve.fleet.serve_process"
    with launched("--config", str(write_letters(tmp_path)), *settings, module=module) as run:
        yield run


@pytest.mark.nightly
@pytest.mark.parametrize("run", ["leader"], indirect=True)
def test_an_error_in_the_leaders_warm_up_ends_all_and_is_told(run: Launched) -> None:
    assert run.end() == 1, run.output
    error = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert re.search(rf"^\[0\] .*CRITICAL.* {error}$", run.output, re.MULTILINE), run.output
    assert re.search(rf"^\[1\] .*the leader .* ended the deployment: {error}", run.output, re.M)
    assert "process 1 (ffn" not in run.output.replace("control: process 1 (ffn", "")


@pytest.mark.nightly
@pytest.mark.parametrize("run", ["slow"], indirect=True)
def test_a_signal_during_warm_up_ends_all_and_is_told(run: Launched) -> None:
    run.wait_for(r"^\[0\] crossed")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.output
    run.wait_for(r"^\[1\] .*the leader .* ended the deployment: stopped by SIGTERM", 1.0)


@pytest.mark.parametrize("run", ["follower"], indirect=True)
def test_an_error_in_a_followers_warm_up_names_it(run: Launched) -> None:
    assert run.end() == 1, run.output
    error = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    run.wait_for(rf"^\[0\] .*CRITICAL.*process 1 \(ffn, .*\): {error}", 1.0)
    run.wait_for(r"^\[1\] RuntimeError: RESOURCE_EXHAUSTED", 1.0)  # the traceback


def test_a_signal_to_a_follower_drains_the_deployment(run: Launched) -> None:
    address = run.wait_for(r"^\[0\] ready  grpc=(\S+)")[1]
    follower = int(run.wait_for(r"control: process 1 \(ffn, host .*, pid (\d+)\) joins")[1])
    with grpc.insecure_channel(address) as channel:
        events = InferenceStub(channel).GenerateStream(pb.GenerateRequest(text="hi"))
        assert next(event for event in events if event.HasField("delta"))
        os.kill(follower, signal.SIGTERM)
        run.wait_for(r"^\[0\] .*process 1 \(ffn, .*\): SIGTERM: draining for up to 30 s")
        rest = list(events)
        assert rest[-1].finish.reason == pb.FINISH_REASON_STOP
    assert run.end() == 0, run.output
    assert "ended with" not in run.output
