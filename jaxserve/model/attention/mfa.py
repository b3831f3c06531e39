"""Multi-matrix factorization attention (Step-3 §2.2): low-rank queries, one K and one V head.

One of the attention families; `model.py` composes it with norms, router and residual. Runs inside
`shard_map` on the attention mesh: query heads are split over `tp`, K and V are computed everywhere.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.config.attention.mfa import MFA as Sizes
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.heads import attend
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.attention.rope import batch_rotation
from jaxserve.model.module import Formats, Norm, linear, matrix, scale, side_by_side
from pallas_kernels.rotate_and_write import rotate_and_write


class FactorizedAttention(nnx.Module):
    """q = RoPE(RMSNorm(x·W_down)·W_up) per head; k, v = x·W_kv, shared by all query heads.

    Attributes:
      down: [latent + 2·kv_heads·head_dim, d_model], the query's low-rank map, K and V side by side.
      inter_norm: [latent], RMSNorm between the two query matrices.
      up: [q_heads·head_dim, latent].
      out: [d_model, q_heads·head_dim].
    """

    takes_norm = True
    """Callers leave the norm of the rows to the first product."""

    def __init__(self, config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs):
        assert isinstance(kind.attention, Sizes)
        self.sizes = sizes = kind.attention
        self.kind, self.epsilon = kind, config.norm_epsilon
        heads, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        parts = (sizes.latent, kv, kv)
        self.down = side_by_side(
            rngs, formats, parts, latent_and_kv=sum(parts), d_model=config.d_model
        )
        self.inter_norm = scale(rngs, formats.norms, latent=sizes.latent)
        self.up = matrix(rngs, formats, q_heads=heads, latent=sizes.latent)
        self.out = matrix(rngs, formats, d_model=config.d_model, out_heads=heads)

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        pages: Pages,
        batch: RaggedBatch,
        norm: Norm | None = None,
    ) -> tuple[Float[Array, "tokens d_model"], Pages]:
        """Attention of tokens, after their K and V are written to the pages. The first product
        norms the tokens, if a norm is given.

        Returns this device's share of the output projection (the caller sums over `tp`, in FP32)
        and the pages.
        """
        sizes, tokens = self.sizes, x.shape[0]
        down = linear(x, self.down, norm=norm)
        key, value = (
            part.reshape(tokens, sizes.kv_heads, -1)
            for part in jnp.split(down[:, sizes.latent :], 2, axis=-1)
        )
        query = linear(down, self.up, norm=(self.inter_norm[...], self.epsilon))
        angles = batch_rotation(batch, sizes.head_dim, sizes.rope)
        query = query.reshape(tokens, -1, sizes.head_dim)
        with jax.named_scope("write_pages"):
            query, pages = rotate_and_write(
                pages, query, key, value, *angles, *batch.where, joined=down
            )
        with jax.named_scope("paged_attention"):
            scale = sizes.head_dim**-0.5
            mixed, pages = attend(query, pages, batch, self.kind, scale=scale, dtype=x.dtype)
        return linear(mixed.reshape(tokens, -1), self.out), pages
