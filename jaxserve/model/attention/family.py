"""Chooses the module that computes a model's attention, and the values that its layers share.
Called by `blocks.py` and by a step's first program. Each kind of attention has its own file, and a
process imports those of its own model only."""

import functools
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxserve.config.model import Attention, LayerKind, ModelConfig
from jaxserve.model.attention.batch import RaggedBatch, Shared
from jaxserve.model.attention.rope import rotation
from jaxserve.model.module import Formats
from pallas_kernels.attention.api import attention_places


def attention_module(config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs) -> Any:
    """Makes the attention module of a layer. It maps normed tokens, pages and batch to this
    device's share of the output, and the pages.

    Args:
      kind: kind of the layer.
    """
    return pkgutil.resolve_name(kind.attention.computed_by)(config, kind, formats, rngs)


def with_shared(
    batch: RaggedBatch,
    dtype: jnp.dtype,
    caches: Mapping[Attention, tuple[Array, Sequence[jax.ShapeDtypeStruct]]],
) -> RaggedBatch:
    """Adds the values that several layers would compute from positions alone: for each of the
    model's attention specs the angles, and the attention kernels' walk over the pages.

    Args:
      dtype: dtype of the queries.
      caches: for each attention spec, in the model's order, the page table and the arrays of one
        layer's cache on a device of the surrounding `shard_map`.
    """
    shared = (_shared(batch, sizes, dtype, *cache) for sizes, cache in caches.items())
    return batch._replace(shared=tuple(shared))


def with_exchange(batch: RaggedBatch, slot: Array, page_size: int) -> RaggedBatch:
    """Lets layers exchange the pages of the prompt in this slot, counted from 1; 0: none here."""
    exchanged = pkgutil.resolve_name("jaxserve.model.attention.exchanged_pages:ExchangedPages")
    return batch._replace(spread=exchanged.of(batch, slot, page_size))


def layer_table(sizes: Attention, batch: RaggedBatch, page_size: int) -> RaggedBatch:
    """Returns the batch for layers with this attention, which may read other columns of the page
    table than their tokens' own."""
    made = pkgutil.resolve_name(sizes.computed_by)
    return getattr(made, "placed", lambda batch, _: batch)(batch, page_size)


def _shared(
    batch: RaggedBatch,
    sizes: Attention,
    dtype: jnp.dtype,
    table: Array,
    pages: Sequence[jax.ShapeDtypeStruct],
) -> Shared:
    """Computes the values that layers with one attention spec share. The `walk` of the class that
    computes it, if it has one, says which arrays the attention kernels walk over; otherwise these
    are the first two."""
    tokens = batch.position.shape[0]
    angles = rotation(batch.position, sizes.rotated, sizes.rope) if sizes.rope else None
    made = pkgutil.resolve_name(sizes.computed_by)
    walk = getattr(made, "walk", lambda *_: (*pages[:2], None, 0, sizes.head_dim))
    found: Any = walk(sizes, tokens, table, pages)
    if not found:
        return Shared(angles)
    keys, values, rope_pages, latent, width = found
    heads = sizes.q_heads // jax.lax.axis_size("tp")
    queries = jax.ShapeDtypeStruct((tokens, heads, width), dtype)
    where = table, *batch.where[1:]
    options = {"v_width": latent, "runs": len(table)}
    find = functools.partial(attention_places, queries, keys, values, *where, **options)
    return Shared(angles, find(window=sizes.window, rope_pages=rope_pages))
