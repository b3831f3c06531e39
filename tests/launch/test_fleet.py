"""The launcher of a fleet: which processes there are, with which addresses."""

import sys

import pytest

from tests.jaxserve.fleet.launched import REPOSITORY


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "launch"))
    import fleet

    yield fleet
    for name in ("fleet", "processes"):
        sys.modules.pop(name, None)


def test_as_many_workers_as_asked_whatever_addresses_the_file_has(fleet):
    forwarded = ["--config", f"{REPOSITORY}/configs/demo-fleet.yaml", "--set", "prefill.workers=2"]
    members = fleet.fleet_of(fleet._deployment([*forwarded, "--set", "domains=3"]))
    assert [member.name for member in members] == [
        *("router", "prefill worker 0", "prefill worker 1"),
        *(f"domain {number}, role decode" for number in range(3)),
    ]
    settings = members[0].arguments
    assert settings[settings.index("--set") + 1].count("127.0.0.1:") == 2
    assert members[5].arguments[-4:] == ["--role", "decode", "--worker", "2"]
