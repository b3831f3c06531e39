"""Latents in the paged cache: how they are written, and attention to them. Called by `mla.py`.

Pages of latents are (latent,) or (latent, rotated part), then their scales; an indexer's keys come
behind the latent, and so do their scales.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxserve.config.model import MLA, LayerKind
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from pallas_kernels import rotate_and_write as kernels
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.rotate_and_write import Latents


def without_index[A](pages: Sequence[A]) -> tuple[tuple[A, ...], tuple[A, ...]]:
    """Divides the pages of latent attention with an indexer into those of latents, and the
    indexer's keys with their scales."""
    latent, index, *others = pages
    return (latent, *others[:-1]), (index, *others[-1:])


def with_index(latents: Pages, index: Pages) -> Pages:
    """Undoes `without_index`."""
    return latents[0], index[0], *latents[1:], *index[1:]


def is_sparse(sizes: MLA, pages: Sequence[jax.ShapeDtypeStruct | Array], page_table: Array) -> bool:
    """Returns whether a page table has room for more tokens than an indexer chooses."""
    if not sizes.indexer:
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
