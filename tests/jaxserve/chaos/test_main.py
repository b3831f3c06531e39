"""Wrong options of `python -m jaxserve.chaos` are named."""

import pytest

from jaxserve.chaos.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "configs/demo-fleet.yaml", "--faults", "kill,flood"], "--faults: flood"),
        (["--config", "configs/demo-fleet.yaml", "--kills", "0"], "--kills 0"),
        (["--config", "configs/demo-fleet.yaml", "--minutes", "-1"], "--minutes -1"),
        (["--faults", "kill"], "--config or --model"),
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
