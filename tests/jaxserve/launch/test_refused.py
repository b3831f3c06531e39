"""What a target cannot start: `golden/launch/refused.txt` lists deployments and images."""

import pytest

from jaxserve.launch.__main__ import main
from tests import golden


def test_each_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def said(command: str) -> str:
        assert main(["--config", *command.split()]) == 2
        return capsys.readouterr().err

    golden.check_each("launch/refused.txt", said)
