"""float8_e4m3fn as its bits, uint8, for operations that only move numbers.

Called by whatever slices, gathers or scatters 8-bit arrays. XLA's CPU backend lacks 8-bit floats:
to move a few elements it converts the whole array to FP16 and back. Writing eight rows to a cache
of 16 MB takes 25 ms, as bits 0.01 ms. Since a bit cast is a copy there, long-lived arrays (weights,
pages) are best kept as bits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num


def as_bits(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """The bits, uint8, of a float8_e4m3fn array; any other array as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == jnp.float8_e4m3fn else x


def from_bits(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """The float8_e4m3fn array that has these bits, if they are uint8; any other array as it is."""
    return jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn) if x.dtype == jnp.uint8 else x
