"""A folder in a bucket is a folder here, but for its weights."""

import json
from pathlib import Path

import pytest

from jaxserve.commands import doctor
from jaxserve.errors import CheckpointError
from jaxserve.storage.mirror import _mirrored, local_folder, origin_of, user_cache, weight_files


def test_small_files(objects, tmp_path):
    small = {"config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"{{ x }}"}
    objects.files |= {f"m/{name}": data for name, data in small.items()}
    small["encoding_dsv4.py"] = objects.files["m/encoding/encoding_dsv4.py"] = b"x = 1"
    objects.files |= {"m/a.safetensors": bytes(1000), "m/b.bin": b"?", "m/deep/config.json": b"no"}
    folder = local_folder("s3://models/m")
    assert folder.parent == tmp_path / "cache" / "jaxserve" / "models"
    assert {path.name for path in folder.iterdir()} == {*small, "origin.json"}
    assert (folder / "chat_template.jinja").read_bytes() == b"{{ x }}"
    assert origin_of(folder).url == "s3://models/m"
    assert weight_files(folder) == [folder / "a.safetensors"]
    assert [span for span in objects.ranges if span[0].endswith("tensors")] == [
        ("m/a.safetensors", 0, 8)
    ]


def test_the_same_folder_while_nothing_changes(objects):
    objects.files |= {"m/config.json": b"{}", "m/a.safetensors": bytes(10)}
    first = local_folder("s3://models/m")
    _mirrored.cache_clear()
    assert local_folder("s3://models/m/") == first
    objects.files["m/a.safetensors"] = bytes(11)
    _mirrored.cache_clear()
    assert local_folder("s3://models/m") != first


def test_converted(objects):
    """The manifest is read: chunks are not listed."""
    manifest = {"files": {"config.json": "00", "../escape": "00"}, "blocks": {}}
    objects.files |= {"m/manifest.json": json.dumps(manifest).encode(), "m/config.json": b"{}"}
    folder = local_folder("s3://models/m")
    assert {path.name for path in folder.iterdir()} == {
        *("blocks", "config.json", "manifest.json", "origin.json")
    }
    # Measured afterwards: the manifest does not know it.
    objects.files["m/int8_products.json"] = b"[]"
    _mirrored.cache_clear()
    assert (local_folder("s3://models/m") / "int8_products.json").read_bytes() == b"[]"


def test_nothing_there(objects):
    with pytest.raises(CheckpointError, match="no model at s3://models/m: there is nothing"):
        local_folder("s3://models/m")


def test_local(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    assert origin_of(tmp_path) is None


@pytest.mark.parametrize(
    ("variable", "expected"), [("/of/mine", "/of/mine"), ("", "/at/.cache"), ("here", "/at/.cache")]
)
def test_only_an_absolute_folder_counts(variable, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/at")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert user_cache() == Path(expected)
    (told,) = (finding.text for finding in doctor._host() if finding.name == "compile cache")
    assert told.startswith(f"{expected}/jaxserve")
