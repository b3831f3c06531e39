"""Packs sums of experts' results in INT8 for other devices, and adds up packed sums from devices.

Called by the code that sends and receives such sums. A packed row is its values, the four bytes of
its FP32 scale, and zeros. Hopper GPUs have kernels (`mosaic_gpu_sums.py`), which know a row's scale
as soon as its sum; XLA computes the sums twice, or writes them in FP32. Elsewhere XLA runs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.coverage import kernel_target
from pallas_kernels.grouped_matmul.routed import Choices, combine
from pallas_kernels.quantize import dequantize_rows, quantize_rows
from pallas_kernels.quantize.bits import from_words
from pallas_kernels.target import Target, current_target, kernels

_COST = "computes sums twice, or writes them in FP32"


class Unsummed(NamedTuple):
    """Rows that are sums of an array's rows, of choices, or of both."""

    base: Float[Array, "tokens d"] | None
    choices: Choices | None = None
    d: int | None = None
    """Values of a row if the rows of the choices are packed; None: they are not."""

    @property
    def shape(self) -> tuple[int, int]:
        """[tokens, d] of the sums."""
        if self.choices is None:
            assert self.base is not None
            return self.base.shape[0], self.base.shape[1]
        return self.choices.order.place.shape[0], self.d or self.choices.rows.shape[1]

    def total(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "tokens d"]:
        """Returns the sums, added up in FP32 and rounded to `dtype`."""
        if self.choices is None:
            assert self.base is not None
            return self.base.astype(dtype)
        choices = self.choices
        if self.d is not None:
            choices = choices._replace(rows=unpack(choices.rows, self.d))
        return combine(*choices, base=self.base, dtype=dtype)

    def packed(
        self, words: int, major: tuple[int, int] = (1, 1), *, everywhere: bool = True
    ) -> Int8[Array, "tokens words"]:
        """Returns the sums packed in INT8.

        Args:
          words: bytes of a packed row.
          major: (a, b): the rows are a x b blocks, and are returned as b x a blocks.
          everywhere: False: rows of tokens without any addend are undefined, and cost no memory
            traffic.

        Raises:
          ValueError: the rows cannot be divided into a x b equal blocks.
        """
        tokens, d = self.shape
        if 1 in major:  # the same order
            major = 1, 1
        if tokens % math.prod(major):
            raise ValueError(f"{tokens} rows are not {major[0]} x {major[1]} equal blocks")
        target = _target(d, words)
        if target is not None and tokens:
            (packed,) = _kernels(target).pack(
                self, self.shape, words, major, target, everywhere=everywhere
            )
            return packed
        values, scales = quantize_rows(self.total(), "int8")
        packed = jnp.concatenate([values, jax.lax.bitcast_convert_type(scales, jnp.int8)], axis=1)
        packed = jnp.pad(packed, ((0, 0), (0, words - packed.shape[1])))
        if major == (1, 1):
            return packed
        return jnp.swapaxes(packed.reshape(*major, -1, words), 0, 1).reshape(-1, words)

    def pieces(self, words: int, count: int) -> tuple[Int8[Array, "part words"], ...]:
        """Returns the packed sums in `count` equal parts of the rows."""
        target = _target_of_pieces(*self.shape, words, count)
        if target is None:
            return tuple(jnp.split(self.packed(words), count))
        return _kernels(target).pack(self, self.shape, words, (1, 1), target, count)


class Parts(NamedTuple):
    """Rows that are sums of parts, received packed, to be added up in their order."""

    arrived: Int8[Array, "parts tokens words"]
    d: int

    def total(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "tokens d"]:
        """Returns the sums, added up in FP32 and rounded to `dtype`."""
        return sum_packed(self.arrived, self.d).astype(dtype)

    def packed(self, words: int) -> Int8[Array, "tokens words"]:
        """Returns the sums packed in INT8.

        Raises:
          ValueError: the parts have rows of other than `words` bytes.
        """
        if words != self.arrived.shape[2]:
            raise ValueError(f"rows of {words} words, and parts have {self.arrived.shape[2]}")
        return sum_and_pack(self.arrived, self.d)

    def pieces(self, words: int, count: int) -> tuple[Int8[Array, "part words"], ...]:
        """Returns the packed sums in `count` equal parts of the rows."""
        target = _target_of_pieces(self.arrived.shape[1], self.d, words, count)
        if target is None:
            return tuple(jnp.split(self.packed(words), count))
        return _kernels(target).add_up_and_pack(self.arrived, self.d, target, count)


Sums = Unsummed | Parts
"""Rows that are sums, which the receiver adds up when it needs them."""


def sum_packed(arrived: Int8[Array, "parts rows words"], d: int) -> Float32[Array, "rows d"]:
    """Returns the sums of packed parts, added up in their order."""
    parts, rows, words = arrived.shape
    target = _target(d, words)
    if target is not None and rows:
        return _kernels(target).add_up(arrived, d, target)
    shares = unpack(arrived.reshape(-1, words), d)
    return jnp.sum(shares.reshape(parts, rows, d), axis=0)


def sum_and_pack(arrived: Int8[Array, "parts rows words"], d: int) -> Int8[Array, "rows words"]:
    """Returns the sums of packed parts, packed again."""
    words = arrived.shape[2]
    target = _target(d, words)
    if target is not None and arrived.shape[1]:
        return _kernels(target).add_up_and_pack(arrived, d, target)[0]
    return Unsummed(sum_packed(arrived, d)).packed(words)


def unpack(packed: Int8[Array, "rows words"], d: int) -> Float32[Array, "rows d"]:
    """Returns the values of packed rows; only the rounding to INT8 is lost."""
    scales = from_words(packed[:, d : d + 4], jnp.float32)[:, 0]
    return dequantize_rows(packed[:, :d], scales, jnp.float32)


def _target_of_pieces(rows: int, d: int, words: int, count: int) -> Target | None:
    """Returns the target whose kernel writes `count` equal parts of the rows; None: XLA runs."""
    return _target(d, words) if count > 1 and rows and not rows % count else None


def _target(d: int, words: int) -> Target | None:
    if current_target().backend != "mosaic_gpu":
        return None
    return kernel_target("pack_sums", lambda target: _kernels(target).gap(d, words), _COST)


def _kernels(target: Target) -> Any:
    return kernels("grouped_matmul", target, "_sums")
