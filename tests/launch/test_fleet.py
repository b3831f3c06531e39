"""The launcher of a fleet: which processes there are, with which addresses."""

import os
import signal
import subprocess
import sys

import pytest

from jaxserve.errors import ConfigError
from tests import golden
from tests.jaxserve.fleet.launched import REPOSITORY


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "launch"))
    import fleet

    yield fleet
    for name in ("fleet", "processes", "supervisor"):
        sys.modules.pop(name, None)


@pytest.fixture
def read(fleet):
    """Reads a shipped deployment with these settings."""

    def read(name, *settings):
        given = [word for each in settings for word in ("--set", each)]
        return fleet._deployment(["--config", f"{REPOSITORY}/configs/{name}.yaml", *given])

    return read


def names(members):
    return [member.name for member in members]


def test_as_many_workers_as_asked_whatever_addresses_the_file_has(fleet, read):
    members = fleet.fleet_of(read("demo-fleet", "prefill.workers=2", "domains=3"))
    assert names(members) == [
        *("router", "prefill worker 0", "prefill worker 1"),
        *(f"domain {number}, role decode" for number in range(3)),
    ]
    settings = members[0].arguments
    assert settings[settings.index("--set") + 1].count("127.0.0.1:") == 2
    assert members[5].arguments[-4:] == ["--role", "decode", "--worker", "2"]


def test_workers_have_each_others_weights(fleet):
    members = [fleet.Member("one", ["--role", "ffn"], 1), fleet.Member("two", [], 2)]
    one, two = fleet.with_peers(members)
    assert (one.name, one.arguments[:3]) == ("one", ["--role", "ffn", "--set"])
    own = [member.arguments[-3].removeprefix("weights.address=") for member in (one, two)]
    assert one.arguments[-1] == two.arguments[-1] == f"weights.peers={own}"
    assert len(set(own)) == 2


def test_attention_workers_and_their_ffn_worker(fleet, read):
    deployment = read("demo-fleet-afd")
    members = fleet.fleet_of(deployment)
    assert names(members) == [
        *("router", "prefill worker 0", "domain 0, role attention", "domain 1, role attention"),
        "ffn worker, role ffn",
    ]
    address = members[4].arguments[-1]
    assert f"link.addresses=['{address}']" in members[2].arguments
    assert names(fleet.fleet_of(deployment, 2))[1:4] == [
        *(f"prefill worker 0, process {number}" for number in range(2)),
        "domain 0, role attention",
    ]
    with pytest.raises(ConfigError, match=r"--processes 2: over link\.transport = pull"):
        fleet.fleet_of(read("demo-fleet-afd", "prefill.workers=0"), 2)


def test_workers_of_several_processes(fleet, read):
    members = fleet.fleet_of(read("demo-fleet"), 2)
    assert names(members) == [
        "router",
        *("prefill worker 0, process 0", "prefill worker 0, process 1"),
        *("domain 0, role decode, process 0", "domain 0, role decode, process 1"),
    ]
    first, second = members[1].arguments, members[2].arguments
    assert first[-2:] == ["--process-id", "0"]
    assert second[:-1] == first[:-1], "they meet each other"
    assert first[-8:-2] != members[3].arguments[-8:-2], "and nobody else"


def test_workers_behind_addresses_of_somebody_else(fleet, read):
    router, *workers = fleet.fleet_of(read("demo-fleet-afd"), apart=True)
    assert router.listens == ""
    assert len({address for member in workers for address in member[3:5]}) == 8
    listens, dialled = workers[0].pages
    pages = [f"pages.listen={listens}", "--set", f"pages.address={dialled}"]
    assert workers[0].arguments[-5:-2] == pages
    assert [member.pages for member in workers[1:]] == [()] * 3
    settings = " ".join(router.arguments)
    for member in workers:
        assert member.arguments[-2:] == ["--listen", member.listens]
        assert member.dialled in settings


