"""What a multi-token-prediction module has beside its decoder layer (DeepSeek-V3 §2.2).

The layer is an ordinary one of both roles (`blocks.py`), numbered behind the model's own. Embedding
and head are the model's.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.config.model import ModelConfig
from jaxserve.model.module import rms_norm, scale, weight
from pallas_kernels.grouped_matmul.dense import matmul


class Prediction(nnx.Module):
    """Before the layer, a hidden state and the token after it become one row; behind it, a norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        d_model = config.d_model
        self.token_norm = scale(dtype, d_model=d_model)
        self.hidden_norm = scale(dtype, d_model=d_model)
        self.projection = weight(rngs, dtype, embedding=d_model, d_joined=2 * d_model)
        self.norm = scale(dtype, d_model=d_model)

    def enter(
        self, hidden: Float[Array, "tokens d_model"], embedded: Float[Array, "tokens d_model"]
    ) -> Float[Array, "tokens d_model"]:
        """What the layer takes: h' = projection · [norm(embedding of token i + 1); norm(h_i)].

        Args:
          hidden: h_i, after the last norm of the model, or of the module before this one.
          embedded: of the token after each.
        """
        epsilon = self.config.norm_epsilon
        joined = jnp.concatenate(
            [
                rms_norm(embedded, self.token_norm[...], epsilon),
                rms_norm(hidden, self.hidden_norm[...], epsilon),
            ],
            axis=1,
        )
        columns = matmul(joined, self.projection[...]).astype(hidden.dtype)
        return jax.lax.all_gather(columns, "tp", axis=1, tiled=True)

    def leave(self, x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
        """The module's hidden state, of which the head makes logits of token i + 2."""
        return rms_norm(x, self.norm[...], self.config.norm_epsilon)
