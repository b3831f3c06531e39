"""Parts of arrays that Orbax wrote are those of NumPy; what is not understood is refused."""

import json

import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings

from jaxserve.checkpoint.reading import read_regions
from jaxserve.checkpoint.zarr import open_array, read_array
from jaxserve.errors import CheckpointError

VALUES = {
    "matrix": np.arange(70 * 33, dtype=np.float32).reshape(70, 33),
    "vector": np.arange(1000, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "experts": np.arange(5 * 40 * 24, dtype=np.float32).reshape(5, 40, 24),
    "zeros": np.zeros((8, 8), np.int8),
    "fp8": np.arange(600).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(20, 30),
}


def save(folder, values, **handler):
    options = {"use_ocdbt": False, "use_zarr3": True, "use_compression": False} | handler
    tree = {name: jax.device_put(value) for name, value in values.items()}
    arguments = ocp.args.PyTreeSave(
        tree, save_args={name: ocp.SaveArgs(chunk_byte_size=1024) for name in tree}
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "block"
    save(path, VALUES)
    return path


@pytest.mark.parametrize("name", VALUES)
def test_all_of_an_array(name, folder):
    array = open_array(folder / name)
    values = read_array(array)
    assert array.nbytes == VALUES[name].nbytes
    assert values.dtype == VALUES[name].dtype
    np.testing.assert_array_equal(values.view(np.uint8), VALUES[name].view(np.uint8))


def test_there_are_several_chunks(folder):
    array = open_array(folder / "matrix")
    assert array.chunk != array.shape


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_part_of_an_array(name, data, folder):
    expected = VALUES[name].astype(np.float32)
    ranges = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size + 2))
        ranges.append((start, data.draw(st.integers(start, size + 4))))
    padded = np.pad(expected, [(0, 4)] * expected.ndim)
    target = np.zeros([stop - start for start, stop in ranges], np.float32)
    regions = open_array(folder / name).regions(tuple(ranges), target)
    read_regions(list(regions), lambda size: None)
    np.testing.assert_array_equal(target, padded[tuple(slice(*r) for r in ranges)])


def test_no_array(tmp_path):
    with pytest.raises(CheckpointError, match="x: no array: No such file"):
        open_array(tmp_path / "x")


def copy_of(folder, tmp_path, name="matrix"):
    target = tmp_path / name
    for path in (folder / name).rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(folder / name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.clear(), "metadata that is not understood"),
        (lambda tree: tree.update(zarr_format=2), "metadata that is not understood"),
        (lambda tree: tree.update(shape=[1.5]), "metadata that is not understood"),
        (lambda tree: tree.update(codecs=[]), "metadata that is not understood"),
        (lambda tree: tree.update(shape=[3]), "not an array of shards"),
        (lambda tree: tree.update(data_type="complex64"), "not an array of shards"),
        (lambda tree: tree.update(chunk_key_encoding={"name": "v2"}), "not an array of shards"),
        (lambda tree: tree.update(codecs=[{"name": "bytes"}]), "not an array of shards"),
        (
            lambda tree: tree["codecs"][0]["configuration"].update(chunk_shape=[0, 33]),
            "not an array of shards",
        ),
        (
            lambda tree: tree["codecs"][0]["configuration"].update(
                codecs=[{"name": "bytes"}, {"name": "zstd"}]
            ),
            "not an array of shards",
        ),
    ],
)
def test_other_metadata(change, message, folder, tmp_path):
    path = copy_of(folder, tmp_path) / "zarr.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=message):
        open_array(path.parent)


@pytest.mark.parametrize("options", [{"use_compression": True}, {"use_zarr3": False}], ids=str)
def test_other_ways_of_orbax(options, tmp_path):
    save(tmp_path / "block", {"matrix": VALUES["matrix"]}, **options)
    with pytest.raises(CheckpointError, match="matrix: no"):
        open_array(tmp_path / "block" / "matrix")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "too short for its index"),
        (lambda content: content[:10], "too short for its index"),
        (lambda content: content[:-16], "its index is damaged"),
        (lambda content: content[16:], "its index is damaged"),
        (lambda content: content[:-20] + b"\xff" * 20, "its index is damaged"),
        (None, "cannot be read: No such file"),
    ],
)
def test_damaged_shards(change, message, folder, tmp_path):
    path = copy_of(folder, tmp_path)
    shard = next(p for p in (path / "c").rglob("*") if p.is_file())
    if change is None:
        shard.unlink()
    else:
        shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        read_array(open_array(path))
