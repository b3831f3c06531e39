"""The router: which experts a token goes to, and with which weight.

Runs on the attention role, because the dispatch message carries its result.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.config.model import RouterSpec as Rule
from jaxserve.model.module import linear, weight, zeros
from pallas_kernels.grouped_matmul.dense import matmul

SCORES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


class ExpertRouter(nnx.Module):
    """FP32 scores of all experts, then the top_k (Step-3 §2, DeepSeek-V3 §2.1.2, Qwen3).

    Attributes:
      gate: [router_experts, d_model], replicated.
      bias: FP32 [router_experts], added to the scores for the selection but not for the gate
        weights; None: the model has none.
      logit_bias: FP32 [router_experts], added to the logits; None: the model has none.
      table: int32 [vocab, top_k], the experts of every token id; None: the best scores decide.
    """

    def __init__(self, d_model: int, rule: Rule, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.rule = rule
        self.gate = weight(rngs, dtype, router_experts=rule.experts, d_model=d_model)
        fp32 = jnp.dtype(jnp.float32)
        self.bias = zeros(rngs, fp32, router_experts=rule.experts) if rule.bias else None
        biased = rule.logit_bias
        self.logit_bias = zeros(rngs, fp32, router_experts=rule.experts) if biased else None
        ids, rows = jnp.dtype(jnp.int32), rule.token_table
        self.table = zeros(rngs, ids, token_ids=rows, chosen=rule.top_k) if rows else None

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        valid: Bool[Array, " tokens"],
        sentinel: int,
        token_ids: Int[Array, " tokens"] | None = None,
    ) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
        """Expert ids and gate weights (FP32); padding tokens get the `sentinel` id and weight 0."""
        rule = self.rule
        if rule.float32_logits:
            logits = matmul(x.astype(jnp.float32), self.gate[...].astype(jnp.float32))
        else:
            logits = linear(x, self.gate).astype(jnp.float32)
        if self.logit_bias is not None:
            logits += self.logit_bias[...]
        scores = SCORES[rule.score](logits)
        choice = scores if self.bias is None else scores + self.bias[...]
        if rule.groups > 1:
            choice = self._within_best_groups(choice)
        if self.table is None:
            gates, experts = jax.lax.top_k(choice, rule.top_k)
        else:
            assert token_ids is not None
            experts = self.table[...][token_ids]
        if self.bias is not None or self.table is not None:
            gates = jnp.take_along_axis(scores, experts, axis=-1)
        if rule.renormalise:
            gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
        gates = gates * rule.scaling
        valid = valid[:, None]
        return jnp.where(valid, experts, sentinel), jnp.where(valid, gates, 0.0)

    def _within_best_groups(
        self, choice: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens experts"]:
        """Scores with all but the best groups masked to -inf; a group's rank is the sum of its two
        best experts (DeepSeek-V3 §2.1.2)."""
        rule = self.rule
        grouped = choice.reshape(choice.shape[0], rule.groups, -1)
        best_two, _ = jax.lax.top_k(grouped, 2)
        _, best = jax.lax.top_k(jnp.sum(best_two, axis=-1), rule.top_groups)
        kept = jnp.any(best[:, :, None] == jnp.arange(rule.groups), axis=1)
        return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
