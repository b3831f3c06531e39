"""Wrong options of `python -m jaxserve.chaos` are named."""

import pytest

from jaxserve.bench.workers import BenchError
from jaxserve.chaos.__main__ import check_victims, main
from jaxserve.chaos.deployment import RunningDeployment
from jaxserve.errors import ConfigError
from tests import golden


def test_wrong_options(capsys):
    """`golden/chaos/wrong.txt` lists them."""

    def said(command):
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    golden.check_each("chaos/wrong.txt", said)


def test_victims_that_are_not_there():
    there = {"router": "r", "prefill": "p", "domain": "dd"}
    check_victims(["prefill"], there, 1)
    check_victims(["domain"], there, 2)
    check_victims([], there, 4)
    with pytest.raises(
        ConfigError, match="--only follower: no such process here, but domain, prefill, rou"
    ):
        check_victims(["prefill", "follower"], there, 1)
    with pytest.raises(ConfigError, match="--together 3: the roles to choose from have 2 proce"):
        check_victims(["prefill", "router"], there, 3)


def test_a_launcher_that_ends_is_not_waited_for(tmp_path):
    launched = RunningDeployment(["--fleet", "--config", "nowhere.yaml"], tmp_path)
    with pytest.raises(BenchError, match="a first process did not happen before the launcher end"):
        launched.wait(lambda: bool(launched.processes), 120.0, "a first process")
    assert launched.end() == 2
