"""Manifests and checksums."""

import zlib

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from jaxserve.checkpoint.manifest import (
    BLOCKS,
    FORMAT,
    MANIFEST,
    Conversion,
    Manifest,
    StoredLeaf,
    read_manifest,
)
from jaxserve.checkpoint.records import checksum, write_record
from jaxserve.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / BLOCKS).mkdir()
    return tmp_path


class TestManifest:
    def test_round_trip(self, folder):
        leaf = StoredLeaf((2, 3), "float32", "0123")
        made = Conversion(FORMAT, "abc", "int8", "bfloat16")
        manifest = Manifest(made, {"a": [1, 1e-6]}, {"f": "0a"}, {"head": {"norm": leaf}})
        write_record(folder / MANIFEST, manifest)
        assert read_manifest(folder) == manifest
        assert [path.name for path in folder.iterdir() if path.is_file()] == [MANIFEST]

    def test_other_folders_have_none(self, tmp_path):
        (tmp_path / MANIFEST).write_text("of something else")
        assert read_manifest(tmp_path) is None

    def test_another_format(self, folder):
        conversion = Conversion(FORMAT + 1, "abc", "int8", "bfloat16")
        write_record(folder / MANIFEST, Manifest(conversion, {}, {}, {}))
        with pytest.raises(CheckpointError, match=r"format 3, and this version reads 2"):
            read_manifest(folder)

    @pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"conversion": 3}'])
    def test_damaged(self, content, folder):
        (folder / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
            read_manifest(folder)


class TestChecksum:
    def test_by_its_definition(self):
        values = np.arange(10_000, dtype=np.uint64)
        rows = np.zeros((3, 4096), np.uint64)
        rows.reshape(-1)[:10_000] = values
        columns = zlib.crc32(rows.sum(axis=0).tobytes())
        assert checksum(values) == f"{columns:08x}{zlib.crc32(rows.sum(axis=1).tobytes()):08x}"

    def test_literally(self):
        assert checksum(np.zeros((0, 3), np.float32)) == f"{zlib.crc32(bytes(32768)):08x}00000000"
        assert checksum(np.arange(5, dtype=np.int8)) == checksum(
            np.array([0x0403020100], np.uint64)
        )

    @given(
        size=st.integers(1, 5000),
        place=st.integers(0, 4999),
        bit=st.integers(0, 15),
        dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    )
    def test_every_bit_counts(self, size, place, bit, dtype):
        values = np.arange(size, dtype=np.uint16)
        before = checksum(values.view(dtype))
        values[place % size] ^= 1 << bit
        assert checksum(values.view(dtype)) != before

    @pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 4096), (5, 200_000), (4096, 131_072)])
    def test_order_counts(self, a, b):
        values = np.arange(1_000_000, dtype=np.uint64)
        before = checksum(values)
        values[[a, b]] = values[[b, a]]
        assert checksum(values) != before

    def test_of_what_is_not_contiguous(self):
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        assert checksum(values.T) == checksum(values.T.copy()) != checksum(values)
