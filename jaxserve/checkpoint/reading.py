"""Reads rectangles of matrices from files into memory, converting and dequantising on the way.

`hf.py` decides which rectangle goes where; this module reads them on a few threads. Knows neither
JAX nor the meaning of a tensor.

Data that needs no conversion is read directly into the memory of the array. If the array has its
axes in another order, data passes through buffers that stay in a core's cache. Transposing whole
arrays in memory took longer, because the first use of new memory is slow.

Files are read with `pread` rather than a memory map: mapped pages count as the process's memory,
and with `pread` reading past the end of a file that shrank is an error, not a signal.

Files in buckets (`storage/`) are read in windows of 8 MB. Each window fetches only the rows that
devices of this process want, and small gaps between them.
"""

import bisect
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.storage.files import LocalFile, RemoteFile, open_file

SCALE_BLOCK = 128
"""Rows and columns of a file's matrix that share a scale."""

THREADS = max(2, min(os.cpu_count() or 1, 16))

REMOTE_THREADS = 32
"""Windows of files in buckets that are read concurrently."""

_WINDOW_BYTES = 8 << 20
"""Size of a window of a file in a bucket; a window is held in memory while it is copied."""
_LEAST_GAP = 64 << 10
"""Smallest gap in bytes between two wanted rows that is worth a separate request."""
_TASK_BYTES = 2 << 20
"""Bytes that a thread reads per task."""
_ROWS_ACROSS = 32
"""Rows transposed together into columns: 32 values of 2 bytes fill a cache line."""
_MOST_BUFFERS = 1024
"""Most buffers of one `preadv` (IOV_MAX)."""
_MOST_KEPT = 64
"""Most row shapes whose buffers a thread caches."""

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
    """A `Tensor`, or a `PackedTensor`, whose regions `packed.py` reads."""
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
        near = {path: file for path, file in files.items() if isinstance(file, LocalFile)}
        far = {path: file for path, file in files.items() if isinstance(file, RemoteFile)}
        tasks = list(_tasks([region for region in regions if region.tensor.path in near]))
        run = functools.partial(_run, near, on_read)
        if len(tasks) == 1:
            run(tasks[0])
        elif tasks:
            for _ in _pool(THREADS).map(run, tasks):
                pass
        if far:
            windows = _windows([region for region in regions if region.tensor.path in far])
            fetch = functools.partial(_fetch, far, on_read)
            for _ in _pool(REMOTE_THREADS).map(fetch, windows):
                pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "jaxserve-read")


