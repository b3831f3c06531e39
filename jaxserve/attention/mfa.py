"""Multi-matrix factorization attention (Step-3 §2.2): low-rank queries, one K and one V head.

One of the attention families; `model.py` composes it with norms, router and residual. Runs inside
`shard_map` on the attention mesh: query heads are split over `tp`, K and V are computed everywhere.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.attention.batch import RaggedBatch
from jaxserve.attention.rope import rotate_half, rotation
from jaxserve.config.model import ModelConfig
from jaxserve.module import linear, rms_norm, scale, weight
from pallas_kernels.attention.api import paged_attention, write_pages

Pages = tuple[
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]


class MFA(nnx.Module):
    """q = RoPE(RMSNorm(x·W_down)·W_up) per head; k, v = x·W_kv, shared by all query heads.

    Attributes:
      down: [d_model, latent + 2·kv_heads·head_dim], the query's low-rank map, K and V side by side.
      inter_norm: [latent], RMSNorm between the two query matrices.
      up: [latent, q_heads·head_dim].
      out: [q_heads·head_dim, d_model].
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        heads = config.q_heads * config.head_dim
        kv = config.kv_heads * config.head_dim
        self.down = weight(
            rngs, dtype, d_model=config.d_model, latent_and_kv=config.latent + 2 * kv
        )
        self.inter_norm = scale(dtype, latent=config.latent)
        self.up = weight(rngs, dtype, latent=config.latent, q_heads=heads)
        self.out = weight(rngs, dtype, q_heads=heads, d_model=config.d_model)

    def __call__(
        self, x: Float[Array, "tokens d_model"], pages: Pages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens d_model"], Pages]:
        """Attention of normed tokens; writes their K and V into the pages first.

        Returns this device's share of the output projection (to be summed over `tp`, FP32 sum
        left to the caller) and the pages.
        """
        config, tokens = self.config, x.shape[0]
        kv = config.kv_heads * config.head_dim
        query, key, value = jnp.split(
            linear(x, self.down[...]), [config.latent, config.latent + kv], axis=-1
        )
        query = linear(rms_norm(query, self.inter_norm[...], config.norm_epsilon), self.up[...])
        cosine, sine = rotation(batch.position, config.head_dim, config.rope_theta)
        query = rotate_half(query.reshape(tokens, -1, config.head_dim), cosine, sine)
        key = rotate_half(key.reshape(tokens, config.kv_heads, -1), cosine, sine)
        value = value.reshape(tokens, config.kv_heads, -1)
        where = (batch.page_table, batch.sequence_of_token, batch.position)
        with jax.named_scope("write_pages"):
            k_pages, v_pages = write_pages(*pages, key, value, *where)
        with jax.named_scope("paged_attention"):
            mixed = paged_attention(query, k_pages, v_pages, *where, scale=config.head_dim**-0.5)
        return linear(mixed.reshape(tokens, -1), self.out[...]), (k_pages, v_pages)
