"""SwiGLU feed-forward: dense layers and the shared expert. Runs inside `shard_map` on the ffn mesh,
with d_ff split over all its devices, or over the tensor axis alone; the caller sums the shares."""

from typing import Literal

from jaxtyping import Array, Float

from jaxserve.model.module import Formats, Module, Rngs, matrix
from jaxserve.model.quant.rows import EncodedRows
from pallas_kernels.grouped_matmul.dense import dense_swiglu


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
        dimension: Literal["d_ff", "shared_d_ff"] = "d_ff",
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
