"""The paged KV cache of one layer: its arrays, their shapes and their sharding.

A layer's cache is a tuple of arrays, `[dp * pages, heads, page_size, width]` each: keys and values,
or MLA's latent, with an indexer also its key. In an 8-bit format each of them comes with an array
of FP32 scales, `[dp * pages, heads, page_size]`, one per token and head; FP8 values are stored as
their bits, uint8. With `cache.rope`, MLA's latents in 8 bits are without their rotated part, which
has an array of its own in BF16, without scales (xDeepServe §4.7). Every DP group owns its `pages`
rows, and the page ids in a page table are relative to the group. `pallas_kernels/attention` defines
the layout inside a page; `engine/pages.py` decides which sequence owns which page.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.config.deployment import Deployment, scratch_pages
from jaxserve.config.formats import FormatName
from jaxserve.config.model import MLA, Attention, LayerKind, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.quant.rows import cached_dtype, has_scales
from pallas_kernels import rotate_and_write as kernels
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.rotate_and_write import Latents

Pages = tuple[Array, ...]
"""(keys, values) or (latent,), then their scales in the same order; or (latent, rotated part, the
latent's scales). With an indexer its keys come behind the latent, and so do their scales."""

ROW_COLUMNS = 128
"""On TPUs latents behind an indexer are padded with zeros to a multiple of this: XLA keeps narrower
rows with the tokens last, and would copy the whole pool before it reads single rows."""

PAGES_SPEC = PartitionSpec("dp", "tp")


class Entry(NamedTuple):
    """Declares one array of a layer's cache: a row for every token and head."""

    heads: int
    width: int
    plain: bool = False
    """True if rows are BF16 without scales in every format of the cache."""


def layer_entries(config: ModelConfig, deployment: Deployment) -> tuple[Entry, ...]:
    """Declares the rows that a layer keeps for every token: keys and values, or MLA's latent and
    the indexer's key. With `cache.rope` the rotated part of latents is an array of its own.

    Raises:
      ConfigError: `cache.rope` without latent attention, or layers with different rows.
    """
    rope, of_tpu = deployment.cache.rope, config.platform == "tpu"
    kinds = {_entries(attention, rope, of_tpu) for attention in config.attentions()}
    if len(kinds) > 1:
        raise ConfigError(f"layers that keep different rows of a token: {sorted(kinds)}")
    return kinds.pop()


def _entries(attention: Attention, rope: str, of_tpu: bool) -> tuple[Entry, ...]:
    if isinstance(attention, MLA):
        latent, rotated = attention.kv_latent, attention.rope_dim
        index = (Entry(1, attention.indexer.head_dim),) if attention.indexer else ()
        if rope == "auto":
            spare = -(latent + rotated) % ROW_COLUMNS if index and of_tpu else 0
            return Entry(1, latent + rotated + spare), *index
        return Entry(1, latent), *index, Entry(1, rotated, plain=True)
    if rope != "auto":
        raise ConfigError(
            f"cache.rope = {rope} is for latent attention (MLA), which keeps a rotated key beside "
            "every latent: the model has none"
        )
    return (Entry(attention.kv_heads, attention.head_dim),) * 2


def row_arrays(
    declared: Sequence[Entry], rows: tuple[int, ...], cache_format: FormatName
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of arrays that hold these rows in a format of the cache: values, then scales."""
    plain, scale = jnp.dtype(jnp.bfloat16), jax.ShapeDtypeStruct(rows, jnp.float32)
    dtypes = [plain if entry.plain else cached_dtype(cache_format) for entry in declared]
    pairs = zip(declared, dtypes, strict=True)
    values = [jax.ShapeDtypeStruct((*rows, entry.width), dtype) for entry, dtype in pairs]
    scaled = [entry for entry in declared if has_scales(cache_format) and not entry.plain]
    return (*values, *[scale] * len(scaled))


class PagePool(NamedTuple):
    """Layers whose rows lie in pages with the same ids."""

    layers: tuple[int, ...]
    pages: int
    """Pages of a DP group."""
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    """Pages of one layer."""
    ring: bool
    """True if sequences keep only the pages of their last tokens; page tables list these second."""


def page_pools(config: ModelConfig, deployment: Deployment) -> tuple[PagePool, ...]:
    """Pools of a deployment: layers that see all tokens, then layers with a window."""
    rings, pages = ring_pages(config, deployment), deployment.cache.pages
    pools = []
    for windowed, count in ((False, pages), (True, rings or pages)):
        kinds = enumerate(map(config.layer, range(config.all_layers)))
        layers = [n for n, kind in kinds if windowed == (kind.attention.window > 0)]
        arrays = page_arrays(config, deployment, count)
        pools.append(PagePool(tuple(layers), count, arrays, windowed and rings > 0))
    return tuple(pool for pool in pools if pool.layers)


def ring_pages(config: ModelConfig, deployment: Deployment) -> int:
    """Pages of a DP group for layers with a window; 0: no sequence outgrows a window.

    A sequence's ring has its window, a page that it grows into and two that it leaves. The chunks
    of a lane's two steps in flight come on top, and with a prefix cache as many rings again for the
    ends of cached prefixes. With this many pages a running sequence never lacks one.
    """
    window, limits, size = largest_window(config), deployment.scheduler, deployment.cache.page_size
    if not 0 < window < limits.max_length:
        return 0
    rings = limits.slots * deployment.lanes * (1 + deployment.cache.prefix)
    chunks = 2 * deployment.lanes * (limits.token_budget // size + 1)
    pages = rings * (-(-(window + deployment.drafts) // size) + 3) + chunks
    return min(deployment.cache.pages, pages + scratch_pages(deployment.drafts, deployment.modules))


def largest_window(config: ModelConfig) -> int:
    """Returns the most tokens that a layer with a window sees; 0 without such layers."""
    return max(attention.window for attention in config.attentions())


def page_arrays(
    config: ModelConfig, deployment: Deployment, pages: int = 0
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the global shapes and dtypes of one layer's cache with this number of pages; 0:
    `cache.pages`.

    Heads are divided over tp. With fewer heads than devices, several devices hold copies of a head.
    """
    cache, declared = deployment.cache, layer_entries(config, deployment)
    heads = max(declared[0].heads, deployment.attention.tp)
    rows = deployment.attention.dp * (pages or cache.pages), heads, cache.page_size
    return row_arrays(declared, rows, deployment.cache_format)


def without_index[A](pages: Sequence[A]) -> tuple[tuple[A, ...], tuple[A, ...]]:
    """Divides the pages of latent attention with an indexer into those of latents, and the
    indexer's keys with their scales."""
    latent, index, *others = pages
    return (latent, *others[:-1]), (index, *others[-1:])


def with_index(latents: Pages, index: Pages) -> Pages:
    """Undoes `without_index`."""
    return latents[0], index[0], *latents[1:], *index[1:]


def is_sparse(
    sizes: Attention, pages: Sequence[jax.ShapeDtypeStruct | Array], page_table: Array
) -> bool:
    """Returns whether a page table has room for more tokens than an indexer chooses."""
    if not isinstance(sizes, MLA) or not sizes.indexer:
        return False
    return page_table.shape[1] * pages[0].shape[2] > sizes.indexer.top_k


class LatentNorms(NamedTuple):
    """RMSNorms behind MLA's down maps."""

    query_norm: Float[Array, " q_latent"] | None
    """Norm of the queries' latents; None: queries have no latents."""
    latent_norm: Float[Array, " kv_latent"]
    epsilon: float


def write_latents(
    pages: Pages,
    down: Float[Array, "tokens columns"],
    turn: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]],
    batch: RaggedBatch,
    norms: LatentNorms,
    *,
    interleaved: bool = False,
    stored: bool = False,
) -> Latents:
    """Norms latents, rotates the key beside them, and writes both, quantised to the cache's format;
    with `stored` also returns what is then in the cache."""
    norm = functools.partial(kernels.norm_and_write, interleaved=interleaved, stored=stored)
    return norm(pages, down, *turn, *batch.where, **norms._asdict())