def _tasks(regions: Sequence[Region]) -> Iterator[list[Region]]:
    """The regions, split and grouped into tasks of about equal size."""
    task: list[Region] = []
    size = 0
    for region in regions:
        row = max(region.columns * region.tensor.dtype.itemsize, 1)
        step = max(_TASK_BYTES // row, 1)
        for start in range(0, region.rows, step):
            task.append(_cut(region, start, min(start + step, region.rows)))
            size += task[-1].nbytes
            if size >= _TASK_BYTES // 2:
                yield task
                task, size = [], 0
    if task:
        yield task


def _cut(region: Region, start: int, stop: int) -> Region:
    """The region's rows from `start` to `stop`, as a region."""
    scales = region.scales and region.scales._replace(row=region.scales.row + start)
    first = region.first + start * region.stride
    target = region.target[start:stop]
    return region._replace(first=first, rows=stop - start, target=target, scales=scales)


def _run(files: Mapping[Path, LocalFile], on_read: Counter, task: list[Region]) -> None:
    for region in task:
        _read(files[region.tensor.path].descriptor, region)
    on_read(sum(region.nbytes for region in task))


def _windows(regions: Sequence[Region]) -> list[list[Region]]:
    """Groups the regions' rows by the window of the file where they begin. Parts of the same rows
    for several devices of this process share a window."""
    windows: dict[tuple[Path, int], list[Region]] = {}
    for region in regions:
        begin, pitch, _ = _places(region)
        start = 0
        while start < region.rows:
            window = (begin + start * pitch) // _WINDOW_BYTES
            rest = (window + 1) * _WINDOW_BYTES - begin
            stop = min(-(-rest // pitch), region.rows) if pitch else region.rows
            cut = _cut(region, start, stop)
            windows.setdefault((region.tensor.path, window), []).append(cut)
            start = stop
    return list(windows.values())


def _places(region: Region) -> tuple[int, int, int]:
    """Returns (offset of the first row in the file, distance between rows, size of a row), all in
    bytes."""
    item = region.tensor.dtype.itemsize
    begin = region.tensor.offset + region.first * item
    return begin, region.stride * item, region.columns * item


def _fetch(files: Mapping[Path, RemoteFile], on_read: Counter, window: list[Region]) -> None:
    """Reads a window's regions; rows less than `_LEAST_GAP` apart share a request."""
    rows: list[tuple[int, int]] = []
    for region in window:
        begin, pitch, width = _places(region)
        if pitch - width < _LEAST_GAP:
            rows.append((begin, begin + (region.rows - 1) * pitch + width))
        else:
            at = range(begin, begin + region.rows * pitch, pitch)
            rows += [(start, start + width) for start in at]
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(rows):
        if spans and start - spans[-1][1] < _LEAST_GAP:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    parts = files[window[0].tensor.path].read(spans)
    held = _Held([start for start, _ in spans], parts)
    for region in window:
        for some in _tasks([region]):
            for piece in some:
                _read(held, piece)
    on_read(sum(region.nbytes for region in window))


def copy_across(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Transposes matrices in memory: copies the second of each pair (a matrix or stack) into the
    first, whose memory is column-major."""
    tasks = []
    for target, values in pairs:
        for place in np.ndindex(values.shape[:-2]):
            step = max(_TASK_BYTES // max(values[place][:1].nbytes, 1), 1)
            for start in range(0, values.shape[-2], step):
                rows = slice(start, start + step)
                tasks.append((target[place][rows], values[place][rows]))
    for _ in _pool(THREADS).map(_copy_across, tasks):
        pass


def _copy_across(both: tuple[np.ndarray, np.ndarray]) -> None:
    target, rows = map(_bits, both)
    for start in range(0, len(rows), _ROWS_ACROSS):
        some = slice(start, start + _ROWS_ACROSS)
        np.copyto(target[some], rows[some])


class _Held(NamedTuple):
    """Parts of a file held in memory, with their offsets in the file."""

    starts: list[int]
    parts: list[bytes]

    def preadv(self, buffers: list[memoryview], offset: int) -> int:
        """Works like `os.preadv`: fills the buffers and returns the number of bytes."""
        place = bisect.bisect_right(self.starts, offset) - 1
        at = offset - self.starts[place]
        for buffer in buffers:
            buffer[:] = self.parts[place][at : at + buffer.nbytes]
            at += buffer.nbytes
        return at - (offset - self.starts[place])


def _read(file: int | _Held, region: Region) -> None:
    """Reads a region that is small enough for the thread's buffers."""
    stored, target = region.tensor.dtype, region.target
    same = stored == target.dtype and region.scales is None
    if same and target.strides[-1] == stored.itemsize:
        bits = _bits(target)
        at_once = bits.flags.c_contiguous and region.stride == region.columns
        _fill(file, region, bits, [] if at_once else _views(bits))
        return
    rows, views = _row_buffer(region.rows, region.columns, stored)
    _fill(file, region, _bits(rows), views)
    if not same:
        rows = _converted(rows, target.dtype, region.scales)
    if target.strides[0] < target.strides[1]:
        _copy_across((target, rows))
    else:
        np.copyto(_bits(target), _bits(rows))


def _bits(values: np.ndarray) -> np.ndarray:
    """A view as unsigned integers, since NumPy copies only its own dtypes fast."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _fill(file: int | _Held, region: Region, rows: np.ndarray, views: list[memoryview]) -> None:
    """Reads the region's rows into `rows`, whose elements are contiguous.

    Args:
      views: the same rows as memory views; needed if rows are read one by one.
    """
    item = region.tensor.dtype.itemsize
    offset, pitch = region.tensor.offset + region.first * item, region.stride * item
    width = region.columns * item
    if region.stride != region.columns:
        for index, view in enumerate(views):
            _pread(file, region, [view], width, offset + index * pitch)
    elif rows.flags.c_contiguous:
        whole = memoryview(rows.reshape(-1)).cast("B")
        _pread(file, region, [whole], whole.nbytes, offset)
    else:
        for start in range(0, len(views), _MOST_BUFFERS):
            some = views[start : start + _MOST_BUFFERS]
            _pread(file, region, some, len(some) * width, offset + start * pitch)


def _pread(
    file: int | _Held, region: Region, buffers: list[memoryview], size: int, offset: int
) -> None:
    """Fills the buffers, `size` bytes in total, from one place in the file."""
    path = region.tensor.path
    try:
        if isinstance(file, _Held):
            got = file.preadv(buffers, offset)
        else:
            got = os.preadv(file, buffers, offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if got != size:
        raise CheckpointError(f"{path} cannot be read: it ends at byte {offset + got}")


class _Buffers(threading.local):
    """Buffers of one thread, reused from read to read."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.rows: dict[tuple[int, int], tuple[np.ndarray, list[memoryview]]] = {}


_buffers = _Buffers()


def _row_buffer(rows: int, columns: int, dtype: np.dtype) -> tuple[np.ndarray, list[memoryview]]:
    """A buffer for rows, and a memory view of each row.

    Cached, because making the views takes longer than reading the rows.
    """
    key = rows, columns * dtype.itemsize
    memory = _buffer(0, rows, key[1], np.dtype(np.uint8))
    known = _buffers.rows.get(key)
    if known is None or known[0].base is not memory.base:
        if len(_buffers.rows) >= _MOST_KEPT:
            _buffers.rows.clear()
        known = _buffers.rows[key] = memory, _views(memory)
    return known[0].view(dtype), known[1]


def _views(rows: np.ndarray) -> list[memoryview]:
    return [memoryview(row).cast("B") for row in rows]


def _buffer(which: int, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """A [rows, columns] view of this thread's memory, with padded rows to avoid cache conflicts."""
    pitch = -(-columns * dtype.itemsize // 64) * 64 + 64
    memory = _buffers.memory.get(which)
    if memory is None or memory.size < rows * pitch:
        memory = _buffers.memory[which] = aligned_empty((rows * pitch,), np.dtype(np.uint8))
    return memory[: rows * pitch].view(dtype).reshape(rows, -1)[:, :columns]


def _converted(rows: np.ndarray, dtype: np.dtype, scales: BlockScales | None) -> np.ndarray:
    """The rows in another dtype, dequantised in FP32 if there are scales."""
    height, width = rows.shape
    if scales is None:
        result = _buffer(1, height, width, dtype)
        np.copyto(result, rows, casting="unsafe")
        return result
    product = _buffer(1, height, width, np.dtype(np.float32))
    np.take(_FP8_VALUES, rows.view(np.uint8), out=product, mode="clip")
    columns = (scales.column + np.arange(width)) // SCALE_BLOCK
    start = 0
    while start < height:
        block = (scales.row + start) // SCALE_BLOCK
        stop = min((block + 1) * SCALE_BLOCK - scales.row, height)
        product[start:stop] *= scales.grid[block, columns]
        start = stop
    if dtype == np.float32:
        return product
    result = _buffer(2, height, width, dtype)
    np.copyto(result, product, casting="unsafe")
    return result
