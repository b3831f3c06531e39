"""Wrong options of `python -m jaxserve.chaos` are named."""

import pytest

from jaxserve.bench.launched import Launched
from jaxserve.bench.workers import BenchError
from jaxserve.chaos.__main__ import check_victims, main
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "configs/demo-fleet.yaml", "--faults", "kill,flood"], "--faults: flood"),
        (["--config", "configs/demo-fleet.yaml", "--kills", "0"], "--kills 0"),
        (["--config", "configs/demo-fleet.yaml", "--minutes", "-1"], "--minutes -1"),
        (["--faults", "kill"], "--config or --model"),
        (["--config", "configs/demo-fleet.yaml", "--faces", "http,smtp"], "--faces: smtp"),
        (["--config", "configs/demo-fleet.yaml", "--cancelled", "1.5"], "--cancelled 1.5"),
        (["--config", "configs/demo-fleet.yaml", "--resets", "2"], "only with --requests"),
        (["--config", "configs/demo-fleet.yaml", "--requests", "0"], "--requests 0"),
        (["--config", "configs/demo-fleet.yaml", "--together", "0"], "--together 0"),
    ],
)
def test_wrong_options(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys):
    assert main(["--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


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
    launched = Launched(["--fleet", "--config", "nowhere.yaml"], tmp_path)
    with pytest.raises(BenchError, match="a first process did not happen before the launcher end"):
        launched.wait(lambda: bool(launched.processes), 120.0, "a first process")
    assert launched.end() == 2
