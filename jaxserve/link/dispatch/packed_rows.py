"""Rows of a message that stay packed while the ffn mesh exchanges them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt

from jaxserve.link.dispatch.message import MessageFormat, reinterpreted, to_words
from jaxserve.model.message import DispatchMessage


class PackedRows(NamedTuple):
    """Rows of a message as the exchange handles them (`model.ffn.exchange.RowPacking`)."""

    format: MessageFormat
    dtype: jnp.dtype
    """The dtype that rows are dequantised to."""

    def unpack(self, packed: UInt[Array, "rows words"]) -> DispatchMessage:
        """Unpacks the rows."""
        return self.format.unpack(packed, self.dtype)

    def addressed(
        self, packed: UInt[Array, "rows words"], slots: Int32[Array, "rows top_k"]
    ) -> UInt[Array, "rows words"]:
        """Replaces the expert ids of packed rows."""
        form = self.format
        words = to_words(reinterpreted(slots, jnp.uint32), form.word)
        return jax.lax.dynamic_update_slice_in_dim(packed, words, form.experts_at, axis=1)
