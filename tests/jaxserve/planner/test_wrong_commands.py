"""Command lines of `plan` that are wrong: `golden/planner/wrong.txt` lists them."""

import pytest

from jaxserve.config.shipped import CONFIGS
from jaxserve.plan import main
from tests import golden


def test_each_is_told_with_its_option(capsys: pytest.CaptureFixture[str]):
    def said(command: str) -> str:
        assert main(command.split()) == 2
        return capsys.readouterr().err.replace(str(CONFIGS), "CONFIGS")

    golden.check_each("planner/wrong.txt", said)
