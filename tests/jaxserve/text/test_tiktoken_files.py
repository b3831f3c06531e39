import builtins
import contextlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

from jaxserve.config.special_tokens import AddedToken
from jaxserve.errors import CheckpointError
from jaxserve.text import tiktoken_files
from jaxserve.text.tiktoken_files import TiktokenVocabulary, read_ranks
from jaxserve.text.tokenizer import Tokenizer
from tests import golden
from tests.jaxserve.text.ranks import ADDED, BASE, RANKS, write_ranks_folder

VOCABULARY = TiktokenVocabulary(RANKS, ADDED)


def pieces(text: str) -> list[str]:
    """How the pattern cuts a text: the pieces of a vocabulary that has all of them as tokens."""
    whole = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += sorted({part.encode() for part in whole} - set(tokens), key=len)
    vocabulary = TiktokenVocabulary({token: rank for rank, token in enumerate(tokens)}, {})
    return [tokens[token_id].decode() for token_id in vocabulary.encode(text)]


@golden.table("text/cuts.yaml")
def test_how_text_is_cut(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


def merged(piece: bytes) -> list[int]:
    """Byte-pair encoding as it is defined: again and again the pair of the lowest rank."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        ranked = [
            (RANKS[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in RANKS
        ]
        if not ranked:
            return [RANKS[part] for part in parts]
        _, place = min(ranked)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


TEXTS = strategies.text(alphabet="helo wrdthing12 3中文你好é'\r\n.ab🙂EngLish") | strategies.text()


@given(strategies.text(alphabet="helowrdthingabEnL", max_size=30))
def test_merges_are_those_of_the_definition(word: str) -> None:
    """A word of small letters is one piece."""
    word = word.lower()
    expected = [RANKS[word.encode()]] if word.encode() in RANKS else merged(word.encode())
    assert VOCABULARY.encode(word) == expected


@given(TEXTS)
def test_every_text_comes_back(text: str) -> None:
    ids = VOCABULARY.encode(text)
    assert VOCABULARY.decode(ids) == text
    assert max(ids, default=0) < BASE


def test_special_tokens_in_a_text_and_in_ids() -> None:
    ids = VOCABULARY.encode("<|im_user|>the<|im_middle|>hello<|im_end|><|tool_call_begin|>")
    assert ids == [BASE + 3, RANKS[b"the"], BASE + 4, RANKS[b"hello"], BASE + 2, BASE + 5]
    # A token that is added but not special has its text.
    assert VOCABULARY.decode([*ids, BASE + 7, 10**6]) == "thehello<|tool_call_begin|>"
    assert VOCABULARY.special_ids == {BASE, BASE + 1, BASE + 2, BASE + 3, BASE + 4, BASE + 9}
    has_text = [VOCABULARY.has_text(i) for i in (0, BASE, BASE + 5, BASE + 7)]
    assert has_text == [True, False, True, False]


def test_sizes_and_spellings() -> None:
    assert VOCABULARY.size == BASE + 10
    assert VOCABULARY.longest_token == len("<|tool_call_begin|>")
    assert VOCABULARY.token_to_id("[EOS]") == BASE + 1
    assert VOCABULARY.token_to_id("hello") == RANKS[b"hello"]
    assert VOCABULARY.token_to_id("nowhere") is None


@pytest.mark.parametrize("text", ["a" * 23, " " * 23, "ab cd " * 9, "a" * 11 + " " * 25 + "b" * 9])
def test_long_runs_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The model's own code cuts after every tenth character of a run and every fortieth."""
    monkeypatch.setattr(tiktoken_files, "MAX_RUN", 10)
    monkeypatch.setattr(tiktoken_files, "MAX_CHARACTERS", 40)
    parts = list(tiktoken_files._parts(text))
    assert "".join(parts) == text
    expected: list[str] = []
    for start in range(0, len(text), 40):
        expected.append("")
        run = 0
        for place, character in enumerate(text[start : start + 40], start=start):
            same = place > start and character.isspace() == text[place - 1].isspace()
            run = run + 1 if same else 1
            if run > 10:
                expected.append("")
                run = 1
            expected[-1] += character
    assert parts == expected


def test_a_long_run_is_encoded_in_no_time() -> None:
    assert VOCABULARY.decode(VOCABULARY.encode("a" * 100_000 + " " * 100_000)).endswith(" ")


def test_a_folder_like_kimis(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_ranks_folder(tmp_path))
    assert tokenizer.bos_token_id == BASE
    assert tokenizer.eos_token_ids == {BASE + 1, BASE + 2}
    assert tokenizer.pad_token_id == BASE + 9
    assert tokenizer.vocab_size == BASE + 10
    assert tokenizer.encode("hello") == [RANKS[b"hello"]]  # no bos: nobody asks for it


def test_another_class_of_tokenizer_is_refused(tmp_path: Path) -> None:
    write_ranks_folder(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"TikTokenTokenizer"', '"OtherTokenizer"'))
    with pytest.raises(CheckpointError, match="how a OtherTokenizer cuts text is not known; known"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("tiktoken"):
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.delitem(sys.modules, "tiktoken", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"pip install 'jaxserve\[tiktoken\]'"):
        Tokenizer.from_folder(write_ranks_folder(tmp_path))


@pytest.mark.parametrize(
    "line", ["", "QQ==", "QQ== x", "Q 3", "QQ== 1 2", "QQ== 3é", "@@@@ 4", "QQ==\x004"]
)
def test_a_broken_ranks_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(f"YQ== 0\n{line or '5'}\nYg== 1\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model, line 2: expected a token in base"):
        read_ranks(path)


@given(strategies.binary(max_size=200))
def test_any_bytes_are_ranks_or_a_clear_error(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        read_ranks(path)


def test_ids_that_do_not_fit() -> None:
    names = globals() | {"AddedToken": AddedToken}
    golden.check_arguments("text/ranks.txt", CheckpointError, TiktokenVocabulary, names)
