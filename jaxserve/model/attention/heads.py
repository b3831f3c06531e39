"""Attention to keys and values of every head in the paged cache, for `gqa.py` and `mfa.py`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.config.model import LayerKind
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from pallas_kernels.attention.api import paged_attention


def attend(
    queries: Float[Array, "tokens q_heads width"],
    pages: Pages,
    batch: RaggedBatch,
    kind: LayerKind,
    *,
    scale: float,
    dtype: jnp.dtype,
    sinks: Float[Array, " q_heads"] | None = None,
) -> tuple[Float[Array, "tokens q_heads v_width"], Pages]:
    """Computes the attention of every token to the cached tokens of its sequence, itself included.
    Also returns the pages, with the rows of other DP groups.

    Args:
      dtype: of the output; queries from `rotate_and_write` may have another one.
      sinks: of every head a score in the softmax, whose value is zero. Kernels do not know it: with
        the log-sum-exp of all other scores, the output is multiplied by their share of the softmax.
    """
    pages = batch.exchanged(pages)
    keys, values, *scales = pages
    k_scales, v_scales = scales or (None, None)
    mixed, lse = paged_attention(
        queries,
        keys,
        values,
        *batch.where,
        scale=scale,
        window=kind.attention.window,
        int8_products=kind.int8_products,
        k_scales=k_scales,
        v_scales=v_scales,
        with_lse=sinks is not None,
        out_dtype=dtype,
        places=batch.own.places,
    )
    if sinks is None or lse is None:
        return mixed, pages
    return (mixed.astype(jnp.float32) * jax.nn.sigmoid(lse - sinks)[:, :, None]).astype(
        dtype
    ), pages
