"""Arrays whose bits lie in words of 32 bits, in memory that arrays of other shapes share.

TPU kernels read and write such arrays where they lie. A *pool* is that memory: int32 [entries,
lines, 128]. An entry of a pool has the words of one matrix, tile by tile. A pool and a view of it
are tiles of 8 words by 128 in both shapes, so that on TPUs a view is a bit cast and moves nothing.
Elsewhere it is a copy, which is for tests.

The values of neighbouring rows are side by side in a word, the first one lowest, as a TPU keeps
them in its tiles. XLA's own tiles of narrower values have 8 or 32 rows, as it likes, so two
programs may disagree about an array of 8 bits in a pool, but not about words.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

SUBLANES, LANES = 8, 128
"""Sides of a tile of words."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Words:
    """An array [entries, *outer, rows, width] in words.

    The last two axes change places if the width is no multiple of 128, as XLA would keep them, too
    (`attention/mosaic_tpu.py`).

    Attributes:
      words: int32 [entries or more, *outer, rows / values of a word, width].
      dtype: dtype of the array, of 8, 16 or 32 bits.
      first: where the array's entries begin along the first axis of `words`.
      entries: size of the array's first axis.
      swapped: whether the array's last two axes have changed places in `words`.
    """

    words: Any
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    first: int = dataclasses.field(metadata={"static": True})
    entries: int = dataclasses.field(metadata={"static": True})
    swapped: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        _, *outer, rows, width = self.words.shape
        sides = rows * 4 // self.dtype.itemsize, width
        return (self.entries, *outer, *(sides[::-1] if self.swapped else sides))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.words.shape)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @classmethod
    def in_pool(
        cls, pool: Int32[Array, "..."], array: jax.ShapeDtypeStruct | Array, first: int = 0
    ) -> "Words":
        """Returns the view of a pool that has this shape and dtype.

        Args:
          pool: of any shape; its size is a multiple of an entry's (`entry_words`).
          first: number of entries, of the array's shape, before it.
        """
        entries, *outer, rows, width = stored_shape(array)
        rows = rows * array.dtype.itemsize // 4
        tiles = jnp.swapaxes(pool.reshape(-1, width // LANES, SUBLANES, LANES), 1, 2)
        words, swapped = tiles.reshape(-1, *outer, rows, width), array.shape[-1] % LANES > 0
        return cls(words, array.dtype, first, entries, swapped)

    def lines(self) -> Int32[Array, "lines 128"]:
        """Returns the lines of the pool that this is a view of."""
        width = self.words.shape[-1]
        tiles = self.words.reshape(-1, SUBLANES, width // LANES, LANES)
        return jnp.swapaxes(tiles, 1, 2).reshape(-1, LANES)

    def array(self) -> Array:
        """Returns the array, copied."""
        return self[self._own]

    def __getitem__(self, at: Any) -> Array:
        """Returns whole matrices of the array, copied. The index counts `first`, too."""
        words = self.words[at]
        array = jax.lax.bitcast_convert_type(words, self.dtype)
        if self.dtype.itemsize < 4:
            array = jnp.swapaxes(array, -1, -2).reshape(*words.shape[:-2], -1, words.shape[-1])
        return jnp.swapaxes(array, -1, -2) if self.swapped else array

    def holding(self, array: Array, at: Any = None) -> "Words":
        """Returns the same view after these matrices were written to it.

        Args:
          at: their places, counting `first`; those beyond `words` are left out. None: all.
        """
        words = in_words(jnp.swapaxes(array, -1, -2) if self.swapped else array)
        written = self.words.at[self._own if at is None else at].set(words, mode="drop")
        return dataclasses.replace(self, words=written)

    @property
    def _own(self) -> slice:
        return slice(self.first, self.first + self.entries)


def in_words(array: Array) -> Int32[Array, "*outer rows width"]:
    """Returns an array [*outer, rows, width] in words."""
    *outer, rows, width = array.shape
    if (each := 4 // array.dtype.itemsize) > 1:
        array = jnp.swapaxes(array.reshape(*outer, rows // each, each, width), -1, -2)
    return jax.lax.bitcast_convert_type(array, jnp.int32)


def in_lines(array: Array) -> Int32[Array, "entries lines 128"]:
    """Returns an array [entries, *outer, rows, width] as it lies in a pool; `Words.in_pool` undoes
    it."""
    entries = array.shape[0]
    words = Words(in_words(array), array.dtype, 0, entries)
    return words.lines().reshape(entries, -1, LANES)


def stored_shape(array: jax.ShapeDtypeStruct | Array) -> tuple[int, ...]:
    """Returns the shape in which `Words` keep an array, but for several values in a word."""
    *outer, rows, width = array.shape
    return (*outer, width, rows) if width % LANES else (*outer, rows, width)


def entry_words(array: jax.ShapeDtypeStruct) -> int:
    """Returns the words that an entry of an array takes in a pool; 0 if it is not whole tiles."""
    *_, rows, width = stored_shape(array)
    size = math.prod(array.shape[1:]) * array.dtype.itemsize // 4
    return 0 if width % LANES or rows * array.dtype.itemsize % (4 * SUBLANES) else size


def in_arrays[T](tree: T) -> T:
    """Returns a pytree with every `Words` replaced by its array, copied, for plain XLA."""

    def plain(leaf: Any) -> Any:
        return leaf.array() if isinstance(leaf, Words) else leaf

    replaced: T = jax.tree.map(plain, tree, is_leaf=lambda leaf: isinstance(leaf, Words))
    return replaced


class PoolLayout:
    """Pools of one size. A pool holds an array or, in its place, matrices of several layers.

    Args:
      count: number of layers with matrices.

    Attributes:
      arrays: the array of each pool.
      matrices: the matrices of one layer, by name: [entries, rows, width], all of them with equally
        many entries and words.
      entries, of_layer: entries of one of a layer's matrices, and of all.
      shape: of a pool; an entry is a matrix.
      layers: number of layers whose matrices a pool holds; all pools together hold `count`.
      bytes, arrays_bytes, matrices_bytes: of all pools; and of the arrays, and the matrices of all
        layers, without pools.
    """

    def __init__(
        self,
        arrays: Sequence[jax.ShapeDtypeStruct],
        matrices: Mapping[int, jax.ShapeDtypeStruct],
        count: int,
    ):
        self.arrays, self.matrices = arrays, matrices
        self.entries = next((each.shape[0] for each in matrices.values()), 0)
        self.of_layer = max(1, len(matrices) * self.entries)
        matrix = max(map(entry_words, matrices.values()), default=SUBLANES * LANES)
        sizes = [each.shape[0] * entry_words(each) for each in arrays]
        unit = math.lcm(matrix, *map(entry_words, arrays))
        words = max(-(-count // len(arrays)) * self.of_layer * matrix, *sizes)
        words = -(-words // unit) * unit
        self.shape = words // matrix, matrix // LANES, LANES
        self.layers = words // (matrix * self.of_layer)
        self.bytes, self.arrays_bytes = 4 * words * len(arrays), 4 * sum(sizes)
        self.matrices_bytes = 4 * count * self.of_layer * matrix if matrices else 0

    def over(self, devices: int) -> tuple[int, int, int]:
        """Returns the shape of a pool of each of these devices, as one array."""
        entries, *entry = self.shape
        return devices * entries, *entry

    def in_arrays(self, pools: Sequence[Any]) -> list[Any]:
        """Returns the arrays as views of these pools, then the other arrays, unchanged."""
        return [*map(Words.in_pool, pools, self.arrays), *pools[len(self.arrays) :]]

    def in_pools(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns these arrays, of which views are replaced by their pools."""
        return tuple(
            array.lines().reshape(self.shape) if isinstance(array, Words) else array
            for array in arrays
        )

    def in_matrices(self, pool: Array, first: int, layers: int) -> dict[int, Words]:
        """Returns the matrices of several layers as views of a pool, by name.

        Args:
          first: entries before them.
        """
        found = {}
        for name, at in self.firsts(first, layers).items():
            _, *one = self.matrices[name].shape
            whole = self.matrices[name].update(shape=(layers * self.entries, *one))
            found[name] = Words.in_pool(pool, whole, at)
        return found

    def firsts(self, first: int, layers: int) -> dict[int, int]:
        """Returns the entries before each matrix of several layers, by name."""
        return {n: first + turn * layers * self.entries for turn, n in enumerate(self.matrices)}
