"""Reads rectangles of the matrices that `packed.py` describes, dequantised or as INT4.

Called by `hf.py`: a process that opens a converted checkpoint does without this. Pure NumPy; knows
neither families nor JAX.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxserve.checkpoint.packed import PackedTensor
from jaxserve.checkpoint.reading import Region, read_regions
from jaxserve.errors import CheckpointError

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column (of eight) that each group of 4 bits in a word holds, from the lowest bits up."""


def read_packed(region: Region, on_read: Callable[[int], None]) -> None:
    """Fills a region of a packed matrix: computes in FP32, then rounds to the target's dtype.

    Raises:
      CheckpointError: a file is missing or has become shorter.
    """
    tensor = region.tensor
    assert isinstance(tensor, PackedTensor)
    row, column = divmod(region.first, tensor.shape[1])
    rows, columns = slice(row, row + region.rows), slice(column, column + region.columns)
    reader = _PackedReader(tensor, on_read)
    parts = {"numbers": _numbers, "codes": _codes, "scales": _scales, "zeros": _zeros}
    region.target[...] = parts[tensor.seen](reader, rows, columns).astype(region.target.dtype)


class _PackedReader(NamedTuple):
    """Reads rectangles of the tensors that make up one packed matrix."""

    tensor: PackedTensor
    on_read: Callable[[int], None]

    def floats(self, part: str, rows: slice, columns: slice) -> np.ndarray:
        return self._read(part, rows, columns, np.dtype(np.float32))

    def codes(self, part: str, rows: slice, columns: slice, packed: int) -> np.ndarray:
        """Unpacks a rectangle of int32 words into small integers, uint8.

        Args:
          rows, columns: the rectangle in the unpacked matrix.
          packed: the axis along which values are packed into words.
        """
        packing = self.tensor.packing
        (n, each), places = packing.unit, [rows, columns]
        wanted = places[packed]
        places[packed] = slice(wanted.start // n * each, packing.words(wanted.stop))
        words = self._read(part, places[0], places[1], np.dtype(np.int32)).view(np.uint32)
        if packed == 0:
            words = words.T
        if packing.bits == 3:
            stream = np.ascontiguousarray(words).view(np.uint8)
            single = np.unpackbits(stream, axis=1, bitorder="little").reshape(len(words), -1, 3)
            codes = single @ np.array([1, 2, 4], np.uint8)
        else:
            shifts = np.arange(n, dtype=np.uint32) * packing.bits
            codes = (words[..., None] >> shifts) & np.uint32((1 << packing.bits) - 1)
        if packing.layout == "awq":
            codes = codes[..., np.argsort(AWQ_COLUMNS)]
        flat = codes.astype(np.uint8).reshape(len(words), -1)
        first = wanted.start % n
        flat = flat[:, first : first + wanted.stop - wanted.start]
        return flat.T if packed == 0 else flat

    def matrix(self, rows: slice, columns: slice) -> np.ndarray:
        """Codes of a rectangle of the matrix, uint8 [rows, columns]."""
        if (layout := self.tensor.packing.layout) == "packed":
            return self.codes("weight_packed", rows, columns, packed=1)
        return self.codes("qweight", columns, rows, packed=int(layout == "awq")).T

    def zeros(self, rows: slice, groups: slice) -> np.ndarray:
        """Codes of zero points, uint8 [rows, groups]; the middle of the range if none is stored."""
        packing = self.tensor.packing
        if packing.layout != "packed":
            # With `zero_plus` 1, a zero point of 0 is stored as -1: all bits set.
            stored = self.codes("qzeros", groups, rows, packed=1).T + np.uint8(packing.zero_plus)
            return stored & np.uint8((1 << packing.bits) - 1)
        if packing.symmetric:
            shape = rows.stop - rows.start, groups.stop - groups.start
            return np.full(shape, 1 << (packing.bits - 1), np.uint8)
        return self.codes("weight_zero_point", rows, groups, packed=0)

    def scales(self, rows: slice, groups: slice) -> np.ndarray:
        """Scales, FP32 [rows, groups]."""
        if self.tensor.packing.layout == "packed":
            return self.floats("weight_scale", rows, groups)
        return self.floats("scales", groups, rows).T

    @property
    def order(self) -> str:
        """Name of the optional tensor with the scale group of each column."""
        return "weight_g_idx" if self.tensor.packing.layout == "packed" else "g_idx"

    def groups(self, columns: slice) -> np.ndarray:
        """Index of the scale group of each column (along d_in)."""
        packing, d_in = self.tensor.packing, self.tensor.shape[1]
        if self.order in self.tensor.parts:
            index = self._read(self.order, slice(0, 1), columns, np.dtype(np.int32))[0]
            if (index >= 0).all():
                return index
        return np.arange(columns.start, columns.stop) // (packing.group or d_in)

    def _read(self, part: str, rows: slice, columns: slice, dtype: np.dtype) -> np.ndarray:
        tensor = self.tensor.parts[part]
        width = tensor.shape[-1] if tensor.shape else 1
        target = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
        first = rows.start * width + columns.start
        region = Region(tensor, first, width, target.shape[0], target.shape[1], target)
        read_regions([region], self.on_read)
        return target


def _numbers(reader: _PackedReader, rows: slice, columns: slice) -> np.ndarray:
    """Dequantises a rectangle: (code - zero point) · scale."""
    if reader.tensor.packing.layout == "scaled":
        return reader.floats("weight", rows, columns) * _channel_scales(reader, rows)
    of, d_in, group = reader.groups(columns), reader.tensor.shape[1], reader.tensor.packing.group
    every = slice(0, -(-d_in // group) if group else 1)
    zeros = reader.zeros(rows, every).astype(np.float32)
    return (reader.matrix(rows, columns) - zeros[:, of]) * reader.scales(rows, every)[:, of]


def _codes(reader: _PackedReader, rows: slice, columns: slice) -> np.ndarray:
    """The codes of an INT4 matrix, -8..7. Raises CheckpointError if columns are out of order, or a
    matrix declared symmetric has zero points."""
    packing = reader.tensor.packing
    neighbours = np.arange(columns.start, columns.stop) // packing.group
    if not np.array_equal(reader.groups(columns), neighbours):
        raise CheckpointError(
            f"{reader.tensor.path}: {reader.order} has columns in an order of their own, which "
            "INT4 in memory has not: set attention.weights and ffn.weights"
        )
    groups = slice(int(neighbours[0]), int(neighbours[-1]) + 1)
    if packing.symmetric and (reader.zeros(rows, groups) != 8).any():
        raise CheckpointError(
            f"{reader.tensor.path}: quantization_config.sym is true, and there are zero points"
        )
    return reader.matrix(rows, columns).astype(np.int8) - np.int8(8)


def _places(reader: _PackedReader, columns: slice) -> tuple[slice, np.ndarray]:
    """Maps columns of delivered scales to stored groups: the range of groups to read, and for each
    column its index within that range."""
    of = np.arange(columns.start, columns.stop) * reader.tensor.group
    of //= reader.tensor.packing.group
    return slice(int(of[0]), int(of[-1]) + 1), of - of[0]


def _scales(reader: _PackedReader, rows: slice, columns: slice) -> np.ndarray:
    if reader.tensor.packing.layout == "scaled":
        return _channel_scales(reader, rows)
    groups, of = _places(reader, columns)
    return reader.scales(rows, groups)[:, of]


def _zeros(reader: _PackedReader, rows: slice, columns: slice) -> np.ndarray:
    """The zero points of an INT4 matrix, -8..7."""
    groups, of = _places(reader, columns)
    return reader.zeros(rows, groups)[:, of].astype(np.int8) - np.int8(8)


def _channel_scales(reader: _PackedReader, rows: slice) -> np.ndarray:
    """Scales [rows, 1] of output channels. The file stores them as [d_out, 1], as [d_out] (read as
    one row), or as a single scale (repeated)."""
    first, shape = slice(0, 1), reader.tensor.parts["weight_scale"].shape
    if shape in ((), (1,)):
        one = reader.floats("weight_scale", first, first)
        return np.broadcast_to(one, (rows.stop - rows.start, 1))
    if len(shape) == 1:
        return reader.floats("weight_scale", first, rows).T
    return reader.floats("weight_scale", rows, first)
