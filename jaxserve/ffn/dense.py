"""SwiGLU feed-forward: dense layers and the shared expert. Runs inside `shard_map` on the ffn mesh,
with d_ff split over all its devices; the caller sums the devices' shares."""

from flax import nnx
from jaxtyping import Array, Float

from jaxserve.module import Formats, matrix
from pallas_kernels.grouped_matmul.dense import dense_swiglu


class DenseFFN(nnx.Module):
    """down(silu(x·gate) · (x·up)).

    Attributes:
      gate, up: [d_ff, d_model].
      down: [d_model, d_ff].
    """

    def __init__(self, d_model: int, d_ff: int, formats: Formats, rngs: nnx.Rngs):
        self.gate = matrix(rngs, formats, d_ff=d_ff, d_model=d_model)
        self.up = matrix(rngs, formats, d_ff=d_ff, d_model=d_model)
        self.down = matrix(rngs, formats, d_model=d_model, d_ff=d_ff)

    def __call__(self, x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
        """This device's share of the output, FP32."""
        return dense_swiglu(x, self.gate[...], self.up[...], self.down[...])
