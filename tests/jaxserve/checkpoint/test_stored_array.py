"""Parts of arrays written by Orbax equal NumPy slices; missing and damaged files are errors."""

import json
import shutil

import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.checkpoint.arrays import Leaf, read_leaf
from jaxserve.checkpoint.manifest import Packed
from jaxserve.checkpoint.stored_array import open_array, read_array
from jaxserve.errors import CheckpointError

VALUES = {
    "matrix": np.arange(70 * 33, dtype=np.float32).reshape(70, 33),
    "vector": np.arange(1000, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "experts": np.arange(5 * 40 * 24, dtype=np.float32).reshape(5, 40, 24),
    "zeros": np.zeros((8, 8), np.int8),
    "fp8": np.arange(600).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(20, 30),
}


def save(folder, values):
    options = {"use_ocdbt": False, "use_zarr3": True, "use_compression": False}
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


def test_there_are_several_chunks(folder):
    array = open_array(folder / "matrix")
    assert array.store.chunk_layout.read_chunk.shape != array.shape


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_part_of_an_array(name, data, folder):
    expected = VALUES[name].astype(np.float32)
    ranges = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size - 1))
        ranges.append((start, data.draw(st.integers(start + 1, size))))
    target = np.zeros([stop - start for start, stop in ranges], np.float32)
    size = open_array(folder / name).read_into(tuple(ranges), target)
    wanted = expected[tuple(slice(*r) for r in ranges)]
    assert size == wanted.size * VALUES[name].dtype.itemsize
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("name", VALUES)
def test_padding_is_not_read(name, folder):
    """In two shards, of which the second one may be padding alone."""
    expected, sizes = VALUES[name].astype(np.float32), []
    padded = np.pad(expected, [(0, size) for size in expected.shape], constant_values=2.0)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    leaf = Leaf(padded.shape, np.dtype(np.float32), NamedSharding(mesh, PartitionSpec("x")))
    found = read_leaf([open_array(folder / name)], leaf, sizes.append, empty=2.0)
    np.testing.assert_array_equal(found, padded)
    assert sizes == [VALUES[name].nbytes]


def test_a_part_of_int4_as_floats(tmp_path):
    """Two to a byte, the first in the lower half."""
    packed = np.frombuffer(bytes.fromhex("98badcfe10325476"), np.uint8)
    save(tmp_path / "block", {"int4": packed})
    target = np.zeros(5, np.float32)
    open_array(tmp_path / "block" / "int4", Packed("int4", (16,))).read_into(((5, 10),), target)
    assert target.tolist() == [-3, -2, -1, 0, 1]


def test_no_array(tmp_path):
    with pytest.raises(CheckpointError, match=r"x: no array: it has no zarr\.json"):
        open_array(tmp_path / "x")


def copy_of(folder, tmp_path, name="matrix"):
    return shutil.copytree(folder / name, tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.clear(),
        lambda tree: tree.update(zarr_format=2),
        lambda tree: tree.update(shape=[1.5]),
        lambda tree: tree.update(codecs=[]),
        lambda tree: tree.update(data_type="nothing"),
        lambda tree: tree["codecs"][0]["configuration"].update(chunk_shape=[0, 33]),
    ],
)
def test_damaged_metadata(change, folder, tmp_path):
    path = copy_of(folder, tmp_path) / "zarr.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="matrix: no array that can be read"):
        open_array(path.parent)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-16],
        lambda content: content[:-20] + b"\xff" * 20,
        None,
    ],
)
def test_damaged_shards(change, folder, tmp_path):
    path = copy_of(folder, tmp_path)
    shard = next(p for p in (path / "c").rglob("*") if p.is_file())
    if change is None:
        shard.unlink()
    else:
        shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(CheckpointError, match="matrix cannot be read: "):
        read_array(open_array(path))
