"""A digest names all bytes of a folder, as a process saw it first, and files are hashed once."""

import hashlib
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint import fingerprint
from jaxserve.checkpoint.fingerprint import Revision, file_hash, revision
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.verification import verify
from jaxserve.errors import CheckpointError
from tests.reference.tiny_step3 import write_tiny_step3

REPLACED = "was replaced by another version since this process started"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path, cache):
    """A matrix of 16 MB, of which samples are a small part."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    values = np.zeros((4096, 1024), np.float32)
    save_file({"table": values}, tmp_path / "model" / "model.safetensors")
    settle(tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def settle(path):
    """Makes a file one that was written a minute ago."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 60 * 10**9))


def flip(path, place):
    """Changes a bit of a file, whose version stays the same."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("place", [100_001, 9_999_999, 16_000_000])
def test_every_byte_counts(folder, place):
    before = Revision(folder).digest
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert Revision(folder).digest != before


def test_equal_bytes_elsewhere_have_the_same_digest(folder, tmp_path):
    before = Revision(folder).digest
    folder.rename(tmp_path / "moved")
    assert Revision(tmp_path / "moved").digest == before
    (tmp_path / "moved" / "config.json").write_text('{"layers": 3}')
    assert Revision(tmp_path / "moved").digest != before


def test_files_are_hashed_once(folder, monkeypatch):
    path = folder / "model.safetensors"
    known = hashlib.sha256(path.read_bytes()).hexdigest()
    assert file_hash(path) == known
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "advanced", None)
        assert file_hash(path) == known
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert file_hash(path) != known


def test_a_file_that_was_just_written_is_hashed_again(folder, monkeypatch):
    """A file may be written twice while its clock shows the same time."""
    path = folder / "model.safetensors"
    path.touch()
    file_hash(path)
    monkeypatch.setattr(fingerprint, "advanced", None)
    with pytest.raises(TypeError):
        file_hash(path)


def test_without_a_cache(folder, monkeypatch):
    def no_folder(name):
        raise CheckpointError("read-only")

    known = file_hash(folder / "model.safetensors")
    monkeypatch.setattr(fingerprint, "cache_folder", no_folder)
    assert file_hash(folder / "model.safetensors") == known


def test_a_flipped_bit_is_found_by_verification(folder):
    path = folder / "model.safetensors"
    assert verify(folder) == []
    flip(path, 5_000_000)
    (problem,) = verify(folder)
    assert problem.startswith(f"{path} is damaged: its SHA-256 is ")


def test_a_file_of_the_hub_s_cache_is_named_by_its_hash(folder, tmp_path):
    path, blobs = folder / "model.safetensors", tmp_path / "blobs"
    blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
    blobs.mkdir()
    path.rename(blob)
    path.symlink_to(blob)
    flip(blob, 5_000_000)
    with pytest.raises(CheckpointError, match=f"damaged.* and was {blob.name}"):
        _ = Revision(folder).digest


def test_a_folder_that_is_replaced(tmp_path, cache):
    folder = write_tiny_step3(tmp_path / "model")
    other = write_tiny_step3(tmp_path / "other", seed=1)
    before = revision(folder).digest
    HFCheckpoint(folder, read_config(folder)[1])
    folder.rename(tmp_path / "old")
    other.rename(folder)
    assert revision(folder).digest == before
    with pytest.raises(CheckpointError, match=f"{folder} {REPLACED}"):
        HFCheckpoint(folder, read_config(folder)[1])


def test_a_tokenizer_that_is_replaced(tmp_path, cache):
    folder = write_tiny_step3(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    seen = revision(folder)
    seen.check()
    (folder / "tokenizer.json").write_text('{"another": 1}')
    with pytest.raises(CheckpointError, match=REPLACED):
        seen.check()
