"""Maps a device's shard of a leaf to rectangles of tensors in files, by the leaf's `Source`.

Called by `hf.py`; `reading.py` reads the rectangles. Pure arithmetic on shapes; knows neither
families nor JAX.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from jaxserve.checkpoint.expert_stacks import ExpertStack
from jaxserve.checkpoint.packed import PackedTensor
from jaxserve.checkpoint.reading import SCALE_BLOCK, BlockScales, Region
from jaxserve.checkpoint.source import Shape, Source
from jaxserve.checkpoint.tensors import Tensor
from jaxserve.errors import CheckpointError

Ranges = tuple[tuple[int, int], ...]
"""One shard of a leaf: (start, stop) along every axis."""

Grids = Mapping[str, np.ndarray]
"""Scales of FP8 tensors, FP32 [..., ceil(out / 128), ceil(in / 128)], by the tensors' names."""


def source_regions(
    source: Source,
    tensors: Mapping[str, Tensor | PackedTensor | ExpertStack],
    grids: Grids,
    ranges: Ranges,
    target: np.ndarray,
) -> Iterator[Region]:
    """Yields the regions that fill one shard of a leaf, without its padding.

    Args:
      grids: scales of the tensors to dequantise.
      ranges: the shard, within the leaf's padded shape.
      target: destination, with the sizes of `ranges`.
    """
    for index, own, part in _parts(source, ranges, target):
        name = source.names[index]
        yield from _rectangles(source, tensors[name], grids.get(name), own, part)
    low, high = ranges[0]
    for index, more in enumerate(source.more, source.entries):
        if low <= index < high:
            yield from source_regions(more, tensors, grids, ranges[1:], target[index - low])


def seen_shape(source: Source, index: int) -> Shape:
    """Shape of the part of one tensor that the source uses."""
    view = source.view
    if view is None:
        return source.shapes[index]
    shape = list(view.shape)
    shape[view.axis] = view.stop - view.start
    return tuple(shape)


def leaf_shape(source: Source) -> Shape:
    """Shape of the leaf that the source describes, without padding."""
    first, *others = (seen_shape(source, index) for index in range(len(source.names)))
    if source.stacked:
        return (len(source.names), *first)
    axis = max(len(first) - 2, 0)  # d_out
    return (*first[:axis], first[axis] + sum(shape[axis] for shape in others), *first[axis + 1 :])


def _parts(
    source: Source, ranges: Ranges, target: np.ndarray
) -> Iterator[tuple[int, Ranges, np.ndarray]]:
    """Yields (index of a tensor, ranges within its used part, the matching part of the target)."""
    if source.stacked:
        low, high = ranges[0]
        for index in range(low, min(high, len(source.names))):
            own = clipped(ranges[1:], seen_shape(source, index))
            yield index, own, _corner(target[index - low], own, ranges[1:])
        return
    axis = max(len(ranges) - 2, 0)  # d_out
    low, high = ranges[axis]
    offset = 0
    for index in range(len(source.names)):
        shape = seen_shape(source, index)
        start, stop = max(low - offset, 0), min(high - offset, shape[axis])
        if start < stop:
            here = (*ranges[:axis], (start, stop), *ranges[axis + 1 :])
            rows = slice(start + offset - low, stop + offset - low)
            own = clipped(here, shape)
            yield index, own, _corner(target[(slice(None),) * axis + (rows,)], own, here)
        offset += shape[axis]


def clipped(ranges: Ranges, shape: Shape) -> Ranges:
    """The part of the ranges inside of a shape; stop may be below start."""
    return tuple((low, min(high, size)) for (low, high), size in zip(ranges, shape, strict=True))


def _corner(target: np.ndarray, own: Ranges, ranges: Ranges) -> np.ndarray:
    """The part of the target that is not padding."""
    sizes = zip(own, ranges, strict=True)
    return target[tuple(slice(0, max(stop - low, 0)) for (_, stop), (low, _) in sizes)]


def _rectangles(
    source: Source,
    tensor: Tensor | PackedTensor | ExpertStack,
    grid: np.ndarray | None,
    own: Ranges,
    target: np.ndarray,
) -> Iterator[Region]:
    """Yields one region per matrix (last two axes) of a tensor with further leading axes."""
    if target.size == 0:
        return
    shape, stored = tensor.shape, list(own)
    if source.view is not None:
        view = source.view
        shape = view.shape
        low, high = stored[view.axis]
        stored[view.axis] = low + view.start, high + view.start
    if len(shape) == 1:  # one row
        shape, stored, target = (1, *shape), [(0, 1), *stored], target[None]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    (row, last_row), (column, last_column) = stored[-2:]
    outer = [range(*bounds) for bounds in stored[:-2]]
    corner = row * strides[-2] + column
    for place in itertools.product(*outer):
        first = corner + sum(i * stride for i, stride in zip(place, strides, strict=False))
        where = tuple(i - bounds[0] for i, bounds in zip(place, stored, strict=False))
        yield Region(
            tensor,
            first,
            strides[-2],
            last_row - row,
            last_column - column,
            target[where],
            None if grid is None else _scales(grid, tensor, first, strides[-2]),
        )


def _scales(
    grid: np.ndarray, tensor: Tensor | PackedTensor | ExpertStack, first: int, stride: int
) -> BlockScales:
    """The scales of a rectangle whose first element has index `first` in the tensor."""
    *_, d_out, d_in = tensor.shape
    if stride != d_in:
        raise CheckpointError(f"{tensor.path}: FP8 rows of {d_in} are viewed as rows of {stride}")
    row, column = divmod(first, d_in)
    plane, row = divmod(row, d_out)
    return BlockScales(grid.reshape(-1, *grid.shape[-2:])[plane], row, column)


def block_scales(source: Source, grids: Grids, block: tuple[int, int]) -> np.ndarray:
    """Scales of a leaf whose FP8 values are kept unchanged, [..., d_out / block_out, d_in /
    block_in]. Entry (o, i) is the file's scale of the element (o·block_out, i·block_in).

    Args:
      block: (block_out, block_in) of the leaf, both divisors of 128.

    Raises:
      CheckpointError: concatenated tensors, or parts of one, would share a block.
    """
    block_out, block_in = block
    view, first = source.view, [0, 0]
    if view is not None:
        first[view.axis - len(view.shape)] = view.start
    if first[0] % block_out or first[1] % block_in:
        raise CheckpointError(
            f"{source.names} from row {first[0]} and column {first[1]}: inside a block of "
            f"{block_out} x {block_in}"
        )
    parts, offset = [], 0
    for index, name in enumerate(source.names):
        if offset % block_out and not source.stacked:
            raise CheckpointError(
                f"{name} starts at row {offset} of {source.names}, inside a block of {block_out}"
            )
        *_, d_out, d_in = seen_shape(source, index)
        offset += d_out
        rows = (first[0] + np.arange(0, d_out, block_out)) // SCALE_BLOCK
        columns = (first[1] + np.arange(0, d_in, block_in)) // SCALE_BLOCK
        parts.append(grids[name][..., rows[:, None], columns])
    scales = np.stack(parts) if source.stacked else np.concatenate(parts, axis=-2)
    further = [block_scales(more, grids, block)[None] for more in source.more]
    return np.concatenate([scales, *further])


def scale_block(d: int, count: int) -> int:
    """The block size, a divisor of 128, for which `count` blocks cover `d` elements.

    Where several sizes fit, they are equivalent.

    Raises:
      CheckpointError: no size fits.
    """
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        if -(-d // size) == count:
            return size
    raise CheckpointError(f"{count} scales for {d} elements: no block of a divisor of 128")
