"""The indexer of sparse attention (DeepSeek-V3.2 §2.1): chooses the tokens that latent attention
sees, by scores of a few small heads.

Called by `mla.py`. It caches one key a token, in the cache's format, beside the latents. Runs
inside `shard_map` on the attention mesh, where every `tp` device has all heads of the indexer:
divided heads would need a sum over `tp` of scores [tokens, context] in FP32, 16 MB a layer for 128
tokens at 32k, which takes longer than scoring does. The Hadamard rotation of the released kernels,
which changes no product but for rounding, is left out.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.config.model import MLA, ModelConfig
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.module import Formats, linear, matrix, scale, weight, zeros
from pallas_kernels.attention.api import write_rows
from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.rotate_and_write import kept, rotate
from pallas_kernels.sparse_attention import choose_positions

EPSILON = 1e-6
"""Epsilon of the norm of keys, the same in every model."""


class TokenIndexer(nnx.Module):
    """Scores Σ_h w_h · ReLU(q_h · k) of every cached token, of which the best are chosen.

    Attributes:
      query: [heads·head_dim, q_latent], q_h from MLA's normed query latent.
      key: [head_dim, d_model].
      key_norm, key_bias: [head_dim], LayerNorm of the key.
      weights: [heads, d_model], w_h of the token that looks.
    """

    def __init__(self, config: ModelConfig, sizes: MLA, formats: Formats, rngs: nnx.Rngs):
        assert sizes.indexer
        self.sizes, self.rope_dim = sizes.indexer, sizes.rope_dim
        heads, width = self.sizes.heads, self.sizes.head_dim
        self.query = matrix(rngs, formats, index_heads=heads * width, latent=sizes.q_latent)
        self.key = matrix(rngs, formats, index_key=width, d_model=config.d_model)
        self.key_norm = scale(rngs, formats.norms, index_key=width)
        self.key_bias = zeros(rngs, formats.norms, index_key=width)
        self.weights = weight(rngs, formats.dtype, index_heads=heads, d_model=config.d_model)

    def write(
        self,
        x: Float[Array, "tokens d_model"],
        pages: Pages,
        turn: tuple[Array, Array],
        batch: RaggedBatch,
    ) -> Pages:
        """Writes the keys of normed tokens to the pages."""
        key = linear(x, self.key).astype(jnp.float32)
        key -= jnp.mean(key, axis=-1, keepdims=True)
        key *= jax.lax.rsqrt(jnp.mean(jnp.square(key), axis=-1, keepdims=True) + EPSILON)
        key = (key * self.key_norm[...] + self.key_bias[...]).astype(x.dtype)
        row, scales = kept(self._turned(key[:, None], turn), pages[0])
        return write_rows(pages, (row,) if scales is None else (row, scales), *batch.where)

    def choose(
        self,
        x: Float[Array, "tokens d_model"],
        latent: Float[Array, "tokens q_latent"],
        pages: Pages,
        turn: tuple[Array, Array],
        batch: RaggedBatch,
    ) -> Int32[Array, "tokens chosen"]:
        """Positions that each token attends to; -1: none. The tokens' own keys are in the pages."""
        heads, width = self.sizes.heads, self.sizes.head_dim
        query = linear(latent, self.query).reshape(-1, heads, width)
        weights, query = matmul(x, self.weights[...]), self._turned(query, turn)
        weights *= (heads * width) ** -0.5
        return choose_positions(query, weights, pages, *batch.where, top_k=self.sizes.top_k)

    def _turned(
        self, x: Float[Array, "tokens heads head_dim"], turn: tuple[Array, Array]
    ) -> Float[Array, "tokens heads head_dim"]:
        """Rotates the first columns by MLA's angles."""
        first = rotate(x[..., : self.rope_dim], *turn, interleaved=self.sizes.interleaved)
        return jnp.concatenate([first, x[..., self.rope_dim :]], axis=-1)
