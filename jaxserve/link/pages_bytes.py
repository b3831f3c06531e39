"""A piece of a hand-off as bytes in host memory: from arrays to the wire, from there to arrays.

On the wire the arrays of a piece follow each other, each padded to `ALIGNMENT`: so a piece is read
by one call into one buffer, which XLA adopts on CPUs where it lies, without a copy. Used by
`pages_server.py` and `pages_connection.py`; knows nothing of connections.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

ALIGNMENT = 64
"""Bytes; what XLA asks of memory that it is to use as it is."""
KEPT_BUFFERS = 16
"""Unused buffers that are kept for later pieces; memory that is new has to be faulted in."""


def piece_bytes(shapes: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes of a piece of such arrays on the wire."""
    return sum(_padded(_size(shape)) for shape in shapes)


def sent_parts(arrays: Sequence[jax.Array]) -> Iterator[memoryview]:
    """The bytes of a piece, to be sent one after the other.

    Waits for every array to be computed; on CPUs its own memory is given, which nobody may write
    to meanwhile.

    Raises:
      RuntimeError: an array could not be computed.
    """
    for array in arrays:
        array.copy_to_host_async()
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        yield memoryview(data)
        if padding := _padded(data.nbytes) - data.nbytes:
            yield memoryview(bytes(padding))


def received_arrays(
    buffer: np.ndarray, shapes: Sequence[jax.ShapeDtypeStruct]
) -> Sequence[jax.Array]:
    """The arrays of a piece, where their shardings say; the buffer is theirs from now on."""
    views, start = [], 0
    for shape in shapes:
        size = _size(shape)
        views.append(buffer[start : start + size].view(shape.dtype).reshape(shape.shape))
        start += _padded(size)
    return jax.device_put(views, [shape.sharding for shape in shapes])


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
