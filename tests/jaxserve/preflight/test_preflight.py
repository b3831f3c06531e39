"""The checks' own behaviour, on real processes and sockets."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.fleet.arguments import TOKEN_VARIABLE, ProcessArguments
from jaxserve.launch import __main__ as launch_main
from jaxserve.plan import main as plan
from jaxserve.ports import free_ports
from jaxserve.preflight import children, hosts, kernels, small_kernels
from jaxserve.preflight.__main__ import main
from jaxserve.preflight.kernels import judged, timed
from jaxserve.preflight.meeting import Meeting, behind
from jaxserve.preflight.outcomes import Failed, Outcome, Skipped, run, table
from pallas_kernels.rotate_and_write import cases

TOKEN = "0123456789abcdef"


def meetings(count=2):
    ports = free_ports(2)
    return [
        Meeting(
            ProcessArguments(
                process_id=number,
                processes=count,
                coordinator=f"127.0.0.1:{ports[0]}",
                control_address=f"127.0.0.1:{ports[1]}",
                token=TOKEN,
            )
        )
        for number in range(count)
    ]


def at_once(*calls):
    """Runs each on a thread of its own; returns what they return or raise."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def test_processes_meet_compare_and_notice_who_leaves(monkeypatch):
    assert {behind("h:9311", "h:9310"), behind("h:9310", "h:9311")} == {"h:9312"}
    first, second = meetings()
    assert at_once(lambda: first.begin(20), lambda: second.begin(20)) == [None, None]
    assert at_once(lambda: first.gather("a", 20), lambda: second.gather([2], 20)) == [
        ["a", [2]],
        ["a", [2]],
    ]
    ahead = at_once(lambda: hosts.clock(first), lambda: hosts.clock(second))
    assert all("ms ahead" in text for text, _ in ahead)
    demo = load_deployment("demo")  # once: msgspec crashed when two threads met a type first
    reached = at_once(*(lambda m=m: hosts.ports(m, demo, []) for m in (first, second)))
    assert [text for text, _ in reached] == ["2 ports answer"] * 2
    of_first = iter(["0.1", "0.2"])
    monkeypatch.setattr(hosts, "PACKAGES", ("jaxlib",))
    monkeypatch.setattr(hosts.importlib.metadata, "version", lambda name: next(of_first))
    monkeypatch.setattr(hosts.doctor, "versions", list)
    wrong = at_once(lambda: hosts.versions(first), lambda: hosts.versions(second))
    assert "jaxlib: process 0 0." in str(wrong[0])
    assert [type(one) for one in wrong] == [Failed, Failed]
    with second:
        pass
    with first, pytest.raises(Failed, match="process 1 has left"):
        first.gather(None, 20)


def test_a_process_that_does_not_come_is_named():
    first, _, third = meetings(3)
    other = meetings(4)[3]
    other._address = first._address
    with first, third:
        found = at_once(lambda: first.begin(2), lambda: third.begin(20), lambda: other.begin(20))
    assert str(found[0]).startswith("processes 1 did not come to 127.0.0.1:")
    assert "processes = 4, here 3" in str(found[2])


def test_a_port_of_the_file_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Failed, match=f"{address} of the command line cannot be listened on"):
            hosts.ports(Meeting(ProcessArguments()), load_deployment("demo"), [address])


def test_outcomes_in_a_table():
    def failing():
        raise Failed("first line\nsecond", {"kept": 1})

    def skipping():
        raise Skipped("one process")

    ticks = iter(range(99))
    found = [
        run("ports", failing, lambda: next(ticks), 1),
        run("clock", skipping, lambda: next(ticks), 0),
        run("clock", skipping, lambda: next(ticks), 1),
        run("layer", lambda: 1 / 0, lambda: next(ticks), 0),
    ]
    assert found[0] == Outcome("ports", "failed", "first line\nsecond", 1, 1, {"kept": 1})
    assert table(found).splitlines() == [
        "skipped  clock     1.0 s  [0, 1]  one process",
        "failed   ports     1.0 s  [1]  first line",
        "         second",
        "failed   layer     1.0 s  [0]  ZeroDivisionError: division by zero",
    ]


def test_a_hanging_check_ends_at_its_deadline_with_its_last_words(tmp_path: Path):
    words = ["-c", "import time; print('at work', flush=True); time.sleep(99)"]
    child = children.Child(words, tmp_path / "said.txt")
    try:
        while not child.output.read_text():
            time.sleep(0.01)
        with pytest.raises(Failed, match=r"no end within 0\.1 s; its last lines:\nat work"):
            children._wait(child, 0.1)
    finally:
        child.end()


def test_a_wrong_kernel_is_named():
    right = {"case": "step3", "format": "int8", "correct": True, "backend": "mosaic_gpu"}
    plain = {"case": "step3", "format": "fp8", "correct": True, "backend": "reference"}
    assert judged([right, plain])[0] == "2 of 2 cases as the reference; plain XLA in fp8"
    with pytest.raises(Failed, match="step3 int8: off by"):
        judged([right | {"correct": False, "error": 0.5}])


