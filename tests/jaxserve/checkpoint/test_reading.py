"""Rectangles read from a file are those of NumPy, whatever their place and dtype."""

import threading

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import save_file

from jaxserve.checkpoint import reading
from jaxserve.checkpoint.reading import (
    BlockScales,
    Region,
    aligned_empty,
    copy_across,
    read_regions,
)
from jaxserve.checkpoint.tensors import read_header
from jaxserve.errors import CheckpointError
from jaxserve.storage.files import LocalFile

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e4m3fn)


def stored(folder, values):
    path = folder / "a.safetensors"
    save_file({"padding": np.ones(3, np.int8), "x": values}, path)
    return read_header(path)["x"]


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rectangle(data, tmp_path_factory):
    height, width = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 300))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    wanted = np.dtype(data.draw(st.sampled_from([dtype, np.dtype(np.float32)])))
    values = random((height, width), dtype)
    tensor = stored(tmp_path_factory.mktemp("x"), values)
    row, column = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    rows, columns = (
        data.draw(st.integers(1, height - row)),
        data.draw(st.integers(1, width - column)),
    )
    expected = values[row : row + rows, column : column + columns].astype(wanted)
    frame = np.zeros((expected.shape[0] + 2, expected.shape[1] + 3), wanted)
    target = frame[1:-1, 2:-1]
    if data.draw(st.booleans()):
        target = aligned_empty(expected.shape, wanted)
    first = row * width + column
    sizes = []
    read_regions([Region(tensor, first, width, rows, columns, target)], sizes.append)
    np.testing.assert_array_equal(target.astype(np.float64), expected.astype(np.float64))
    assert not frame[0].any()
    assert not frame[:, :2].any()
    assert sum(sizes) == rows * columns * dtype.itemsize


def test_copies_across_on_many_threads(monkeypatch):
    monkeypatch.setattr(reading, "_PIECE_BYTES", 4096)
    values = random((3, 500, 130), ml_dtypes.bfloat16)
    target = np.swapaxes(aligned_empty((3, 130, 500), values.dtype), 1, 2)
    copy_across(target, values)
    np.testing.assert_array_equal(target, values)


def test_many_pieces_on_many_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalFile, "window", 4096)
    values = random((1500, 130), ml_dtypes.bfloat16)
    tensor = stored(tmp_path, values)
    target, threads = aligned_empty((1500, 130), values.dtype), set()
    read_regions(
        [Region(tensor, 0, 130, 1500, 130, target)], lambda size: threads.add(threading.get_ident())
    )
    np.testing.assert_array_equal(target, values)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_dequantises_blocks(dtype, tmp_path):
    values = random((300, 200), ml_dtypes.float8_e4m3fn)
    grid = np.array([[1.0, 2.0], [0.5, 3.0], [4.0, 0.25]], np.float32)
    tensor = stored(tmp_path, values)
    spread = grid.repeat(128, 0).repeat(128, 1)[:300, :200]
    expected = (values.astype(np.float32) * spread).astype(dtype)[100:290, 30:150]
    target = np.zeros((190, 120), dtype)
    first = 100 * 200 + 30
    read_regions(
        [Region(tensor, first, 200, 190, 120, target, BlockScales(grid, 100, 30))],
        lambda size: None,
    )
    np.testing.assert_array_equal(target, expected)


def test_every_fp8_value(tmp_path):
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(1, 256)
    target = np.zeros((1, 256), np.float32)
    grid = np.full((1, 2), 0.5, np.float32)
    region = Region(stored(tmp_path, values), 0, 256, 1, 256, target, BlockScales(grid, 0, 0))
    read_regions([region], lambda size: None)
    np.testing.assert_array_equal(target, values.astype(np.float32) * 0.5)


def test_memory_is_aligned_as_jax_wants_it():
    for size in (1, 63, 64, 1000, 1 << 20):
        assert aligned_empty((size,), np.dtype(np.float16)).ctypes.data % 64 == 0
    assert aligned_empty((0, 3), np.dtype(np.float16)).shape == (0, 3)


def test_a_file_that_was_cut(tmp_path):
    tensor = stored(tmp_path, random((64, 64), np.float32))
    content = tensor.path.read_bytes()
    tensor.path.write_bytes(content[:-8])
    target = np.zeros((64, 64), np.float32)
    message = "a.safetensors was replaced by another version since this process started"
    with pytest.raises(CheckpointError, match=message):
        read_regions([Region(tensor, 0, 64, 64, 64, target)], lambda size: None)
