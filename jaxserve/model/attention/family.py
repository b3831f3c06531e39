"""Which module computes a model's attention, and what its layers share. Called by `blocks.py` and
by a step's first program; each family has its own file."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.config.model import GQA, MFA, MLA, LayerKind, ModelConfig
from jaxserve.model.attention import gqa, mfa, mla
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import places
from jaxserve.model.attention.rope import rotation
from jaxserve.model.module import Formats, Rngs


def attention_module(
    config: ModelConfig, kind: LayerKind, formats: Formats, rngs: Rngs
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
    heads = sizes.q_heads // jax.lax.axis_size("tp")
    latent = sizes.kv_latent if isinstance(sizes, MLA) else 0
    rotated = sizes.rope_dim if isinstance(sizes, MLA) else sizes.head_dim
    batch = batch._replace(turn=rotation(batch.position, rotated, config.rope))
    if latent and tokens > batch.page_table.shape[0]:
        return batch  # which attends to the cache from other positions (`mla.py`)
    width = latent + rotated if latent else rotated
    queries = jax.ShapeDtypeStruct((tokens, heads, width), dtype)
    windows = sorted({kind.window for kind in config.kinds()})
    found = {
        window: places(queries, pages, batch, window=window, v_width=latent) for window in windows
    }
    return batch._replace(places=found)
