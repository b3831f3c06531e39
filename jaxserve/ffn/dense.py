"""SwiGLU feed-forward: dense layers and the shared expert. Runs inside `shard_map` on the ffn mesh,
with d_ff split over all its devices; the caller sums the devices' shares."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.module import weight


class DenseFFN(nnx.Module):
    """down(silu(x·gate) · (x·up)).

    Attributes:
      gate, up: [d_model, d_ff].
      down: [d_ff, d_model].
    """

    def __init__(self, d_model: int, d_ff: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = weight(rngs, dtype, d_model=d_model, d_ff=d_ff)
        self.up = weight(rngs, dtype, d_model=d_model, d_ff=d_ff)
        self.down = weight(rngs, dtype, d_ff=d_ff, d_model=d_model)

    def __call__(self, x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
        """This device's share of the output, FP32."""
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

        def product(a: Array, b: Array) -> Array:
            return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)

        hidden = jax.nn.silu(product(x, self.gate[...])) * product(x, self.up[...])
        return product(hidden.astype(x.dtype), self.down[...])
