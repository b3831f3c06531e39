import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.special_tokens import AddedToken, SpecialTokens, read_special_tokens
from jaxserve.errors import CheckpointError
from tests import golden


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_an_empty_folder_says_nothing(tmp_path: Path) -> None:
    assert read_special_tokens(tmp_path) == SpecialTokens()


def test_every_file_adds_its_ends(tmp_path: Path) -> None:
    """As Kimi K2: the text's end is spelt, the message's end is in generation_config.json."""
    write(
        tmp_path,
        config={"bos_token_id": 163584, "eos_token_id": 163585, "vocab_size": 163840},
        generation_config={"eos_token_id": 163586, "max_length": 131072},
        tokenizer_config={
            "added_tokens_decoder": {
                "163585": {"content": "[EOS]", "special": True},
                "163586": {"content": "<|im_end|>", "special": True, "lstrip": False},
                "163839": {"content": "[PAD]", "special": True},
            },
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": {"content": "[UNK]"},
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    found = read_special_tokens(tmp_path)
    assert (found.bos, found.eos, found.pad) == (163584, {163585, 163586}, 163839)
    assert found.texts == {"eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    texts = {163585: "[EOS]", 163586: "<|im_end|>", 163839: "[PAD]"}
    assert found.added == {token: AddedToken(text, special=True) for token, text in texts.items()}
    assert (found.tokenizer_class, found.vocab_size) == ("TikTokenTokenizer", 163840)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 1}, {}, {1}),
        ({"eos_token_id": [1, 5]}, {}, {1, 5}),
        ({"eos_token_id": 1}, {"eos_token_id": [163586, 163585]}, {1, 163585, 163586}),
        ({"eos_token_id": 1}, {"eos_token_id": None, "temperature": 0.6}, {1}),
        ({"text_config": None}, {}, set()),
        ({"eos_token_id": -1}, {"eos_token_id": []}, set()),
    ],
)
def test_ends_by_number(tmp_path: Path, config: Any, generation: Any, ids: set[int]) -> None:
    write(tmp_path, config=config, generation_config=generation)
    assert read_special_tokens(tmp_path).eos == ids


@pytest.mark.parametrize("wrong", [True, -3, "3", 1.5, [[1]], {"a": 1}])
def test_what_is_no_id_is_named(tmp_path: Path, wrong: Any) -> None:
    write(tmp_path, config={"pad_token_id": [1, wrong]})
    message = rf"pad_token_id {re.escape(repr(wrong))} is no token"
    with pytest.raises(CheckpointError, match=message):
        read_special_tokens(tmp_path)


def test_several_ends_and_a_nested_configuration(tmp_path: Path) -> None:
    """As Qwen3 and Step-3."""
    write(
        tmp_path,
        config={"vocab_size": 1, "text_config": {"vocab_size": 128815, "eos_token_id": [1, 2]}},
        generation_config={"eos_token_id": [151645, 151643], "pad_token_id": -1},
    )
    special = read_special_tokens(tmp_path)
    assert special.eos == {1, 2, 151645, 151643}
    assert (special.bos, special.pad, special.vocab_size) == (None, None, 128815)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 7, "content": "</s>", "special": True}], "model": None},
        {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 7}}},
        {"model": {"type": "Unigram", "vocab": [["x", 0.0]] * 7 + [["</s>", -1.5]]}},
    ],
)
def test_a_spelt_token_is_looked_up_in_tokenizer_json(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, tokenizer=tokenizer, tokenizer_config={"eos_token": {"content": "</s>"}})
    assert read_special_tokens(tmp_path).eos == {7}


def test_the_older_file_of_spellings(tmp_path: Path) -> None:
    write(
        tmp_path,
        special_tokens_map={"bos_token": "<a>", "pad_token": {"content": "<p>"}},
        tokenizer_config={
            "bos_token": "<b>",
            "added_tokens_decoder": {"3": {"content": "<b>"}},
            "add_bos_token": True,
        },
    )
    special = read_special_tokens(tmp_path)
    assert special.texts == {"bos_token": "<b>", "pad_token": "<p>"}
    assert (special.bos, special.pad, special.add_bos) == (3, None, True)


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
