"""Which processes a deployment has on this host, with which addresses."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.launch.local import members as launched
from jaxserve.launch.local.members import Member, deployment_for, fleet_of, rehearsal, with_peers
from tests.jaxserve.fleet.launched import REPOSITORY


@pytest.fixture
def read():
    """Reads a shipped deployment with these settings."""

    def read(name, *settings):
        given = [word for each in settings for word in ("--set", each)]
        return deployment_for(["--config", f"{REPOSITORY}/configs/{name}.yaml", *given])

    return read


def names(members):
    return [member.name for member in members]


def test_as_many_workers_as_asked_whatever_addresses_the_file_has(read):
    members = fleet_of(read("demo-fleet", "prefill.workers=2", "domains=3"))
    assert names(members) == [
        *("router", "prefill worker 0", "prefill worker 1"),
        *(f"domain {number}, role decode" for number in range(3)),
    ]
    settings = members[0].arguments
    assert settings[settings.index("--set") + 1].count("127.0.0.1:") == 2
    assert members[5].arguments[-4:] == ["--role", "decode", "--worker", "2"]


def test_a_rehearsal_has_small_caches(read):
    """Two sequences of 64 and of 4 pages; fewer pages stay."""
    given = read("demo-fleet-afd", "ffn.memory_gb=80", "prefill.scheduler.max_length=64")
    sets = rehearsal(given)[1::2]
    assert sets[:3] == [f"{one}.memory_gb=0" for one in ("attention", "ffn", "prefill.attention")]
    assert sets[3:] == ["cache.pages=128", "prefill.cache.pages=8"]


def test_workers_have_each_others_weights():
    members = [Member("one", ["--role", "ffn"], 1), Member("two", [], 2)]
    one, two = with_peers(members)
    assert (one.name, one.arguments[:3]) == ("one", ["--role", "ffn", "--set"])
    own = [member.arguments[-3].removeprefix("weights.address=") for member in (one, two)]
    assert one.arguments[-1] == two.arguments[-1] == f"weights.peers={own}"
    assert len(set(own)) == 2


def test_attention_workers_and_their_ffn_worker(read):
    deployment = read("demo-fleet-afd")
    members = fleet_of(deployment)
    assert names(members) == [
        *("router", "prefill worker 0", "domain 0, role attention", "domain 1, role attention"),
        "ffn worker, role ffn",
    ]
    address = members[4].arguments[-1]
    assert f"link.addresses=['{address}']" in members[2].arguments
    assert names(fleet_of(deployment, 2))[1:4] == [
        *(f"prefill worker 0, process {number}" for number in range(2)),
        "domain 0, role attention",
    ]
    with pytest.raises(ConfigError, match=r"--processes 2: over link\.transport = pull"):
        fleet_of(read("demo-fleet-afd", "prefill.workers=0"), 2)


def test_workers_of_several_processes(read):
    members = fleet_of(read("demo-fleet"), 2)
    assert names(members) == [
        "router",
        *("prefill worker 0, process 0", "prefill worker 0, process 1"),
        *("domain 0, role decode, process 0", "domain 0, role decode, process 1"),
    ]
    assert members[1].arguments == members[2].arguments
    first, second, other = (dict(member.environment) for member in members[1:4])
    assert (first.pop("JAXSERVE_PROCESS_ID"), second.pop("JAXSERVE_PROCESS_ID")) == ("0", "1")
    assert first == second, "they meet each other"
    assert first["JAXSERVE_CONTROL"] != other["JAXSERVE_CONTROL"], "and nobody else"


def test_workers_behind_addresses_of_somebody_else(read):
    router, *workers = fleet_of(read("demo-fleet-afd"), apart=True)
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


def test_standbys_of_the_ffn_worker_and_work_that_others_do(read):
    members = fleet_of(read("demo-fleet-afd"), standbys=1)
    assert [(member.role, member.spared_by) for member in members] == [
        *(("", ""), ("prefill", "domain"), ("domain", "domain"), ("domain", "domain")),
        *(("ffn", ""), ("ffn", "")),
    ]
    *_, domain, first, second = members
    assert names([first, second]) == ["ffn worker, role ffn", "standby, role ffn"]
    assert [member.arguments[-4:-1] for member in (first, second)] == [
        ["--worker", number, "--listen"] for number in "01"
    ]
    addresses = [member.arguments[-1] for member in (first, second)]
    assert f"link.addresses={addresses}" in domain.arguments
    with pytest.raises(ConfigError, match="--standbys 1: only ffn workers have them"):
        fleet_of(read("demo-fleet"), standbys=1)


def test_roles_apart_whatever_runtimes_and_addresses_the_deployment_has():
    runtimes = "attention.runtime=one", "ffn.runtime=two", "link.addresses=[10.0.0.1:7]"
    keys = ("link.transport=pull", *runtimes, "ffn.processes=2", "ffn.ep=2", "link.batching=merge")
    given = ["--config", "demo", *(word for key in keys for word in ("--set", key))]
    attention, *ffn = launched.roles_apart(deployment_for(given, apart=True), standbys=0)
    assert [member.role for member in (attention, *ffn)] == ["", "ffn", "ffn"]
    addresses = [member.arguments[-1] for member in ffn]
    assert attention.arguments[-3] == f"link.addresses={addresses}"
    shards = ["--config", "demo", "--set", "ffn.ep=4", "--set", "ffn.instances=4"]
    assert len(launched.roles_apart(deployment_for(shards, apart=True), standbys=1)) == 9
