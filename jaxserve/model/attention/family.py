"""Which module computes a model's attention, and what its layers share. Called by `blocks.py` and
by a step's first program; each family has its own file."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config.model import GQA, MFA, MLA, LayerKind, ModelConfig
from jaxserve.model.attention import gqa, mfa, mla
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.rope import rotation
from jaxserve.model.module import Formats
from pallas_kernels.attention.api import attention_places


def attention_module(
    config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs
) -> mfa.MFA | gqa.GQA | mla.MLA:
    """The attention module of a layer: normed tokens, pages and batch in; this device's share of
    the output, and the pages, out.

    Args:
      kind: of the layer: its window, and whether it multiplies in INT8.
    """
    sizes = config.attention
    if isinstance(sizes, MFA):
        return mfa.MFA(config, sizes, kind, formats, rngs)
    if isinstance(sizes, GQA):
        return gqa.GQA(config, sizes, kind, formats, rngs)
    return mla.MLA(config, sizes, kind, formats, rngs)


def with_shared(
    batch: RaggedBatch, config: ModelConfig, dtype: jnp.dtype, pages: Sequence[jax.ShapeDtypeStruct]
) -> RaggedBatch:
    """The batch with what every layer would compute of positions alone: the angles, and the walk of
    the attention kernels over the pages for each window.

    Args:
      dtype: of the queries.
      pages: a layer's arrays, as on a device of the surrounding `shard_map`.
    """
    sizes, tokens = config.attention, batch.position.shape[0]
    latent, rotated = 0, sizes.rope_dim if isinstance(sizes, MLA) else sizes.head_dim
    batch = batch._replace(turn=rotation(batch.position, rotated, config.rope))
    keys, values, rope_pages = pages[0], pages[1] if len(pages) > 1 else None, None
    if isinstance(sizes, MLA):
        if tokens > batch.page_table.shape[0]:
            return batch  # which attends to the cache from other positions (`mla.py`)
        latent, values, rope_pages = sizes.kv_latent, None, pages[1] if len(pages) == 3 else None
    heads = sizes.q_heads // jax.lax.axis_size("tp")
    queries = jax.ShapeDtypeStruct((tokens, heads, latent + rotated), dtype)
    where = batch.page_table, batch.sequence_of_token, batch.position
    find = functools.partial(attention_places, queries, keys, values, *where, v_width=latent)
    windows = sorted({kind.window for kind in config.kinds()})
    return batch._replace(places={w: find(window=w, rope_pages=rope_pages) for w in windows})
