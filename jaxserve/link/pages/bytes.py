"""A piece of a hand-off as bytes in host memory: from arrays to the wire, from there to arrays.

On the wire the arrays of a piece follow each other, each padded to `ALIGNMENT`: so a piece is read
by one call into one buffer, which XLA adopts on CPUs where it lies, without a copy. Both ends take
its checksum. Used by `server.py` and `connection.py`; knows no connections.
"""

import math
import mmap
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

ALIGNMENT = 64
"""Bytes; what XLA asks of memory that it is to use as it is."""
KEPT_BUFFERS = 16
"""Unused buffers that are kept for later pieces; memory that is new has to be faulted in."""
CHECKED_WORDS = 509
"""Words of 64 bits in a row of the sums that a checksum takes: prime, so that bytes which lie some
pages of memory from where they belong add to other columns."""


def piece_bytes(shapes: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes of a piece of such arrays on the wire."""
    return sum(_padded(_size(shape)) for shape in shapes)


def sent_views(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """The bytes of a piece's arrays.

    Waits for every array to be computed; on CPUs its own memory is given, which nobody may write
    to meanwhile.

    Raises:
      RuntimeError: an array could not be computed.
    """
    for array in arrays:
        array.copy_to_host_async()
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def sent_parts(views: Sequence[np.ndarray]) -> Iterator[memoryview]:
    """The bytes of a piece, to be sent one after the other."""
    for data in views:
        yield memoryview(data)
        if padding := _padded(data.nbytes) - data.nbytes:
            yield memoryview(bytes(padding))


def received_views(buffer: np.ndarray, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """The bytes of a piece's arrays where they lie in what was received."""
    views, start = [], 0
    for shape in shapes:
        size = _size(shape)
        views.append(buffer[start : start + size])
        start += _padded(size)
    return views


def received_arrays(
    views: Sequence[np.ndarray], shapes: Sequence[jax.ShapeDtypeStruct]
) -> Sequence[jax.Array]:
    """The arrays of a piece, where their shardings say; the memory is theirs from now on."""
    arrays = [
        view.view(shape.dtype).reshape(shape.shape)
        for view, shape in zip(views, shapes, strict=True)
    ]
    return jax.device_put(arrays, [shape.sharding for shape in shapes])


def checksum(views: Sequence[np.ndarray], begin: bytes = b"") -> int:
    """32 bits of a piece's bytes, and of `begin`, which says what they are asked for.

    The CRC-32 of the columns' sums, modulo 2**64, of rows of `CHECKED_WORDS`, and of what is left.
    The sums notice whatever changes one word, words that are lost, and words that stand in another
    column, at the speed of memory: 46 to 53 GB/s of a piece in a core's cache, where CRC-32 of all
    bytes makes 4.3 (one core of an AMD EPYC, 2026-11-22). It is no protection against people.
    """
    found = zlib.crc32(begin)
    for view in views:
        rows = view.nbytes // (8 * CHECKED_WORDS)
        whole = rows * 8 * CHECKED_WORDS
        if rows:
            words = view[:whole].view(np.uint64).reshape(rows, CHECKED_WORDS)
            found = zlib.crc32(words.sum(axis=0), found)
        found = zlib.crc32(view[whole:], found)
    return found


class HostBuffers:
    """Memory for pieces, which returns by itself once no array lies in it any more."""

    def __init__(self) -> None:
        self._unused: dict[int, deque[mmap.mmap]] = {}

    def take(self, size: int) -> np.ndarray:
        """A buffer of so many bytes, aligned to pages, of arbitrary content."""
        unused = self._unused.setdefault(size, deque(maxlen=KEPT_BUFFERS))
        try:
            memory = unused.pop()
        except IndexError:
            memory = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = np.frombuffer(memory, np.uint8)
        weakref.finalize(buffer, unused.append, memory).atexit = False
        return buffer


def _size(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * np.dtype(shape.dtype).itemsize


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
