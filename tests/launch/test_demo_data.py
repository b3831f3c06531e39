"""The demo's training text: how the standard library is divided, and where its files are cut."""

import string
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, strategies

from launch import demo_data
from launch.demo_data import SourceFile, WindowStream, cut, load_corpus, pack, train_tokenizer
from tests import golden

LIBRARY = yaml.safe_load(golden.text("launch/library.yaml"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "latin.py").write_bytes(b"\xff")
    return tmp_path


def names(files: list[SourceFile]) -> list[str]:
    return [file.name for file in files]


def test_the_split_goes_by_names_whatever_else_is_there(root: Path) -> None:
    corpus = load_corpus(root)
    assert names(corpus.held_out) == ["m85.py", "m93.py"]
    assert names(corpus.library) == ["heapq.py", "json/decoder.py"]
    assert names(corpus.test) == ["json/tests/test_x.py", "test/test_heapq.py"]
    assert corpus.held_out[0].text == "held out"
    (root / "new_one.py").write_text("new")
    assert load_corpus(root).held_out == corpus.held_out


def test_the_parts_of_the_running_library_are_disjoint() -> None:
    corpus = load_corpus()
    parts = [set(names(part)) for part in (corpus.library, corpus.test, corpus.held_out)]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert len(parts[2]) >= 10
    stems = [{Path(name).stem for name in part} for part in parts]
    assert not {f"test_{stem}" for stem in stems[2]} & stems[1]


def test_a_folder_without_a_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no standard library source text under"):
        load_corpus(tmp_path)


LINES = strategies.lists(
    strategies.text(alphabet=string.ascii_letters + " é", max_size=80), max_size=120
)


@given(strategies.text(alphabet=string.ascii_letters, min_size=1, max_size=9), LINES)
def test_parts_join_to_the_text_and_are_the_same_each_time(name: str, lines: list[str]) -> None:
    """At least every other cut is at the end of a line."""
    text = "".join(line + "\n" for line in lines)
    parts = cut(SourceFile(name, text))
    assert "".join(parts) == text
    assert all(parts)
    assert cut(SourceFile(name, text)) == parts
    cuts = len(text) // demo_data.CUT_CHARACTERS
    assert len(parts) <= cuts + 1
    anywhere = [part for part in parts[1:] if not part.startswith("\n")]
    assert len(anywhere) <= cuts // 2


def test_where_a_file_is_cut_depends_on_its_name() -> None:
    text = "".join(f"line {number}\n" for number in range(1000))
    assert cut(SourceFile("a.py", text)) != cut(SourceFile("b.py", text))


def test_packed_files_have_their_ends_and_their_text() -> None:
    files = [SourceFile("a.py", "def f():\n    return 1\n" * 40), SourceFile("b.py", "x = 2\n")]
    tokenizer = train_tokenizer((file.text for file in files), 300)
    stream = pack(files, tokenizer)
    assert stream.dtype == np.int32
    assert (stream == 0).sum() == (stream == 1).sum() == 2
    assert (stream[0], stream[-1]) == (0, 1)
    text = tokenizer.decode(stream.tolist(), skip_special_tokens=True)
    assert text in (files[0].text + files[1].text, files[1].text + files[0].text)


def test_windows_of_an_epoch_are_disjoint() -> None:
    tokens = np.arange(100, dtype=np.int32)
    stream = WindowStream(tokens, seed=3)
    windows = [stream.next_window(10, 1) for _ in range(9)]
    assert all((window == np.arange(window[0], window[0] + 11)).all() for window in windows)
    assert len({int(window[0]) for window in windows}) == 9
    with pytest.raises(ValueError, match="windows of 101 from 100 tokens"):
        stream.next_window(100, 1)
