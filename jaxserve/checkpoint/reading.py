"""Reads rectangles of matrices from files into memory, converting and dequantising on the way.

`hf.py` decides which rectangle goes where; this module reads them on a few threads. Knows neither
JAX nor the meaning of a tensor.

Files are read in windows; those of files in buckets (`storage/`) are larger. Each window fetches
only the rows that devices of this process want, and small gaps between them. The rows are then
converted and copied into the memory of the arrays.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.storage.files import LocalFile, RemoteFile, open_file

SCALE_BLOCK = 128
"""Rows and columns of a file's matrix that share a scale."""
SCALES = "_scale_inv"
"""Suffix that turns the name of a matrix into the name of its scales."""

_PIECE_BYTES = 256 << 10
"""Bytes that a thread converts and copies at a time."""
_ROWS_ACROSS = 32
"""Rows transposed together into columns: 32 values of 2 bytes fill a cache line."""

_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

Counter = Callable[[int], None]


class BlockScales(NamedTuple):
    """The scales of a rectangle of an FP8 matrix.

    Attributes:
      grid: FP32 [row blocks, column blocks] of the whole matrix.
      row, column: the rectangle's corner in the matrix.
    """

    grid: np.ndarray
    row: int
    column: int


class Region(NamedTuple):
    """A rectangle of a row-major matrix in a file, and its destination."""

    tensor: Any
    """A `Tensor`, or a `PackedTensor`, whose regions `packed_values.py` reads."""
    first: int
    """Index of its first element in the tensor."""
    stride: int
    """Elements from one of its rows to the next."""
    rows: int
    columns: int
    target: np.ndarray
    """[rows, columns], of any strides."""
    scales: BlockScales | None = None
    """Scales that FP8 values are multiplied by; None: no dequantisation."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.rows * self.columns * self.tensor.dtype.itemsize


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory aligned to 64 bytes, which JAX uses on CPU without copying."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def read_regions(regions: Sequence[Region], on_read: Counter) -> None:
    """Reads all regions into their targets, which must not overlap.

    Raises:
      CheckpointError: a file is missing, or was replaced after its header was read.
    """
    with contextlib.ExitStack() as stack:
        files: dict[Path, LocalFile | RemoteFile] = {}
        for region in regions:
            path, version = region.tensor.path, region.tensor.version
            if path not in files:
                files[path] = stack.enter_context(open_file(path, version))
        windows = _windows(regions, files)
        read = functools.partial(_read_window, files, on_read)
        if len(windows) == 1:
            read(windows[0])
        elif windows:
            for _ in _pool(max(file.threads for file in files.values())).map(read, windows):
                pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "jaxserve-read")


def _cut(region: Region, start: int, stop: int) -> Region:
    """The region's rows from `start` to `stop`, as a region."""
    scales = region.scales and region.scales._replace(row=region.scales.row + start)
    first = region.first + start * region.stride
    target = region.target[start:stop]
    return region._replace(first=first, rows=stop - start, target=target, scales=scales)


def _windows(
    regions: Sequence[Region], files: Mapping[Path, LocalFile | RemoteFile]
) -> list[list[Region]]:
    """Groups the regions' rows by the window of the file where they begin. Parts of the same rows
    for several devices of this process share a window."""
    windows: dict[tuple[Path, int], list[Region]] = {}
    for region in regions:
        begin, pitch, _ = _places(region)
        size, start = files[region.tensor.path].window, 0
        while start < region.rows:
            window = (begin + start * pitch) // size
            rest = (window + 1) * size - begin
            stop = min(-(-rest // pitch), region.rows) if pitch else region.rows
            windows.setdefault((region.tensor.path, window), []).append(_cut(region, start, stop))
            start = stop
    return list(windows.values())


def _places(region: Region) -> tuple[int, int, int]:
    """Returns (offset of the first row in the file, distance between rows, size of a row), all in
    bytes."""
    item = region.tensor.dtype.itemsize
    begin = region.tensor.offset + region.first * item
    return begin, region.stride * item, region.columns * item


def _read_window(
    files: Mapping[Path, LocalFile | RemoteFile], on_read: Counter, window: list[Region]
) -> None:
    """Reads a window's regions. Rows less than the file's `gap` apart share a read."""
    file = files[window[0].tensor.path]
    rows: list[tuple[int, int]] = []
    for region in window:
        begin, pitch, width = _places(region)
        if pitch - width < file.gap:
            rows.append((begin, begin + (region.rows - 1) * pitch + width))
        else:
            at = range(begin, begin + region.rows * pitch, pitch)
            rows += [(start, start + width) for start in at]
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(rows):
        if spans and start - spans[-1][1] < file.gap:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    parts = [np.frombuffer(part, np.uint8) for part in file.read(spans)]
    held, origin = parts[0], spans[0][0]
    if len(parts) > 1:  # every row lies in memory as far from the first one as in the file
        held = np.empty(spans[-1][1] - origin, np.uint8)
        for (start, stop), part in zip(spans, parts, strict=True):
            held[start - origin : stop - origin] = part
    for region in window:
        begin, pitch, width = _places(region)
        shape, dtype = (region.rows, region.columns), region.tensor.dtype
        _fill(region, np.ndarray(shape, dtype, held, begin - origin, (pitch, dtype.itemsize)))
    on_read(sum(region.nbytes for region in window))


def copy_across(target: np.ndarray, values: np.ndarray) -> None:
    """Transposes matrices in memory: copies `values` (a matrix or stack) into a target whose memory
    is column-major."""
    tasks = []
    for place in np.ndindex(values.shape[:-2]):
        step = max(_PIECE_BYTES // max(values[place][:1].nbytes, 1), 1)
        for start in range(0, values.shape[-2], step):
            rows = slice(start, start + step)
            tasks.append((target[place][rows], values[place][rows]))
    for _ in _pool(LocalFile.threads).map(_copy_across, tasks):
        pass


def _copy_across(both: tuple[np.ndarray, np.ndarray]) -> None:
    target, rows = map(_bits, both)
    for start in range(0, len(rows), _ROWS_ACROSS):
        some = slice(start, start + _ROWS_ACROSS)
        np.copyto(target[some], rows[some])


def _fill(region: Region, rows: np.ndarray) -> None:
    """Copies a region's rows to its target, dequantised if it has scales. Does it piece by piece,
    so that data stays in a core's cache."""
    target, dtype = region.target, region.target.dtype
    step = max(_PIECE_BYTES // max(rows[:1].nbytes, 1), 1)
    for start in range(0, len(rows), step):
        piece = _cut(region, start, min(start + step, len(rows)))
        values, target = rows[start : start + step], piece.target
        if piece.scales is not None:
            values = _dequantised(values, piece.scales)
        if values.dtype != dtype:
            values = values.astype(dtype)
        np.copyto(_bits(target), _bits(values))


def _bits(values: np.ndarray) -> np.ndarray:
    """A view as unsigned integers, since NumPy copies only its own dtypes fast."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _dequantised(rows: np.ndarray, scales: BlockScales) -> np.ndarray:
    """The products of FP8 rows and their scales, FP32."""
    height, width = rows.shape
    blocks = (scales.row + np.arange(height)) // SCALE_BLOCK
    columns = (scales.column + np.arange(width)) // SCALE_BLOCK
    product = np.take(_FP8_VALUES, rows.view(np.uint8), mode="clip")
    product *= scales.grid[blocks[0] : blocks[-1] + 1, columns][blocks - blocks[0]]
    return product
