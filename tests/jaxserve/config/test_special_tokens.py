import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.config.special_tokens import SpecialTokens, read_special_tokens
from jaxserve.errors import CheckpointError
from tests import golden


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": [2, "3", -5]},
        generation_config=[1],
        tokenizer_config={"bos_token": "<none>", "added_tokens_decoder": {"x": {"content": "<x>"}}},
    )
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": ')
    with pytest.raises(CheckpointError) as caught:
        read_special_tokens(tmp_path)
    golden.check("config/special_tokens.txt", str(caught.value).replace(str(tmp_path), "FOLDER"))


def test_what_folders_say(tmp_path: Path) -> None:
    """`golden/config/token_files.txt` lists files: first Kimi K2, Qwen3 and Step-3."""
    default = msgspec.to_builtins(SpecialTokens(), order="deterministic")

    def said(files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        try:
            found = read_special_tokens(write(folder, **json.loads(files)))
        except CheckpointError as error:
            return str(error).replace(str(folder), "FOLDER")
        values = msgspec.to_builtins(found, order="deterministic").items()
        return "\n".join(f"{k} = {v}" for k, v in values if v != default[k]) or "nothing"

    golden.check_each("config/token_files.txt", said)