def attend(
    queries: Float[Array, "tokens q_heads width"],
    pages: Pages,
    batch: RaggedBatch,
    kind: LayerKind,
    *,
    scale: float,
    dtype: jnp.dtype,
    sinks: Float[Array, " q_heads"] | None = None,
) -> Float[Array, "tokens q_heads v_width"]:
    """Computes the attention of every token to the cached tokens of its sequence, itself included.

    Args:
      dtype: of the output; queries from `rotate_and_write` may have another one.
      sinks: of every head a score in the softmax, whose value is zero. Kernels do not know it: with
        the log-sum-exp of all other scores, the output is multiplied by their share of the softmax.
    """
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
        return mixed
    return (mixed * jax.nn.sigmoid(lse - sinks)[:, :, None]).astype(dtype)


def attend_latent(
    queries: Float[Array, "tokens q_heads width"],
    pages: Pages,
    batch: RaggedBatch,
    kind: LayerKind,
    *,
    scale: float,
    v_width: int,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float[Array, "tokens q_heads"]]:
    """Attention over a cache whose rows serve as keys and, in their first `v_width` elements, as
    values; also returns the log-sum-exp of every row and head."""
    split = len(pages) == 3  # the rotated part of latents is in an array of its own
    out, lse = paged_attention(
        queries,
        pages[0],
        None,
        *batch.where,
        scale=scale,
        v_width=v_width,
        int8_products=kind.int8_products,
        with_lse=True,
        k_scales=pages[-1] if len(pages) > 1 else None,
        rope_pages=pages[1] if split else None,
        places=batch.own.places,
    )
    assert lse is not None
    return out, lse
