from pathlib import Path

import pytest

from jaxserve.config.command_line import read_deployment
from jaxserve.errors import ConfigError


def test_a_command_names_a_file_a_folder_or_both(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "deployment.yaml"
    file.write_text("model: elsewhere\nlanes: 2\n")
    assert read_deployment(str(file), None).model == str(tmp_path / "elsewhere")
    assert read_deployment(None, str(folder), ["lanes=3"]).lanes == 3
    both = read_deployment(str(file), str(folder), ["model=ignored", "attention.dp=2"])
    assert (both.model, both.lanes, both.attention.dp) == (str(folder), 2, 2)
    assert read_deployment(str(folder), None).model == str(folder)
    with pytest.raises(ConfigError, match=r"^--model .*nowhere: no such folder"):
        read_deployment(str(file), str(tmp_path / "nowhere"))


def test_a_model_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"--model \.: no config\.json in it"):
        read_deployment(None, ".")
