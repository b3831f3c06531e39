"""A quantised array: values, scales, and the block of values that shares a scale.

Made by `quantize_weight` or read from a checkpoint; accepted by every op that multiplies by
weights.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

Format = Literal["fp8", "int8"]
"""Formats of rows: on the wire, in the KV cache, and as operands of products in 8 bits."""
EIGHT_BITS: dict[Any, Format] = {
    jnp.dtype(jnp.float8_e4m3fn): "fp8",
    jnp.dtype(jnp.uint8): "fp8",
    jnp.dtype(jnp.int8): "int8",
}
"""Dtypes of values in 8 bits and their formats; uint8 holds the bits of float8_e4m3fn."""

FOUR_BITS = (jnp.int4, jnp.float4_e2m1fn)
"""The 4-bit dtypes of values, two of which take a byte."""

E8M0 = jnp.dtype(jnp.float8_e8m0fnu)
"""Dtype of the scales of float4_e2m1fn values: powers of two from 2^-127 to 2^127 (OCP Microscaling
Formats 1.0, §5.4.1)."""

GROUPS = (32, 64, 128)
"""Values of d_in that share a scale in INT4, unless a device's share needs a divisor of this."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackEntry:
    """One array of a stack, which kernels read where it lies; XLA would copy a slice of the stack
    before a kernel gets it.

    Attributes:
      stack: [entries, *shape], or with the last two axes of shape in each other's place.
      entry: int32, the array's index in the stack.
      swapped: whether they are.
    """

    stack: Any
    entry: Any
    swapped: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        *outer, rows, width = self.stack.shape[1:]
        return (*outer, width, rows) if self.swapped else (*outer, rows, width)

    def of_shape(self, array: Any) -> Any:
        """Returns the stack, or its entry, with its last two axes as `shape` has them."""
        return array.swapaxes(-1, -2) if self.swapped else array

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array."""
        return jnp.dtype(self.stack.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantArray:
    """`values * scales`, with one scale for every block of the last two axes; with zero points
    `(values - zeros) * scales`.

    A pytree of its arrays, so that it passes through jit, scan and `shard_map`; its leading axes
    (layers, experts) may be sliced away with `jax.tree.map`. It checks nothing when it is made,
    since a pytree may hold specs or shapes instead of arrays: `check_quant_array` does.

    Attributes:
      values: an array, or a `StackEntry` if scales and zero points are entries of stacks, too;
        [*batch, d_out, d_in], int8, int4, float4_e2m1fn, float8_e4m3fn, or the latter's bits
        as uint8, which are cheaper to slice (`bits.py`).
      scales: FP32, of float4_e2m1fn values `E8M0`, [*batch, ceil(d_out / block_out),
        ceil(d_in / block_in)].
      block: (block_out, block_in), the values along each axis that share a scale; 0: the whole
        axis. The last block of an axis may be smaller.
      zeros: zero points of int4 values, int8 in the scales' shape; None: 0.
    """

    values: Any
    scales: Any
    block: tuple[int, int] = field(metadata={"static": True})
    zeros: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the values."""
        return len(self.values.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return jnp.dtype(self.values.dtype)


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of values of this shape, leading axes included."""
    blocks = tuple(
        1 if size == 0 else -(-axis // size) for axis, size in zip(shape[-2:], block, strict=True)
    )
    return (*shape[:-2], *blocks)


def check_quant_array(name: str, array: QuantArray) -> None:
    """Checks that values, scales and block fit together.

    Raises:
      ValueError: they do not; the message calls the array `name`.
    """
    values, scales, block = array.values, array.scales, array.block
    if values.ndim < 2 or values.dtype not in (*EIGHT_BITS, *FOUR_BITS):
        raise ValueError(
            f"{name}.values is {values.dtype}{values.shape}, "
            "needs float8_e4m3fn (or its bits, uint8), int8, int4 or float4_e2m1fn "
            "[..., d_out, d_in]"
        )
    if len(block) != 2 or min(block) < 0:
        raise ValueError(f"{name}.block is {block}, needs two sizes of at least 0")
    expected = scales_shape(values.shape, block)
    of_scales = E8M0 if values.dtype == jnp.float4_e2m1fn else jnp.dtype(jnp.float32)
    if scales.dtype != of_scales or scales.shape != expected:
        raise ValueError(
            f"{name}.scales is {scales.dtype}{scales.shape}, values {values.shape} in blocks of "
            f"{block} need {of_scales}{expected}"
        )
    if (zeros := array.zeros) is None:
        return
    if values.dtype != jnp.int4:
        raise ValueError(f"{name} has zero points, which int4 values have, and is {values.dtype}")
    if zeros.dtype != jnp.int8 or zeros.shape != expected:
        raise ValueError(
            f"{name}.zeros is {zeros.dtype}{zeros.shape}, scales {expected} need int8{expected}"
        )
