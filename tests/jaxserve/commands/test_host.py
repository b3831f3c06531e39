"""Processes that share the devices of a host: who they are, and how they end."""

import contextlib
import signal
import subprocess
import sys

import httpx
import pytest

from jaxserve.commands import host
from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import AttentionRole, FFNRole, Link
from jaxserve.engine.request import SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.fleet import devices
from jaxserve.fleet.arguments import ProcessArguments, from_arguments
from jaxserve.llm import LLM
from jaxserve.ports import free_ports
from jaxserve.serve import parser
from tests.jaxserve.fleet.launched import REPOSITORY, started

DEMO = f"{REPOSITORY}/configs/demo.yaml"
HOST = ["--process-id", "1", "--processes", "2", "--coordinator", "h:1", "--control", "h:2"]


def given(words: list[str]) -> ProcessArguments:
    environment = {"JAXSERVE_CLUSTER_TOKEN": "a secret of them all", "JAXSERVE_HOST_PROCESSES": "9"}
    return from_arguments(parser().parse_args(words), environment)


def test_processes_count_on_from_host_to_host() -> None:
    words = ["--config", "demo", "--host-processes=4", *HOST]
    this = given(words)
    assert (this.process_id, this.processes, this.host_processes) == (1, 2, 4)
    made = [given(each) for each in host.commands(this, words)]
    assert [one.process_id for one in made] == [4, 5, 6, 7]
    assert {one.processes for one in made} == {8}
    assert [one.host_process for one in made] == [0, 1, 2, 3]
    assert {one.host_processes for one in made} == {1}
    assert {(one.coordinator, one.control_address) for one in made} == {("h:1", "h:2")}


def test_what_the_cluster_says_is_of_hosts() -> None:
    slices = ["--slices", "2", "--slice", "1", "--process-id", "0", *HOST[2:]]
    words = ["--config", "demo", "--distributed", "--host-processes", "2"]
    made = host.commands(given([*words[:2], *words[3:], *slices]), [*words, *slices])
    assert not any("--distributed" in each for each in made)
    assert [given(each).process_id for each in made] == [2, 3]


def test_only_the_first_of_a_host_answers_probes() -> None:
    words = ["--config", "demo", "--host-processes=2", *HOST]
    first, second = host.commands(given(words), words)
    assert "--set=server.follower_http_port=-1" not in first
    assert "--set=server.follower_http_port=-1" in second


def test_each_has_its_devices(monkeypatch) -> None:
    deployment = Deployment(model="m", attention=AttentionRole(dp=2), ffn=FFNRole(ep=4, tp=2))
    monkeypatch.setattr(devices, "choose_platform", lambda: "cuda")

    def of_process(process: int, number: int | None) -> tuple[int, ...] | None:
        arguments = ProcessArguments(process_id=process, processes=4, host_process=number)
        return devices._own_devices(arguments, deployment)

    # Two processes with an attention device each, two with four ffn devices.
    assert [of_process(n, n) for n in range(4)] == [(0,), (1,), (2, 3, 4, 5), (6, 7, 8, 9)]
    assert (of_process(2, 0), of_process(3, 1)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert of_process(3, None) is None
    monkeypatch.setattr(devices, "choose_platform", lambda: "tpu")
    with pytest.raises(ConfigError, match="on TPUs a host has one process"):
        of_process(0, 0)


def test_roles_with_runtimes_of_their_own_have_one_process() -> None:
    deployment = Deployment(model="m", link=Link(transport="pull", addresses=("h:1",)))
    with pytest.raises(ConfigError, match="--host-processes 2: of a router, and of a worker over"):
        host.run_processes(deployment, ProcessArguments(host_processes=2), [])


def children(*codes: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-I", "-c", code]) for code in codes]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 3), 3), ((1, 0), 1)])
def test_the_first_failure_is_the_end_of_all(codes, expected) -> None:
    assert host._watch(children(*(f"exit({code})" for code in codes))) == expected


@pytest.mark.usefixtures("signals")
def test_who_does_not_end_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(host, "LAST_WORDS_SECONDS", 0.2)
    both = children("exit(1)", "import time; time.sleep(60)")
    assert host._watch(both) == 1
    assert both[1].returncode == -signal.SIGKILL


@pytest.mark.nightly
def test_two_hosts_of_two_processes_give_the_tokens_of_one() -> None:
    environment = {"JAX_PLATFORMS": "cpu", "JAXSERVE_CLUSTER_TOKEN": "a secret of them all"}
    ports = free_ports(3)
    asked = {"model": "demo", "prompt": "def f(x):", "max_tokens": 24, "temperature": 0}
    buckets = ["lanes=1", "scheduler.token_buckets=[16]", "scheduler.page_buckets=[16]"]
    buckets += ["scheduler.max_length=256", "scheduler.token_budget=16", "scheduler.slots=8"]
    sizes = [*buckets, "attention.dp=2", "ffn.ep=2", f"server.http_port={ports[2]}"]
    command = ["-u", "-m", "jaxserve.serve", "--config", "demo", "--host-processes", "2"]
    command += ["--coordinator", f"127.0.0.1:{ports[0]}", "--control", f"127.0.0.1:{ports[1]}"]
    command += [word for one in [*sizes, "server.grpc_port=0"] for word in ("--set", one)]
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(
                started([*command, "--processes", "2", "--process-id", f"{number}"], environment)
            )
            for number in range(2)
        ]
        hosts[0].wait_for("^ready  ", 300)
        url = f"http://127.0.0.1:{ports[2]}/v1/completions"
        text = httpx.post(url, json=asked, timeout=60).json()["choices"][0]["text"]
        hosts[1].process.send_signal(signal.SIGTERM)  # its first process has the leader drain all
        assert [one.end(30) for one in hosts] == [0, 0]
    with LLM(DEMO, ["mode=colocated", *buckets]) as llm:
        (alone,) = llm.generate(["def f(x):"], SamplingParams(max_tokens=24, temperature=0))
    assert text == alone.text
    assert len(text) > 20
