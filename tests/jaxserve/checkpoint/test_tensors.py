"""Headers of safetensors files and the index of several: what is read, and what is refused."""

import json
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load, save_file

from jaxserve.checkpoint.tensors import INDEX, Tensor, list_tensors, read_header
from jaxserve.errors import CheckpointError
from jaxserve.storage.files import FileVersion
from tests import golden


def write(path, tree, data=b"", *, length=None):
    header = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


class TestHeader:
    def test_of_the_library(self, tmp_path):
        path = tmp_path / "a.safetensors"
        save_file(
            {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(4, np.int8)},
            path,
            metadata={"format": "pt"},
        )
        tensors = read_header(path)
        assert {n: (t.kind, t.shape) for n, t in tensors.items()} == {
            "x": ("F32", (2, 3)),
            "y": ("I8", (4,)),
        }
        for name, values in load(path.read_bytes()).items():
            start = tensors[name].offset
            assert path.read_bytes()[start : start + values.nbytes] == values.tobytes()

    def test_by_hand(self, tmp_path):
        header = json.dumps({"a": entry()}).encode()
        path = write(tmp_path / "a.safetensors", header, bytes(8))
        version = FileVersion.of(path.stat())
        assert read_header(path) == {"a": Tensor(path, "F32", (2,), 8 + len(header), version)}

    def test_empty_and_scalar_tensors(self, tmp_path):
        tree = {"none": entry(shape=(0, 3), offsets=(0, 0)), "one": entry(shape=(), offsets=(0, 4))}
        tensors = read_header(write(tmp_path / "a.safetensors", tree, bytes(4)))
        assert (tensors["none"].shape, tensors["one"].shape) == ((0, 3), ())

    def test_bad(self, tmp_path):
        """`golden/checkpoint/headers.txt` lists bytes of data and a header; [... is very deep."""
        path = tmp_path / "a.safetensors"

        def read(mistake: str) -> None:
            size, header = mistake.split(" ", 1)
            header = header.replace("EMPTY", "").replace("[...", "[" * 100_000)
            read_header(write(path, header.encode(), bytes(int(size))))

        golden.check_refused("checkpoint/headers.txt", CheckpointError, read, tmp_path)

    @pytest.mark.parametrize("length", [0, 10**6, 2**63, 2**64 - 1])
    def test_bad_length(self, length, tmp_path):
        path = write(tmp_path / "a.safetensors", {"a": entry()}, bytes(8), length=length)
        with pytest.raises(CheckpointError, match="truncated or no safetensors"):
            read_header(path)

    @given(content=st.binary(max_size=64), cut=st.integers(0, 200))
    def test_anything_else_is_refused(self, content, cut, tmp_path_factory):
        folder = tmp_path_factory.mktemp("any")
        whole = write(
            folder / "a.safetensors", {"a": entry(), "b": entry(offsets=(8, 16))}, b"x" * 16
        )
        bytes_ = whole.read_bytes()
        if cut < len(bytes_):
            whole.write_bytes(bytes_[:cut] + content)
            if bytes_ != whole.read_bytes():
                try:
                    read_header(whole)
                except CheckpointError:
                    return
                # Only data may differ.
                assert whole.read_bytes()[: len(bytes_) - 16] == bytes_[: len(bytes_) - 16]


class TestFolder:
    def folder(self, tmp_path, files, index=None):
        for name, tensors in files.items():
            save_file({t: np.ones(2, np.float32) for t in tensors}, tmp_path / name)
        if index is not None:
            (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
        return tmp_path

    def test_without_an_index_all_files_count(self, tmp_path):
        listing = list_tensors(self.folder(tmp_path, {"1.safetensors": "a", "2.safetensors": "b"}))
        assert set(listing.tensors) == {"a", "b"}
        assert listing.problems == []

    def test_with_an_index_only_its_files_count(self, tmp_path):
        files = {"1.safetensors": "a", "copy.safetensors": "a"}
        listing = list_tensors(self.folder(tmp_path, files, {"a": "1.safetensors"}))
        assert listing.tensors["a"].path == tmp_path / "1.safetensors"
        assert listing.problems == []

    def test_what_files_and_index_say_differently(self, tmp_path):
        files = {"1.safetensors": "ab", "2.safetensors": "bc", "4.safetensors": "e"}
        index = {name: f"{file}.safetensors" for name, file in zip("abcde", "12134", strict=True)}
        listing = list_tensors(self.folder(tmp_path, files, index))
        starts = ["3.safetensors is missing, and", "b is in 1.safetensors and in 2.safetensors"]
        starts.append("c is in 2.safetensors; model.safetensors.index.json says 1.safetensors")
        assert len(listing.problems) == 3
        assert all(map(str.startswith, listing.problems, starts))
        assert listing.lost == {"d"}

    def test_every_broken_file_is_named(self, tmp_path):
        folder = self.folder(tmp_path, {"1.safetensors": "a"})
        (folder / "2.safetensors").write_bytes(b"")
        (folder / "3.safetensors").write_bytes(b"12345678")
        with pytest.raises(CheckpointError) as error:
            list_tensors(folder)
        assert "2.safetensors: truncated" in str(error.value)
        assert "3.safetensors: truncated" in str(error.value)

    def test_a_bad_index(self, tmp_path):
        """`golden/checkpoint/index.txt` lists what may stand in one."""
        folder = self.folder(tmp_path, {"1.safetensors": "a"})

        def read(content: str) -> None:
            (folder / INDEX).write_text(content)
            list_tensors(folder)

        golden.check_refused("checkpoint/index.txt", CheckpointError, read, folder)
