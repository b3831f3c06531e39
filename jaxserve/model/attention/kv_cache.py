"""The paged KV cache of one layer: its arrays, their shapes and their sharding.

A layer's cache is a tuple of arrays, `[dp * pages, heads, page_size, width]` each: keys and values,
or MLA's latent alone. In an 8-bit format each of them comes with an array of FP32 scales,
`[dp * pages, heads, page_size]`, one per token and head; FP8 values are stored as their bits,
uint8. With `cache.rope`, MLA's latents in 8 bits are without their rotated part, which has an array
of its own in BF16, without scales (xDeepServe §4.7). Every DP group owns its `pages` rows, and the
page ids in a page table are relative to the group. `pallas_kernels/attention` defines the layout
inside a page; `engine/pages.py` decides which sequence owns which page.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FormatName
from jaxserve.config.model import MLA, LayerKind, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.quant.rows import cached_dtype, has_scales
from pallas_kernels import rotate_and_write as kernels
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.rotate_and_write import Latents

Pages = tuple[Array, ...]
"""(keys, values) or (latent,), then their scales in the same order; or (latent, rotated part, the
latent's scales)."""

PAGES_SPEC = PartitionSpec("dp", "tp")


class Entry(NamedTuple):
    """Declares one array of a layer's cache: a row for every token and head."""

    heads: int
    width: int
    plain: bool = False
    """Whether rows are BF16 without scales in every format of the cache."""


def layer_entries(config: ModelConfig, deployment: Deployment) -> tuple[Entry, ...]:
    """Declares what a layer keeps of every token: keys and values, or MLA's latent. With
    `cache.rope` the rotated part of latents is an array of its own.

    Raises:
      ConfigError: `cache.rope` of a model without latent attention.
    """
    attention, rope = config.attentions()[0], deployment.cache.rope
    if isinstance(attention, MLA):
        latent, rotated = attention.kv_latent, attention.rope_dim
        whole = (Entry(1, latent + rotated),)
        return whole if rope == "auto" else (Entry(1, latent), Entry(1, rotated, plain=True))
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


def page_arrays(config: ModelConfig, deployment: Deployment) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Global shapes and dtypes of one layer's cache.

    Heads are divided over tp; where there are fewer heads than devices, several devices hold a copy
    of the same head.
    """
    cache, declared = deployment.cache, layer_entries(config, deployment)
    heads = max(declared[0].heads, deployment.attention.tp)
    rows = deployment.attention.dp * cache.pages, heads, cache.page_size
    return row_arrays(declared, rows, deployment.cache_format)


class HeadNorms(NamedTuple):
    """RMSNorms of every head of queries and keys, before they are rotated."""

    query: Float[Array, " head_dim"]
    key: Float[Array, " head_dim"]
    epsilon: float


def rotate_and_write(
    pages: Pages,
    query: Float[Array, "tokens q_heads head_dim"],
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads _"],
    turn: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]],
    batch: RaggedBatch,
    norms: HeadNorms | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Pages]:
    """Norms and rotates queries and keys, and writes keys and values, quantised to the cache's
    format. The queries are for `attend`: they may have its dtype already."""
    query_norm, key_norm, epsilon = norms or (None, None, 0.0)
    return kernels.rotate_and_write(
        pages,
        query,
        key,
        value,
        *turn,
        batch.page_table,
        batch.sequence_of_token,
        batch.position,
        query_norm=query_norm,
        key_norm=key_norm,
        epsilon=epsilon,
    )


class LatentNorms(NamedTuple):
    """RMSNorms behind MLA's down maps."""

    query: Float[Array, " q_latent"] | None
    """Norm of the queries' latents; None: queries have no latents."""
    latent: Float[Array, " kv_latent"]
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
    return kernels.norm_and_write(
        pages,
        down,
        *turn,
        batch.page_table,
        batch.sequence_of_token,
        batch.position,
        latent_norm=norms.latent,
        query_norm=norms.query,
        epsilon=norms.epsilon,
        interleaved=interleaved,
        stored=stored,
    )


def attend(
    queries: Float[Array, "tokens q_heads width"],
    pages: Pages,
    batch: RaggedBatch,
    kind: LayerKind,
    *,
    scale: float,
    dtype: jnp.dtype,
) -> Float[Array, "tokens q_heads v_width"]:
    """Attention of every token to the cached tokens of its sequence, itself included, in `dtype`:
    queries from `rotate_and_write` may have another one."""
    keys, values, *scales = pages
    k_scales, v_scales = scales or (None, None)
    return paged_attention(
        queries,
        keys,
        values,
        batch.page_table,
        batch.sequence_of_token,
        batch.position,
        scale=scale,
        window=kind.attention.window,
        int8_products=kind.int8_products,
        k_scales=k_scales,
        v_scales=v_scales,
        out_dtype=dtype,
        places=batch.own.places,
    )


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
    split = _is_split(pages)
    out, lse = paged_attention(
        queries,
        pages[0],
        None,
        batch.page_table,
        batch.sequence_of_token,
        batch.position,
        scale=scale,
        v_width=v_width,
        int8_products=kind.int8_products,
        k_scales=pages[-1] if len(pages) > 1 else None,
        rope_pages=pages[1] if split else None,
        with_lse=True,
        places=batch.own.places,
    )
    return out, lse


def _is_split(pages: Pages) -> bool:
    """Whether latents are without their rotated part, which is in an array of its own."""
    return len(pages) == 3
