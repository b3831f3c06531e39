"""SwiGLU feed-forward: dense layers and the shared expert. Runs inside `shard_map` on the ffn mesh,
with d_ff split over all its devices, over the tensor axis alone, or not at all; the caller sums the
shares."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from jaxserve.model.module import Formats, Module, QuantWeight, Rngs, Weight, matrix
from jaxserve.model.quant.rows import EncodedRows
from pallas_kernels.grouped_matmul.dense import (
    covers,
    dense_matmul,
    dense_product,
    dense_swiglu,
)

_Rows = tuple[Array, EncodedRows | None]
"""[tokens, d_model], and as they came over the wire."""


class DenseFFN(Module):
    """down(silu(x·gate) · (x·up)).

    Attributes:
      gate, up: [d_ff, d_model].
      down: [d_model, d_ff].
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        formats: Formats,
        rngs: Rngs,
        *,
        dimension: Literal["d_ff", "shared_d_ff", "own_d_ff"] = "d_ff",
    ):
        hidden = {dimension: d_ff}
        self.gate = matrix(rngs, formats, **hidden, d_model=d_model)
        self.up = matrix(rngs, formats, **hidden, d_model=d_model)
        self.down = matrix(rngs, formats, d_model=d_model, **hidden)

    def __call__(
        self, x: Float[Array, "tokens d_model"], encoded: EncodedRows | None = None
    ) -> Float[Array, "tokens d_model"]:
        """This device's share of the output, in the dtype of x.

        Args:
          encoded: x as it came over the wire, if in 8 bits.
        """
        narrow = None if encoded is None else encoded.quantised()
        return dense_swiglu(x, self.gate[...], self.up[...], self.down[...], narrow)

    def steps(self, x: Float[Array, "tokens d_model"]) -> tuple[Callable[[Any], Any], ...]:
        """The same for who does it in parts: the first takes (x, encoded), each what the one before
        it gave, and the last gives the output. One kernel may make all of it, for rows like x."""
        if covers(x, self.gate[...], self.up[...], self.down[...]):
            return (lambda rows: self(*rows),)
        return self._gate, self._hidden, self._project

    def _gate(self, rows: _Rows) -> tuple[_Rows, Array]:
        return rows, self._product(rows, self.gate)

    def _hidden(self, gated: tuple[_Rows, Array]) -> Array:
        rows, gate = gated
        return (jax.nn.silu(gate) * self._product(rows, self.up)).astype(rows[0].dtype)

    def _project(self, hidden: Array) -> Array:
        return dense_matmul(hidden, self.down[...]).astype(hidden.dtype)

    def _product(self, rows: _Rows, weights: Weight | QuantWeight) -> Array:
        x, encoded = rows
        narrow = None if encoded is None else encoded.quantised()
        return dense_product(x, weights[...], narrow)
