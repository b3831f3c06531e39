"""A device's part of a leaf is that part of the whole leaf, which NumPy makes of the tensors."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import save_file

from jaxserve.checkpoint.reading import read_regions
from jaxserve.checkpoint.regions import block_scales, scale_block, source_regions
from jaxserve.checkpoint.source import Source, View
from jaxserve.checkpoint.tensors import read_header
from jaxserve.errors import CheckpointError
from tests import golden
from tests.jaxserve.checkpoint.opened import leaf_of

SOURCES = {
    "vector": Source(("a",), ((7,),)),
    "vectors side by side": Source(("a", "b"), ((7,), (5,))),
    "matrix": Source(("a",), ((6, 5),)),
    "side by side": Source(("a", "b", "c"), ((6, 5), (1, 5), (3, 5))),
    "stack in the file": Source(("a",), ((3, 4, 5),)),
    "a tensor an expert": Source(("a", "b", "c"), ((4, 5),) * 3, stacked=True),
    "vectors stacked": Source(("a", "b"), ((5,),) * 2, stacked=True),
    "rows of each head": Source(("a",), ((4 * 7, 3),), view=View((4, 7, 3), 1, 0, 4)),
    "the other rows": Source(("a",), ((4 * 7, 3),), view=View((4, 7, 3), 1, 4, 7)),
    "columns of each head": Source(("a",), ((3, 8),), view=View((3, 2, 4), 2, 1, 3)),
    "stacked views": Source(("a", "b"), ((6, 4),) * 2, stacked=True, view=View((2, 3, 4), 1, 1, 2)),
}


def read(source, folder, values, ranges, dtype=np.float32, grids=None):
    save_file(values, folder / "a.safetensors")
    target = np.zeros([stop - start for start, stop in ranges], dtype)
    tensors = read_header(folder / "a.safetensors")
    read_regions(
        list(source_regions(source, tensors, grids or {}, ranges, target)), lambda size: None
    )
    return target


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_part_of_any_leaf(source, data, tmp_path_factory):
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    leaf = leaf_of(source, values)
    padding = [(0, data.draw(st.integers(0, 2))) for _ in leaf.shape]
    leaf = np.pad(leaf, padding)
    ranges = []
    for size in leaf.shape:
        start = data.draw(st.integers(0, size - 1))
        ranges.append((start, data.draw(st.integers(start + 1, size))))
    part = read(source, tmp_path_factory.mktemp("x"), values, tuple(ranges))
    np.testing.assert_array_equal(part, leaf[tuple(slice(*r) for r in ranges)])


def blocked(shape, seed=0):
    """FP8 values and their scales."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    grid = shape[:-2] + tuple(-(-size // 128) for size in shape[-2:])
    return values, rng.uniform(0.5, 2, grid).astype(np.float32)


def blocked_pairs(source):
    """Values and scales of every tensor of a source, by name."""
    shapes = zip(source.names, source.shapes, strict=True)
    return {name: blocked(shape, seed) for seed, (name, shape) in enumerate(shapes)}


def multiplied(values, grid):
    spread = grid.repeat(128, -2).repeat(128, -1)[..., : values.shape[-2], : values.shape[-1]]
    return values.astype(np.float32) * spread


FP8_SOURCES = {
    "matrix": Source(("a",), ((300, 200),)),
    "side by side": Source(("a", "b"), ((256, 200), (70, 200))),
    "stack in the file": Source(("a",), ((2, 300, 200),)),
    "a tensor an expert": Source(("a", "b"), ((150, 200),) * 2, stacked=True),
}


@pytest.mark.parametrize("source", FP8_SOURCES.values(), ids=FP8_SOURCES)
@pytest.mark.parametrize("block", [(128, 128), (128, 64), (32, 128), (16, 8), (2, 1)])
def test_scales_of_blocks(source, block):
    """A leaf of values times its scales is the dequantised leaf."""
    pairs = blocked_pairs(source)
    values = leaf_of(source, {name: pair[0] for name, pair in pairs.items()})
    expected = leaf_of(source, {name: multiplied(*pair) for name, pair in pairs.items()})
    *outer, d_out, d_in = values.shape
    shape = (*outer, -(-d_out // block[0]), -(-d_in // block[1]))
    grids = {name: pair[1] for name, pair in pairs.items()}
    scales = block_scales(source, grids, block)
    assert scales.shape == shape
    spread = scales.repeat(block[0], -2).repeat(block[1], -1)[..., :d_out, :d_in]
    np.testing.assert_array_equal(values.astype(np.float32) * spread, expected)


def test_side_by_side_inside_a_block():
    source = Source(("a", "b"), ((96, 200), (64, 200)))
    grids = {"a": np.ones((1, 2), np.float32), "b": np.ones((1, 2), np.float32)}
    with pytest.raises(CheckpointError, match=r"b starts at row 96 .* inside a block of 64"):
        block_scales(source, grids, (64, 128))
    assert block_scales(source, grids, (32, 128)).shape == (5, 2)


@pytest.mark.parametrize(
    "source",
    [
        *FP8_SOURCES.values(),
        Source(("a",), ((4 * 150, 200),), view=View((4, 150, 200), 1, 0, 90)),
        Source(("a",), ((4 * 150, 200),), view=View((4, 150, 200), 1, 90, 150)),
    ],
    ids=[*FP8_SOURCES, "rows of each head", "the other rows"],
)
def test_dequantised(source, tmp_path):
    pairs = blocked_pairs(source)
    leaf = leaf_of(source, {name: multiplied(*pair) for name, pair in pairs.items()})
    ranges = tuple((size // 3, size) for size in leaf.shape)
    grids = {name: pair[1] for name, pair in pairs.items()}
    values = {name: pair[0] for name, pair in pairs.items()}
    part = read(source, tmp_path, values, ranges, grids=grids)
    np.testing.assert_array_equal(part, leaf[tuple(slice(*r) for r in ranges)])


def test_block_sizes_follow_from_the_number_of_scales():
    golden.check_values("checkpoint/scale_blocks.txt", scale_block, globals())


@pytest.mark.parametrize(("d", "count"), [(7168, 1), (130, 1), (256, 3), (4, 8)])
def test_no_block_size(d, count):
    with pytest.raises(CheckpointError, match=f"{count} scales for {d} elements"):
        scale_block(d, count)
