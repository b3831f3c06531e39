"""Numbers of 8 and 4 bits as bytes, for operations that only move them.

Called by code that slices, gathers or scatters 8-bit arrays. XLA's CPU backend lacks 8-bit floats:
to move a few elements it converts the whole array to FP16 and back. Writing eight rows to a cache
of 16 MB takes 25 ms, as bits 0.01 ms. Since a bit cast is a copy there, long-lived arrays (weights,
pages) are best kept as bits.
"""

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Num, Shaped

from pallas_kernels.quantize.quant_array import E8M0, FOUR_BITS
from pallas_kernels.target import EVERY_KERNEL, current_target


def as_bits(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """Returns the bits, uint8, of a float8_e4m3fn array; any other array as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == jnp.float8_e4m3fn else x


def sliceable(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """Returns an array in the form that is cheapest to slice: as bits for plain XLA, unchanged for
    a target with kernels.

    Such targets slice 8-bit floats as they are, and a bit cast of an argument is a copy. In a step
    of Qwen3-30B-A3B on two v7x devices it would be 15.4 GB of weights, read and written, and as
    much memory.
    """
    return x if current_target().backend in EVERY_KERNEL else as_bits(x)


def array_bytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    """Returns the bytes of an array on a device, where two 4-bit numbers take one byte."""
    size = math.prod(shape)
    return -(-size // 2) if dtype in FOUR_BITS else size * jnp.dtype(dtype).itemsize


def in_bytes(x: Shaped[Array, "*batch d"]) -> Num[Array, "*batch bytes"]:
    """Packs two 4-bit numbers in a byte, uint8, the first one low, padded with a zero; returns
    other numbers of 8 bits as uint8, and wider ones unchanged. Neither collectives nor files take
    4 bits."""
    if x.dtype == E8M0:
        return jax.lax.bitcast_convert_type(x, jnp.uint8)
    if x.dtype not in FOUR_BITS:
        return as_bits(x)
    if x.shape[-1] % 2:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint8)


def from_bytes(
    x: Num[Array, "*batch bytes"], like: Shaped[Array, "*batch d"] | jax.ShapeDtypeStruct
) -> Shaped[Array, "..."]:
    """Undoes `in_bytes`: returns an array with the dtype and shape of `like`."""
    if like.dtype not in FOUR_BITS:
        return jax.lax.bitcast_convert_type(x, like.dtype).reshape(like.shape)
    numbers = jax.lax.bitcast_convert_type(x, like.dtype).reshape(*like.shape[:-1], -1)
    return numbers[..., : like.shape[-1]]


def from_bits(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """Returns the float8_e4m3fn array that has these bits, if uint8; any other array as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn) if x.dtype == jnp.uint8 else x


def from_words(words: Num[Array, "rows words"], dtype: DTypeLike) -> Num[Array, "rows numbers"]:
    """Reads numbers from unsigned or 8-bit words, lowest bits first, like a bit-cast.

    On GPUs numbers are added up from their words: XLA does not fuse a bit-cast between widths with
    the code that takes the numbers, so it would be a launch.
    """
    dtype = jnp.dtype(dtype)
    ratio, size = dtype.itemsize // words.dtype.itemsize, 8 * words.dtype.itemsize
    if ratio > 1 and current_target().backend == "mosaic_gpu":
        unsigned, wide = jnp.dtype(f"uint{size}"), jnp.dtype(f"uint{8 * dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(words, unsigned).astype(wide)
        parts = [bits[:, at::ratio] << (size * at) for at in range(ratio)]
        return jax.lax.bitcast_convert_type(functools.reduce(operator.or_, parts), dtype)
    if ratio > 1:
        words = words.reshape(words.shape[0], -1, ratio)
    return jax.lax.bitcast_convert_type(words, dtype)
