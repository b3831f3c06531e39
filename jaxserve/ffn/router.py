"""The router: which experts a token goes to, and with which weight (Step-3: softmax, top-k).

Lives with the attention role, although it is ffn's mathematics: the message carries its result.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.config.model import ModelConfig
from jaxserve.module import linear, weight


class Router(nnx.Module):
    """Softmax over all experts in FP32, then the top_k.

    Attributes:
      gate: [d_model, router_experts], replicated.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.gate = weight(rngs, dtype, d_model=config.d_model, router_experts=config.experts)

    def __call__(
        self, x: Float[Array, "tokens d_model"], valid: Bool[Array, " tokens"], sentinel: int
    ) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
        """Expert ids and gate weights (FP32); padding tokens get the `sentinel` id and weight 0."""
        logits = linear(x, self.gate[...]).astype(jnp.float32)
        gates, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.config.top_k)
        if self.config.renormalise:
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        valid = valid[:, None]
        return jnp.where(valid, experts, sentinel), jnp.where(valid, gates, 0.0)
