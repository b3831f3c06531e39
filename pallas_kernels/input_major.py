"""Float matrices stored tile by tile, and input by input within a tile, [tiles, d_in, width], and
products with them on CPUs.

XLA:CPU packs weights at every call before it multiplies several rows by them, and it sums a single
row in another order. Here a loop over d_in adds an input's weights, times the rows' values, to the
results of a tile's outputs, which stay in the L1 cache. Weights are read once, and a row's sums
have one order, however many rows are multiplied.

A core prefetches only a few lines of each place that it reads from, less than the latency of memory
needs. So a tile's memory is one piece, read in `STREAMS` places at once.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pallas_kernels.varying import vary_like

TILE = 128
"""Most outputs whose sums are computed together."""
STREAMS = 6
"""Equal parts of d_in; one input of each part is added at a time."""
ROWS = 32
"""Rows that are multiplied together."""


def width_of(d_out: int) -> int:
    """Returns the tile width for a matrix with `d_out` outputs: the largest divisor of `d_out`
    between half of `TILE` and `TILE`, or `d_out` if it has none."""
    least = min(d_out, TILE // 2)
    return next((size for size in range(TILE, least - 1, -1) if d_out % size == 0), d_out)


def in_tiles(matrix: Array | np.ndarray, width: int) -> Array:
    """Returns matrices [*stack, d_out, d_in] in the layout of `InputMajor.values`."""
    *stack, d_out, d_in = matrix.shape
    tiles = matrix.reshape(*stack, d_out // width, width, d_in)
    return jnp.swapaxes(tiles, -1, -2)


def in_rows(tiles: Any) -> Any:
    """Undoes `in_tiles`, for NumPy's arrays and for JAX's."""
    *stack, count, d_in, width = tiles.shape
    return tiles.swapaxes(-1, -2).reshape(*stack, count * width, d_in)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InputMajor:
    """A matrix [d_out, d_in], or a stack of matrices, stored tile by tile and input by input.

    Attributes:
      values: [*stack, tiles, d_in, width], floats; output o is in tile o // width.
      entry: int32, index of the matrix in values [stack, tiles, d_in, width]; None: all of values.
        The matrix is multiplied without being cut out of the stack first.
    """

    values: Any
    entry: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix or stack as if stored output by output: [*stack, d_out, d_in]."""
        *stack, tiles, d_in, width = self.values.shape
        return (*(stack if self.entry is None else ()), tiles * width, d_in)

    @property
    def ndim(self) -> int:
        """The number of dimensions of `shape`."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return jnp.dtype(self.values.dtype)


_cut = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
"""`dynamic_slice` without the three operations for each index that give negative ones a meaning."""


@jax.jit  # traced once for each shape, rather than at each call in each program
def product(rows: Float[Array, "rows d_in"], weights: InputMajor) -> Float32[Array, "rows d_out"]:
    """Returns rows · weightsᵀ for one matrix, in FP32. d_in has `STREAMS` equal parts: the first
    inputs of all parts are added in the parts' order, then the second inputs, and so on; the rest
    of d_in comes last.

    Raises:
      ValueError: the weights are a stack, or the two d_in differ.
    """
    if rows.ndim != 2 or weights.ndim != 2 or rows.shape[1] != weights.shape[1]:
        raise ValueError(f"rows {rows.shape} times {weights.shape}: needs one matrix of this d_in")
    stack, entry = weights.values, weights.entry
    if entry is None:
        stack, entry = stack[None], 0
    if not rows.shape[0]:
        return jnp.zeros((0, weights.shape[0]), jnp.float32)
    (count, d_in), (tiles, width) = rows.shape, stack.shape[1::2]
    block, part = min(ROWS, count), d_in // STREAMS
    size, blocks = min(TILE, width), -(-count // block)
    windows = -(-width // size)  # one, but of a matrix that is a single wide tile
    rows = rows.astype(jnp.float32)

    def sums(tile: Array | int, column: Array | int, row: Array | int) -> Array:
        def add(total: Array, place: Array | int) -> Array:
            some = _cut(stack, (entry, tile, place, column), (1, 1, 1, size))
            own = _cut(rows, (row, place), (block, 1))
            return total + own * some[0, 0].astype(jnp.float32)

        def add_one_each(place: Array, total: Array) -> Array:
            for stream in range(STREAMS):
                total = add(total, place + stream * part)
            return total

        total = vary_like(jnp.zeros((block, size), jnp.float32), (rows, stack))
        total = jax.lax.fori_loop(0, part, add_one_each, total)
        for place in range(STREAMS * part, d_in):
            total = add(total, place)
        return total

    def make_tile(index: Array, output: Array) -> Array:
        # The last window and the last block end with the matrix: some sums are computed twice. A
        # tile's weights stay in the L2 cache for all blocks of rows.
        tile, window = index // (windows * blocks), index // blocks % windows
        column = jnp.minimum(window * size, width - size)
        row = jnp.minimum(index % blocks * block, count - block)
        total = sums(tile, column, row)
        return jax.lax.dynamic_update_slice(output, total, (row, tile * width + column))

    if tiles == windows == blocks == 1:
        return sums(0, 0, 0)
    output = vary_like(jnp.zeros((count, tiles * width), jnp.float32), (rows, stack))
    return jax.lax.fori_loop(0, tiles * windows * blocks, make_tile, output)
