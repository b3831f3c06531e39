"""Queries as sums of two FP8 numbers, which Hopper's tensor cores multiply by keys in FP8.

`rotate_and_write` makes them as it rotates; `paged_attention` makes them of other queries.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

LARGEST_FP8 = 448.0
SMALLEST_QUERY = 1e-30
"""Rows whose largest magnitude is smaller get the scale 1 instead of their own."""


class TwoTerms(NamedTuple):
    """Rows that are the sum of two arrays times a scale for each row.

    The second array holds what rounding to the first one lost. Elements are exact to a 256th of
    themselves, or to 2e-6 of the largest magnitude in their row.
    """

    values: Float[Array, "2 *rows width"]
    scales: Float32[Array, "*rows"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return tuple(self.values.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of `whole`."""
        return jnp.dtype(jnp.float32)

    def whole(self) -> Float32[Array, "*rows width"]:
        """Adds up the terms."""
        first, second = self.values.astype(jnp.float32)
        return (first + second) * self.scales[..., None]


def in_two_terms(rows: Float[Array, "*rows width"]) -> TwoTerms:
    """Splits rows into two terms."""
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    scales = jnp.where(largest < SMALLEST_QUERY, 1.0, largest / LARGEST_FP8)
    wide = wide / scales[..., None]
    first = wide.astype(jnp.float8_e4m3fn)
    second = (wide - first.astype(jnp.float32)).astype(jnp.float8_e4m3fn)
    return TwoTerms(jnp.stack([first, second]), scales)
