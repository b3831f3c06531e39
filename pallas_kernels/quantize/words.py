"""Arrays whose bits lie in words of 32 bits, in memory that arrays of other shapes share.

TPU kernels read and write such arrays where they lie. A *pool* is that memory: int32 [lines, 128].
A pool and a view of it are tiles of 8 words by 128 in both shapes, so that on TPUs a view is a bit
cast and moves nothing. Elsewhere it is a copy, which is for tests.

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

    Attributes:
      words: int32 [entries or more, *outer, rows / values of a word, width].
      dtype: dtype of the array, of 8, 16 or 32 bits.
      first: where the array's entries begin along the first axis of `words`.
      entries: size of the array's first axis.
    """

    words: Any
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    first: int = dataclasses.field(metadata={"static": True})
    entries: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        _, *outer, rows, width = self.words.shape
        return (self.entries, *outer, rows * 4 // self.dtype.itemsize, width)

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
        cls, pool: Int32[Array, "lines 128"], array: jax.ShapeDtypeStruct, first: int = 0
    ) -> "Words":
        """Returns the view of a pool that has this shape and dtype.

        Args:
          pool: its size is a multiple of an entry's (`entry_words`).
          first: number of entries, of the array's shape, before it.
        """
        entries, *outer, rows, width = array.shape
        rows = rows * array.dtype.itemsize // 4
        tiles = jnp.swapaxes(pool.reshape(-1, width // LANES, SUBLANES, LANES), 1, 2)
        return cls(tiles.reshape(-1, *outer, rows, width), array.dtype, first, entries)

    def pool(self) -> Int32[Array, "lines 128"]:
        """Returns the pool that this is a view of."""
        width = self.words.shape[-1]
        tiles = self.words.reshape(-1, SUBLANES, width // LANES, LANES)
        return jnp.swapaxes(tiles, 1, 2).reshape(-1, LANES)

    @classmethod
    def written(
        cls, pool: Int32[Array, "lines 128"], values: Array, at: Any, array: jax.ShapeDtypeStruct
    ) -> Int32[Array, "lines 128"]:
        """Writes entries of an array to a pool.

        Args:
          at: int32, number of the array's entries before the first of these.
          array: shape and dtype of the array.
        """
        view = cls.in_pool(pool, array)
        words = jax.lax.dynamic_update_slice_in_dim(view.words, in_words(values), at, 0)
        return dataclasses.replace(view, words=words).pool()

    def array(self) -> Array:
        """Returns the array, copied."""
        apart = jax.lax.bitcast_convert_type(self.words[self._own], self.dtype)
        return (
            apart if self.dtype.itemsize == 4 else jnp.swapaxes(apart, -1, -2).reshape(self.shape)
        )

    def holding(self, array: Array) -> "Words":
        """Returns the same view after these values were written to it."""
        return dataclasses.replace(self, words=self.words.at[self._own].set(in_words(array)))

    @property
    def _own(self) -> slice:
        return slice(self.first, self.first + self.entries)


def in_words(array: Array) -> Int32[Array, "*outer rows width"]:
    """Returns an array [*outer, rows, width] in words."""
    *outer, rows, width = array.shape
    if (each := 4 // array.dtype.itemsize) > 1:
        array = jnp.swapaxes(array.reshape(*outer, rows // each, each, width), -1, -2)
    return jax.lax.bitcast_convert_type(array, jnp.int32)


def entry_words(array: jax.ShapeDtypeStruct) -> int:
    """Returns the words that an entry of an array takes in a pool; 0 if it is not whole tiles."""
    *_, rows, width = array.shape
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
      of_layer: entries of a layer's matrices.
      lines: size of a pool.
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
        self._entries = next((each.shape[0] for each in matrices.values()), 0)
        self.of_layer = max(1, len(matrices) * self._entries)
        matrix = max(map(entry_words, matrices.values()), default=1)
        sizes = [each.shape[0] * entry_words(each) for each in arrays]
        unit = math.lcm(*map(entry_words, [*arrays, *matrices.values()]))
        words = max(-(-count // len(arrays)) * self.of_layer * matrix, *sizes)
        words = -(-words // unit) * unit
        self.lines, self.layers = words // LANES, words // (matrix * self.of_layer)
        self.bytes, self.arrays_bytes = 4 * words * len(arrays), 4 * sum(sizes)
        self.matrices_bytes = 4 * count * self.of_layer * matrix if matrices else 0

    def in_arrays(self, pools: Sequence[Any]) -> list[Any]:
        """Returns the arrays as views of these pools, then the other arrays, unchanged."""
        return [*map(Words.in_pool, pools, self.arrays), *pools[len(self.arrays) :]]

    def in_matrices(self, pool: Array, first: int, layers: int) -> dict[int, Words]:
        """Returns the matrices of several layers as views of a pool, by name.

        Args:
          first: entries before them.
        """
        found = {}
        for name, at in self.firsts(first, layers).items():
            _, *one = self.matrices[name].shape
            whole = self.matrices[name].update(shape=(layers * self._entries, *one))
            found[name] = Words.in_pool(pool, whole, at)
        return found

    def firsts(self, first: int, layers: int) -> dict[int, int]:
        """Returns the entries before each matrix of several layers, by name."""
        return {n: first + turn * layers * self._entries for turn, n in enumerate(self.matrices)}