def test_small_operations_are_compared_with_the_cpus(tmp_path, monkeypatch):
    """One that adds more each time it is compiled is wrong; so are rows in 8 bits off by two."""
    every = small_kernels.operations()
    names = [name for name, *_ in every]
    assert names[:11] == [f"rotate_and_write {case.name}" for case in cases.gpu_cases()]
    assert names[11:] == [*small_kernels.PLAIN, "quantise int8", "quantise fp8", "sampler"]
    chosen, counter = [every[2], every[14], every[-1]], itertools.count()
    wrong = "wrong", (lambda x, _: x + next(counter)), every[14][2]
    monkeypatch.setattr(small_kernels, "operations", lambda: [*chosen, wrong])
    small_kernels.main([str(tmp_path / "found.json")])
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    with pytest.raises(Failed, match="3 of 4 cases as the reference\nwrong : off by"):
        judged(results)
    rows = np.full(100, 7, np.int8)
    assert small_kernels.distance([rows + np.int8(1)], [rows]) == 0
    assert small_kernels.distance([rows + np.int8(2)], [rows]) == 1


def test_times_of_layers_beside_their_rooflines_and_counts():
    layer = {"op": "attend", "model": "step3", "batch": 128, "context": 4096, "format": "fp8"}
    known = layer | {"device_kind": "NVIDIA H100 80GB HBM3", "seconds": 1e-3}
    assert timed([known])[0].startswith("1 layers of Step-3 timed, ")
    assert "times their rooflines" in timed([known])[0]
    assert "\nstep3: attend_moe counted " in timed([known])[0]
    other = known | {"device_kind": "quick run on cpu"}
    assert timed([other]) == ("1 layers of Step-3 timed", {"measurements": [other]})
    card = json.loads(Path("measured/nvidia-h100-80gb-hbm3-2026-11-28.json").read_bytes())
    assert "14 layers of Step-3 timed, 1.03 to 2.05 times" in timed(card["measurements"])[0]


class LateChild:
    """Writes a result and does not end in time."""

    code = None
    last_words = list
    end = list

    def __init__(self, words, output, environment):
        Path(words[-1]).write_text('[{"seconds": 1.0}]')


def test_a_late_check_keeps_what_it_had_measured(monkeypatch):
    monkeypatch.setattr(children, "Child", LateChild)
    with pytest.raises(Failed, match="no end") as caught:
        kernels.times(0.01)
    assert caught.value.details == {"measurements": [{"seconds": 1.0}]}


def test_a_rendering_for_a_preflight_runs_it_with_the_options_of_serve(monkeypatch, capsys):
    monkeypatch.setattr(launch_main, "refuse_unfit", lambda *given: "")  # launch has its own tests
    words = ["--config", "demo", "--target", "systemd", "--without-keys"]
    assert launch_main.main([*words, "--preflight"]) == 0
    said = capsys.readouterr().out
    assert "-m jaxserve.preflight " in said
    assert "jaxserve.serve" not in said
    assert "--insecure-bind" in said
    with pytest.raises(SystemExit):
        main(["--config", "demo", "--insecure-bound"])
    assert main(["--config", "demo", "--insecure-bind", "--only", "nothing"]) == 2
    assert "the checks are versions, ports, clock, " in capsys.readouterr().out


def test_a_failed_check_does_not_stop_the_others(tmp_path, capsys):
    words = ["--config", "demo", "--set", "attention.memory_gb=0.001"]
    words += ["--only", "memory,ports,clock"]
    assert main([*words, "--json", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert "passed   ports" in said
    assert "attention needs 0.0" not in said
    assert "ConfigError: the deployment does not fit:" in said
    assert "1 passed, 3 skipped, 1 failed" in said


@pytest.mark.nightly
@pytest.mark.multihost
@pytest.mark.parametrize("config", ["demo", "demo-fleet-afd"])
def test_two_hosts_run_the_same_command(config, tmp_path, capsys):
    coordinator, control = (f"127.0.0.1:{port}" for port in free_ports(2))
    words = ["--config", config, "--processes", "2", "--json", str(tmp_path / "found.json")]
    words += ["--coordinator", coordinator, "--control", control]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "preflight", *words, "--process-id", str(number)],
            env={**os.environ, TOKEN_VARIABLE: TOKEN, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    tables = [host.communicate(timeout=500)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], tables
    assert all("2 processes are here" in text and " 0 failed" in text for text in tables)
    file = str(tmp_path / "found.json")
    words = ["--config", config, "--hardware", "cpu", "--timeline", file, "--calibration", file]
    assert plan(["verify", *words]) == 0
    assert "loads that were not calibrated with: 0 of" in capsys.readouterr().out
