"""Manifests and checksums."""

import zlib

import numpy as np
import pytest

from jaxserve.checkpoint.conversion import write_record
from jaxserve.checkpoint.manifest import (
    BLOCKS,
    FORMAT,
    MANIFEST,
    Conversion,
    Manifest,
    StoredLeaf,
    read_manifest,
)
from jaxserve.checkpoint.stored_array import checksum_of
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
        assert checksum_of([values]) == f"{columns:08x}{zlib.crc32(rows.sum(axis=1).tobytes()):08x}"

    def test_of_what_is_not_contiguous(self):
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        assert checksum_of([values.T]) == checksum_of([values.T.copy()]) != checksum_of([values])
