"""The paged KV cache of one layer: its arrays, their shapes and their sharding.

A layer's cache is a tuple of arrays, `[dp * pages, heads, page_size, width]` each, which the kind
of its attention declares. In an 8-bit format each of them comes with an array of FP32 scales,
`[dp * pages, heads, page_size]`, one per token and head; FP8 values are stored as their bits. Every
DP group owns its `pages` rows, and the page ids in a page table are relative to the group.
`pallas_kernels/attention` defines the layout inside a page; `engine/pages.py` decides which
sequence owns which page.
"""

import pkgutil
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxserve.config.deployment import Deployment, scratch_pages
from jaxserve.config.formats import FormatName
from jaxserve.config.model import Attention, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.message import cached_dtype, has_scales, storage

Pages = tuple[Array, ...]
"""The arrays of a layer, then their scales in the same order."""

PAGES_SPEC = PartitionSpec("dp", "tp")


Reader = Literal["attention", "indexer", "compressor"]


class Entry(NamedTuple):
    """Declares one array of a layer's cache: a row for every head and token, or several tokens."""

    heads: int
    width: int
    plain: FormatName | None = None
    """Format of rows that are the same floats, without scales, in every format of the cache."""
    every: int = 1
    """Tokens of a page for each of its rows; 0: the page has one row, a state."""
    ring: bool = False
    """True if only rows of the last tokens are read."""
    reader: Reader = "attention"
    """`compressor`: rows that are not complete, of which other rows are made."""


def layer_entries(
    config: ModelConfig, attention: Attention, deployment: Deployment
) -> tuple[Entry, ...]:
    """Declares the arrays of a layer with this attention, as the class that computes it does; else
    keys and values.

    Raises:
      ConfigError: `cache.rope` without latent attention, or a page size that rows do not divide.
    """
    if (rope := deployment.cache.rope) != "auto" and not attention.splits_rows:
        raise ConfigError(
            f"cache.rope = {rope} is for latent attention (MLA), which keeps a rotated key beside "
            "every latent: the model has none"
        )
    declare = getattr(pkgutil.resolve_name(attention.computed_by), "entries", None)
    if declare:
        return tuple(declare(config, attention, deployment))
    return (Entry(attention.kv_heads, attention.head_dim, ring=attention.window > 0),) * 2


def row_arrays(
    declared: Sequence[Entry], rows: tuple[int, ...], cache_format: FormatName
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of arrays that hold the rows of tokens in a format of the cache: values, then scales.

    Args:
      rows: the other dimensions; the last one counts tokens.
    """
    *outer, tokens = rows
    values, scales = [], []
    for entry in declared:
        shape = *outer, tokens // entry.every if entry.every else 1
        dtype = storage(entry.plain) if entry.plain else cached_dtype(cache_format)
        values.append(jax.ShapeDtypeStruct((*shape, entry.width), dtype))
        if has_scales(cache_format) and not entry.plain:
            scales.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    return (*values, *scales)


class PagePool(NamedTuple):
    """Layers with pages of the same form."""

    layers: tuple[int, ...]
    entries: tuple[Entry, ...]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    """Pages of one layer."""
    tables: tuple[int, ...]
    """For each array the page table of a step that lists its pages: 0, or 1 if sequences keep only
    those of their last tokens."""
    pages: tuple[int, ...]
    """Pages of a DP group in each page table."""


def page_pools(config: ModelConfig, deployment: Deployment) -> tuple[PagePool, ...]:
    """Pools of a deployment: first those of layers that see all tokens."""
    rings, layers = ring_pages(config, deployment), dict[tuple[Entry, ...], list[int]]()
    for number, kind in enumerate(map(config.layer, range(config.all_layers))):
        layers.setdefault(layer_entries(config, kind.attention, deployment), []).append(number)
    several = any(entry.every != 1 for entries in layers for entry in entries)
    if deployment.scheduler.spread and (several or deployment.attention.dp == 1):
        why = "the model keeps states or rows of several tokens" if several else "attention.dp = 1"
        raise ConfigError(f"scheduler.spread = true: {why}")
    pages = (deployment.cache.pages, *[rings] * (rings > 0))
    pools = []
    for entries in sorted(layers, key=lambda entries: entries[0].ring):
        scaled = [e for e in entries if has_scales(deployment.cache_format) and not e.plain]
        tables = tuple(int(e.ring and rings > 0) for e in (*entries, *scaled))
        arrays = page_arrays(deployment, entries, rings)
        pools.append(PagePool(tuple(layers[entries]), entries, arrays, tables, pages))
    return tuple(pools)


def ring_pages(config: ModelConfig, deployment: Deployment) -> int:
    """Returns the number of pages that each DP group reserves for windows and states; 0 if no
    sequence can outgrow a window.

    A slot with a sequence has one page of states, or three with a prefix cache; why no more are
    needed, with drafts either, is told in `RingPool`. Pages of idle slots keep the states of
    prefixes and of held prompts.

    A decoding sequence holds the pages of its window, and of the tokens and drafts of the two steps
    in flight, which may begin in the middle of a page. A lane's two steps add their chunks, and
    each chunk may reach into one more page: the slot's spare page, or a page kept for the end of a
    cached prefix. With this number of pages a running sequence never lacks one.
    """
    window, limits, size = largest_window(config), deployment.scheduler, deployment.cache.page_size
    if config.recurrent:
        return limits.slots * deployment.lanes * (3 if deployment.cache.prefix else 1)
    if not 0 < window < limits.max_length:
        return 0
    own = -(-(window + 2 * deployment.drafts) // size) + 1 + (deployment.modules > 0)
    spare = max(1, deployment.cache.prefix * (-(-(window - 1) // size)))
    chunk = limits.token_budget * (deployment.attention.dp if limits.spread else 1)
    pages = deployment.lanes * (limits.slots * (own + spare) + 2 * chunk // size)
    return min(deployment.cache.pages, pages + scratch_pages(deployment.drafts, deployment.modules))


def largest_window(config: ModelConfig) -> int:
    """Returns the most tokens that a layer with a window sees; 0 without such layers."""
    return max(attention.window for attention in config.attentions())


def page_arrays(
    deployment: Deployment, entries: Sequence[Entry], rings: int = 0
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the global shapes and dtypes of one layer's cache.

    Heads are divided over tp. With fewer heads than devices, several devices hold copies of a head.

    Args:
      entries: rows of the layer.
      rings: pages of a ring; 0: rings are pages as all others, `cache.pages`.
    """
    heads = max(entries[0].heads, deployment.attention.tp)
    arrays = row_arrays(entries, (heads, deployment.cache.page_size), deployment.cache_format)
    each = (*entries, *(entry for entry in entries if not entry.plain))
    counts = (rings if rings and entry.ring else deployment.cache.pages for entry in each)
    return tuple(
        array.update(shape=(deployment.attention.dp * count, *array.shape))
        for count, array in zip(counts, arrays, strict=False)
    )