def test_standbys_of_the_ffn_worker_and_work_that_others_do(fleet, read):
    members = fleet.fleet_of(read("demo-fleet-afd"), standbys=1)
    assert [(member.role, member.spared_by) for member in members] == [
        *(("", ""), ("prefill", "domain"), ("domain", "domain"), ("domain", "domain")),
        *(("", ""), ("", "")),
    ]
    *_, domain, first, second = members
    assert names([first, second]) == ["ffn worker, role ffn", "standby, role ffn"]
    addresses = [member.arguments[-1] for member in (first, second)]
    assert f"link.addresses={addresses}" in domain.arguments
    with pytest.raises(ConfigError, match="--standbys 1: only ffn workers have them"):
        fleet.fleet_of(read("demo-fleet"), standbys=1)


STARTED = golden.text("launch/started.txt")


def supervised(fleet, command, members, logs) -> int:
    """The exit code of the first process; all the others are started again."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    restarts = fleet.Restarts(range(1, len(members)), 0.0, ())
    try:
        return fleet.Supervisor(command, members, restarts, logs=logs).run()
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_start_that_nobody_waits_for_is_nice(fleet, monkeypatch, tmp_path, allowed):
    import supervisor

    monkeypatch.setattr(supervisor, "may_become_less_nice", lambda: allowed)
    file, before = tmp_path / "lines", os.nice(0)
    members = [
        fleet.Member("router", ["router"], 0),
        fleet.Member("worker", ["worker"], 1, role="worker", spared_by="worker"),
        fleet.Member("another", ["another"], 2, role="worker"),
    ]
    assert supervised(fleet, [sys.executable, "-c", STARTED, str(file)], members, tmp_path) == 0
    first, again = (line.split() for line in file.read_text().splitlines())
    assert first[:2] == [f"{before}", "None"]
    assert again[:2] == ([f"{before + 5}", f"{before}"] if allowed else first[:2])
    if os.geteuid() == 0:  # others may have to wait until they may
        assert (first[2], again[2]) in {("None", "None"), ("0", "5" if allowed else "0")}


AWAITED = golden.text("launch/awaited.txt")


@pytest.mark.parametrize("why", ["alone", "for long"])
def test_a_start_is_awaited_when_no_other_worker_serves_or_it_takes_long(
    fleet, monkeypatch, tmp_path, why
):
    import supervisor

    if not supervisor.may_become_less_nice():
        pytest.skip("this user may not lower a niceness")
    monkeypatch.setattr(supervisor, "PATIENCE_SECONDS", 60.0 if why == "alone" else 0.3)
    shared = {"role": "worker", "spared_by": "worker"}
    members = [
        fleet.Member("router", ["router"], 0),
        fleet.Member("one", ["one"], 1, **shared),
        fleet.Member("two", ["two"], 2, **shared),
    ]
    command = [sys.executable, "-c", AWAITED, str(tmp_path), why, f"{os.nice(0)}"]
    assert supervised(fleet, command, members, tmp_path) == 0


def test_a_process_that_cannot_be_made_at_once_is_made_later(fleet, monkeypatch, tmp_path):
    import supervisor

    monkeypatch.setattr(supervisor, "RETRY_SECONDS", 0.05)
    start, starts = supervisor.start, []

    def fails_once(*given):
        starts.append(given)
        if len(starts) == 3:
            raise BlockingIOError("no process is left")
        return start(*given)

    monkeypatch.setattr(supervisor, "start", fails_once)
    members = [fleet.Member("router", ["router"], 0), fleet.Member("worker", ["worker"], 1)]
    command = [sys.executable, "-c", STARTED, str(tmp_path / "lines")]
    assert supervised(fleet, command, members, tmp_path) == 0
    assert len(starts) == 4


def test_who_may_become_less_nice(fleet, monkeypatch):
    import supervisor

    found = supervisor.may_become_less_nice()
    code = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) - 1)"
    tried = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert found == (tried.returncode == 0)


def test_how_a_process_ended(fleet):
    import processes

    told = [processes.describe(code) for code in (0, 2, -9)]
    assert told == ["exit code 0", "exit code 2", "signal SIGKILL"]
