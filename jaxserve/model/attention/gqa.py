"""Grouped-query attention: optional norms of q and k, sliding window, biases, sinks, and gates of
heads or columns.

One of the attention families; `blocks.py` composes it with norms, router and residual. Runs inside
`shard_map` on the attention mesh: query heads and K and V heads are split over `tp`. Where there
are fewer K heads than devices, all devices compute all of them, and each keeps the one that its
query heads read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.config.attention.gqa import GQA as Sizes
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.heads import attend
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.attention.rope import batch_rotation, paired
from jaxserve.model.module import Formats, add_once, linear, matrix, scale, weight, zeros
from pallas_kernels.rotate_and_write import rotate_and_write


class GroupedQueryAttention(nnx.Module):
    """q, k, v = x·W per head; RoPE(RMSNorm(q)), RoPE(RMSNorm(k)).

    Attributes:
      query: [q_heads·head_dim, d_model]; with a gate of columns [q_heads·2·head_dim, d_model], the
        gate's rows behind those of each head.
      key, value: [kv_heads·head_dim, d_model].
      out: [d_model, q_heads·head_dim].
      query_norm, key_norm: [head_dim] of every head, or a weight for each column of all heads;
        None: the model has none.
      query_bias, key_bias, value_bias, out_bias: vectors; None where the model has none.
      gate: [q_heads, d_model]; None: heads have no gate of their own.
      sinks: FP32 [q_heads], one more score of every head; None: the softmax is over tokens alone.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs):
        assert isinstance(kind.attention, Sizes)
        self.sizes = sizes = kind.attention
        self.kind, self.epsilon = kind, config.norm_epsilon
        dtype, d_model = formats.dtype, config.d_model
        heads = {"q_heads": sizes.q_heads * sizes.head_dim}
        split = sizes.kv_heads % formats.shards.get("q_heads", 1) == 0
        kv = {"kv_heads" if split else "kv_heads_everywhere": sizes.kv_heads * sizes.head_dim}
        self.columns_gated = sizes.gate == "columns"
        rows = {"q_heads": heads["q_heads"] * (1 + self.columns_gated)}
        self.query = matrix(rngs, formats, **rows, d_model=d_model)
        self.key = matrix(rngs, formats, **kv, d_model=d_model)
        self.value = matrix(rngs, formats, **kv, d_model=d_model)
        self.out = matrix(rngs, formats, d_model=d_model, out_heads=heads["q_heads"])
        one = {"head_dim": sizes.head_dim}
        query, key = (heads, kv) if sizes.qk_norm == "columns" else (one, one)
        normed = sizes.qk_norm != "none"
        self.query_norm = scale(rngs, formats.norms, **query) if normed else None
        self.key_norm = scale(rngs, formats.norms, **key) if normed else None
        self.query_bias = zeros(rngs, dtype, **heads) if sizes.qkv_bias else None
        self.key_bias = zeros(rngs, dtype, **kv) if sizes.qkv_bias else None
        self.value_bias = zeros(rngs, dtype, **kv) if sizes.qkv_bias else None
        self.out_bias = zeros(rngs, dtype, d_model=d_model) if sizes.out_bias else None
        gated = sizes.gate == "heads"
        self.gate = weight(rngs, dtype, q_heads=sizes.q_heads, d_model=d_model) if gated else None
        fp32 = jnp.dtype(jnp.float32)
        self.sinks = zeros(rngs, fp32, q_heads=sizes.q_heads) if sizes.sinks else None

    def __call__(
        self, x: Float[Array, "tokens d_model"], pages: Pages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens d_model"], Pages]:
        """Attention of normed tokens, as `MFA.__call__` describes it."""
        head_dim, tokens, norms = self.sizes.head_dim, x.shape[0], self._norms()
        query, key = linear(x, self.query, self.query_bias), linear(x, self.key, self.key_bias)
        gate = None
        if self.columns_gated:
            query, gate = jnp.split(query.reshape(tokens, -1, 2 * head_dim), 2, axis=2)
        if norms and self.sizes.qk_norm == "columns":
            width = self.sizes.q_heads * head_dim, self.sizes.kv_heads * head_dim
            query = _norm_columns(query, norms["query_norm"], self.epsilon, width[0])
            key = _norm_columns(key, norms["key_norm"], self.epsilon, width[1])
            norms = {}
        query, key = (
            paired(heads.reshape(tokens, -1, head_dim), self.sizes.rope) for heads in (query, key)
        )
        value = linear(x, self.value, self.value_bias).reshape(tokens, -1, head_dim)
        if key.shape[1] > pages[0].shape[1]:
            key, value = self._own_head(key, query), self._own_head(value, query)
        angles = batch_rotation(batch, head_dim, self.sizes.rope)
        with jax.named_scope("write_pages"):
            query, pages = rotate_and_write(
                pages, query, key, value, *angles, *batch.where, epsilon=self.epsilon, **norms
            )
        with jax.named_scope("paged_attention"):
            scale = head_dim**-0.5
            sinks = None if self.sinks is None else self.sinks[...]
            mixed, pages = attend(
                query, pages, batch, self.kind, scale=scale, dtype=x.dtype, sinks=sinks
            )
        if self.gate is not None:
            mixed *= jax.nn.sigmoid(linear(x, self.gate))[:, :, None]
        if gate is not None:
            mixed *= jax.nn.sigmoid(gate)
        share = linear(mixed.reshape(tokens, -1), self.out)
        return add_once(share, self.out_bias), pages

    def _own_head(self, heads: Array, query: Array) -> Array:
        """Selects, from all K or V heads, the one that this device's query heads attend to."""
        group = self.sizes.q_heads // self.sizes.kv_heads
        first_query = jax.lax.axis_index("tp") * query.shape[1]
        return jax.lax.dynamic_slice_in_dim(heads, first_query // group, 1, axis=1)

    def _norms(self) -> dict[str, Any]:
        if self.query_norm is None or self.key_norm is None:
            return {}
        norms = {"query_norm": self.query_norm[...], "key_norm": self.key_norm[...]}
        if self.sizes.qk_norm == "heads":
            norms = {name: paired(norm, self.sizes.rope) for name, norm in norms.items()}
        return norms


def _norm_columns(
    own: Float[Array, "rows own"], weight: Float[Array, " own"], epsilon: float, count: int
) -> Float[Array, "rows own"]:
    """RMSNorm over `count` columns, of which each `tp` device may hold a part."""
    own32 = own.astype(jnp.float32)
    squares = jnp.sum(own32 * own32, axis=-1, keepdims=True)
    if own.shape[1] < count:
        squares = jax.lax.psum(squares, "tp")
    return (own32 * jax.lax.rsqrt(squares / count + epsilon)).astype(own.dtype) * weight
