"""Multi-head latent attention (DeepSeek-V2 §2.1): the cache holds one latent a token.

One of the attention families; `model.py` composes it with norms, router and residual. Runs inside
`shard_map` on the attention mesh: query heads are split over `tp`, the latent is computed
everywhere.

Two formulations give the same result. *Absorbed*: queries are projected to the latent space and
attend to the cached latents directly. It reads little, which suits decode. *Expanded*: keys and
values of every head are made of the latents first. It takes a third of the FLOPs for each pair of
tokens, which suits prefill.

A step with more tokens than sequences has prefill chunks. Off TPUs, a chunk that is long enough
(`MLA.expansion`) attends to expanded keys and values alone, a block of cached positions at a time:
what was cached before costs a third as well, and the kernels of paged attention run on the blocks.
All other tokens attend absorbed. TPUs attend expanded within the chunks, absorbed to what was
cached before, and merge both by their log-sum-exps. With `attention.int8_products` the absorbed
form multiplies in INT8; the expanded one, whose keys and values are not the cache's, stays in
floats.

Pages of latents are (latent,), then its scales. With `cache.rope`, latents in 8 bits are without
their rotated part, an array of its own in BF16 (xDeepServe §4.7). An indexer's keys come behind the
latent, and so do their scales.

With an indexer (DeepSeek-V3.2 §2.1), its own or one of a layer before it (`Indexer.shared`), and in
a step whose page table has room for more tokens than it chooses, every token attends, absorbed, to
the cached rows that the indexer chooses for it. With a smaller table all rows would be chosen, and
the step is one without an indexer, which still caches the indexer's keys, one a token, in the
cache's format. Every `tp` device has all heads of the indexer: divided heads would need a sum over
`tp` of scores [tokens, context] in FP32, 16 MB a layer for 128 tokens at 32k, which takes longer
than scoring does. The Hadamard rotation of the released kernels, which changes no product but for
rounding, is left out.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.config.attention.mla import MLA as Sizes
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Entry, Pages
from jaxserve.model.attention.rope import batch_rotation
from jaxserve.model.module import (
    Formats,
    Weight,
    add_once,
    linear,
    matrix,
    scale,
    side_by_side,
    weight,
    zeros,
)
from pallas_kernels.attention.api import chunk_attention, merge, paged_attention, write_rows
from pallas_kernels.attention.expanded import attend_expanded, of_heads
from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.input_major import TILE
from pallas_kernels.rotate_and_write import kept, norm_and_write, rotate
from pallas_kernels.sparse_attention import attend_chosen, choose_positions


def without_index[A](pages: Sequence[A]) -> tuple[tuple[A, ...], tuple[A, ...]]:
    """Divides the pages of latent attention with an indexer into those of latents, and the
    indexer's keys with their scales."""
    latent, index, *others = pages
    return (latent, *others[:-1]), (index, *others[-1:])


def with_index(latents: Pages, index: Pages) -> Pages:
    """Undoes `without_index`."""
    return latents[0], index[0], *latents[1:], *index[1:]


def is_sparse(sizes: Sizes, pages: Sequence[Any], page_table: Array) -> bool:
    """Returns whether a page table has room for more tokens than an indexer chooses."""
    room = page_table.shape[1] * pages[0].shape[2]
    return sizes.indexer is not None and room > sizes.indexer.top_k


ROW_COLUMNS = 128
"""On TPUs latents behind an indexer are padded with zeros to a multiple of this: XLA keeps narrower
rows with the tokens last, and would copy the whole pool before it reads single rows."""
EPSILON = 1e-6
"""Epsilon of the norm of keys, the same in every model."""


def as_columns(
    chosen: Int32[Array, "tokens chosen"], dtype: jnp.dtype
) -> Float[Array, "tokens columns"]:
    """Writes positions, -1 for none, as digits to the base of 256, which every float holds."""
    digits = [(chosen + 1) >> shift & 255 for shift in (0, 8, 16)]
    return jnp.concatenate(digits, axis=1).astype(dtype)


def from_columns(columns: Float[Array, "tokens columns"]) -> Int32[Array, "tokens chosen"]:
    """Undoes `as_columns`."""
    low, middle, high = jnp.split(columns.astype(jnp.int32), 3, axis=1)
    return low + (middle << 8) + (high << 16) - 1


class TokenIndexer(nnx.Module):
    """Scores Σ_h w_h · ReLU(q_h · k) of every cached token, of which the best are chosen.

    Attributes:
      query: [heads·head_dim, q_latent], q_h from MLA's normed query latent.
      key: [head_dim, d_model].
      key_norm, key_bias: [head_dim], LayerNorm of the key.
      weights: [heads, d_model], w_h of the token that looks.
    """

    def __init__(self, config: ModelConfig, sizes: Sizes, formats: Formats, rngs: nnx.Rngs):
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
        angles: tuple[Array, Array],
        batch: RaggedBatch,
    ) -> Pages:
        """Writes the keys of normed tokens to the pages."""
        key = linear(x, self.key).astype(jnp.float32)
        key -= jnp.mean(key, axis=-1, keepdims=True)
        key *= jax.lax.rsqrt(jnp.mean(jnp.square(key), axis=-1, keepdims=True) + EPSILON)
        norm, bias = self.key_norm[...], self.key_bias[...]
        key = (key * norm.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
        row, scales = kept(self._turned(key[:, None], angles), pages[0])
        return write_rows(pages, (row,) if scales is None else (row, scales), *batch.where)

    def choose(
        self,
        x: Float[Array, "tokens d_model"],
        latent: Float[Array, "tokens q_latent"],
        pages: Pages,
        angles: tuple[Array, Array],
        batch: RaggedBatch,
    ) -> Int32[Array, "tokens chosen"]:
        """Positions that each token attends to; -1: none. The tokens' own keys are in the pages."""
        heads, width = self.sizes.heads, self.sizes.head_dim
        query = linear(latent, self.query).reshape(-1, heads, width)
        weights, query = matmul(x, self.weights[...]), self._turned(query, angles)
        weights *= (heads * width) ** -0.5
        return choose_positions(query, weights, pages, *batch.where, top_k=self.sizes.top_k)

    def _turned(
        self, x: Float[Array, "tokens heads head_dim"], angles: tuple[Array, Array]
    ) -> Float[Array, "tokens heads head_dim"]:
        """Rotates the first columns by MLA's angles."""
        first = rotate(x[..., : self.rope_dim], *angles, interleaved=self.sizes.interleaved)
        return jnp.concatenate([first, x[..., self.rope_dim :]], axis=-1)


class LatentAttention(nnx.Module):
    """Multi-head latent attention. Attributes hold the paper's matrices W^DQ, W^UQ, W^DKV, W^UK,
    W^UV.

    Attributes:
      down: [q_latent + kv_latent + rope_dim, d_model]: the queries' latent, the cached latent and
        the shared rotated key, side by side. Without the first, `query_up` starts from d_model.
      query_norm: [q_latent]; None if the model has no such norm.
      query_up: [q_heads·(nope_dim + rope_dim), q_latent].
      latent_norm: [kv_latent].
      key_up: [q_heads, nope_dim, kv_latent]; on TPUs see `_in_columns`.
      value_up: [q_heads, v_dim, kv_latent]; on TPUs see `_in_columns`.
      out: [d_model, q_heads·v_dim].
      down_bias, out_bias: biases of `down` and `out`, or None.
      indexer: chooses the tokens to attend to; None: all, or those that the last indexer before
        this layer has chosen (`Indexer.shared`).
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs):
        assert isinstance(kind.attention, Sizes)
        self.sizes, self.kind = kind.attention, kind
        sizes = self.sizes
        dtype, d_model = formats.dtype, config.d_model
        heads, latent = sizes.q_heads, sizes.kv_latent
        queries = heads * (sizes.nope_dim + sizes.rope_dim)
        low = sizes.q_latent
        parts = (low, latent + sizes.rope_dim) if low else (latent + sizes.rope_dim,)
        self.down = side_by_side(rngs, formats, parts, latents=sum(parts), d_model=d_model)
        self.down_bias = zeros(rngs, dtype, latents=sum(parts)) if sizes.bias else None
        self.query_norm = scale(rngs, formats.norms, latent=low) if low else None
        self.query_up = matrix(
            rngs, formats, q_heads=queries, **{"latent" if low else "d_model": low or d_model}
        )
        self.latent_norm = scale(rngs, formats.norms, latent=latent)
        # Not quantised: they are small for each head, and absorption needs full precision.
        key_up = weight(rngs, dtype, q_heads=heads, nope=sizes.nope_dim, latent=latent)
        value_up = weight(rngs, dtype, q_heads=heads, v=sizes.v_dim, latent=latent)
        self.on_tpu = config.platform == "tpu"
        self.key_up = _in_columns(key_up) if self.on_tpu else key_up
        self.value_up = _in_columns(value_up) if self.on_tpu else value_up
        self.out = matrix(rngs, formats, d_model=d_model, out_heads=heads * sizes.v_dim)
        self.out_bias = zeros(rngs, dtype, d_model=d_model) if sizes.bias else None
        self.indexer = TokenIndexer(config, sizes, formats, rngs) if sizes.own_indexer else None
        self.passes = config.choice_width > 0

    @staticmethod
    def entries(config: ModelConfig, sizes: Sizes, deployment: Deployment) -> Iterator[Entry]:
        """Declares latents and the indexer's keys. With `cache.rope` the rotated part of latents is
        an array of its own."""
        apart, width = deployment.cache.rope != "auto", sizes.kv_latent + sizes.rope_dim
        padded = sizes.indexer and config.platform == "tpu"
        yield Entry(
            1, sizes.kv_latent if apart else width + (-width % ROW_COLUMNS if padded else 0)
        )
        if indexer := sizes.own_indexer:
            yield Entry(1, indexer.head_dim, reader="indexer")
        if apart:
            yield Entry(1, sizes.rope_dim, "bfloat16")

    @staticmethod
    def walk(
        sizes: Sizes, tokens: int, table: Array, pages: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[Any, ...]:
        """Keys, values, rotated parts and v_width as `attention_places` takes them, and the
        queries' width; empty where attention uses other positions than the batch's."""
        if tokens > table.shape[0] or is_sparse(sizes, pages, table):
            return ()
        pages = without_index(pages)[0] if sizes.own_indexer else pages
        width = sum(array.shape[-1] for array in pages if len(array.shape) == 4)
        return pages[0], None, pages[1] if len(pages) == 3 else None, sizes.kv_latent, width

    def __call__(
        self, x: Float[Array, "tokens d_model"], pages: Pages, batch: RaggedBatch
    ) -> tuple[Any, ...]:
        """Attention of normed tokens, after their latents are written to the pages. Returns this
        device's share of the output projection [tokens, d_model] (the caller sums over `tp`), the
        pages, and what the indexer chose, as columns, where other layers share it."""
        tokens, chosen = x.shape[0], None
        sparse = is_sparse(self.sizes, pages, batch.page_table)
        chunks = tokens > batch.page_table.shape[0] and not sparse
        angles = batch_rotation(batch, self.sizes.rope_dim, self.sizes.rope)
        down = linear(x, self.down, self.down_bias)
        query_norm = None if self.query_norm is None else self.query_norm[...]
        pages, index = without_index(pages) if self.indexer else (pages, pages[:0])
        with jax.named_scope("write_pages"):
            if self.indexer:
                index = self.indexer.write(x, index, angles, batch)
            write = functools.partial(norm_and_write, pages, down, *angles, *batch.where)
            query, row, pages = write(
                latent_norm=self.latent_norm[...],
                query_norm=query_norm,
                epsilon=self.sizes.latent_epsilon,
                interleaved=self.sizes.rope.interleaved,
                stored=chunks and self.on_tpu,
            )
            pages, index = batch.exchanged(pages), batch.exchanged(index)
        nope, rope = self._query(query if self.sizes.q_latent else x, angles)
        with jax.named_scope("paged_attention"):
            attend = functools.partial(self._absorbed, nope, rope, pages, batch)
            if self.indexer and sparse:
                chosen = self.indexer.choose(x, query, index, angles, batch)
            if sparse:
                where = from_columns(batch.choice) if chosen is None else chosen, *batch.where[:2]
                absorbed, scaled = self._absorb(nope, rope, pages), self._scaled
                heads = self._values(attend_chosen(absorbed, pages, *where, **scaled)[0])
            elif row is not None:
                before, history = attend(jnp.where(batch.position < 0, -1, batch.chunk_start - 1))
                inside, chunk = self._naive(nope, rope, row, batch)
                heads = merge((before, inside), (history, chunk))
            elif chunks and tokens >= (least := self.sizes.expansion.least):
                query = jnp.concatenate([nope, rope], axis=-1)
                up = self.key_up[...], self.value_up[...]
                heads = attend_expanded(
                    query, pages, up, batch.where, attend, self.sizes.scale, least
                )
            else:
                heads, _ = attend(batch.position, batch.own.places)
        if self.indexer:
            pages = with_index(pages, index)
        share = linear(heads.reshape(tokens, -1), self.out)
        passed = [as_columns(chosen, x.dtype)] if self.passes and chosen is not None else []
        return add_once(share, self.out_bias), pages, *passed

    def _query(
        self, x: Array, angles: tuple[Array, Array]
    ) -> tuple[Float[Array, "tokens q_heads nope_dim"], Float[Array, "tokens q_heads rope_dim"]]:
        """Computes the queries' two parts from the input of `query_up`; rotates the second."""
        sizes = self.sizes
        query = linear(x, self.query_up)
        query = query.reshape(x.shape[0], -1, sizes.nope_dim + sizes.rope_dim)
        nope, rope = jnp.split(query, [sizes.nope_dim], axis=-1)
        return nope, rotate(rope, *angles, interleaved=self.sizes.rope.interleaved)

    def _absorb(
        self, nope: Array, rope: Array, pages: Pages
    ) -> Float[Array, "tokens q_heads width"]:
        """Absorbs W^UK into the queries instead of applying it to the keys. Adds zeros for columns
        that pages have behind a latent."""
        query = of_heads("thn,hnc->thc", nope, self.key_up[...])
        absorbed = jnp.concatenate([query, rope], axis=-1)
        spare = sum(array.shape[-1] for array in pages if array.ndim == 4) - absorbed.shape[-1]
        return jnp.pad(absorbed, ((0, 0), (0, 0), (0, spare)))

    @property
    def _scaled(self) -> dict[str, Any]:
        """Options of attention to latents."""
        return {"scale": self.sizes.scale, "v_width": self.sizes.kv_latent}

    def _absorbed(
        self,
        nope: Array,
        rope: Array,
        pages: Pages,
        batch: RaggedBatch,
        position: Int32[Array, " tokens"],
        places: Any = (),
    ) -> tuple[Float[Array, "tokens q_heads v_dim"], Array]:
        """Attends, absorbed, to the cached tokens up to these positions; also returns the
        log-sum-exp of every head."""
        mixed, lse = paged_attention(
            *(self._absorb(nope, rope, pages), pages[0], None, *batch.where[:2], position),
            int8_products=self.kind.int8_products,
            with_lse=True,
            runs=len(batch.page_table),
            k_scales=pages[-1] if len(pages) > 1 else None,
            rope_pages=pages[1] if len(pages) == 3 else None,
            places=places,
            **self._scaled,
        )
        assert lse is not None
        return self._values(mixed), lse

    def _values(self, mixed: Array) -> Float[Array, "tokens q_heads v_dim"]:
        """Turns weighted sums of latents into those of values: W^UV after the softmax."""
        return of_heads("thc,hnc->thn", mixed, self.value_up[...])

    def _naive(
        self, nope: Array, rope: Array, row: Array, batch: RaggedBatch
    ) -> tuple[Array, Array]:
        """Attends among the batch's own tokens; also returns the log-sum-exp of every head."""
        latent, key = row[:, : self.sizes.kv_latent], row[:, None, self.sizes.kv_latent :]
        keys = of_heads("tc,hnc->thn", latent, self.key_up[...])
        shared = jnp.broadcast_to(key, (*keys.shape[:2], key.shape[2]))
        return chunk_attention(
            jnp.concatenate([nope, rope], axis=-1),
            jnp.concatenate([keys, shared], axis=-1),
            of_heads("tc,hnc->thn", latent, self.value_up[...]),
            batch.sequence_of_token,
            batch.position,
            scale=self.sizes.scale,
        )


def _in_columns(of_heads: Weight) -> Weight:
    """Lays the matrix [rows, kv_latent] of each head out input by input (`InputMajor`), where its
    rows are a multiple of 128. XLA has 8 rows in a tile of an argument and 16 in a tile of a stack
    that a loop reads, and copies the stack. One column of tiles, 128 numbers, is the same in
    both."""
    return of_heads.by_inputs({}) if of_heads.shape[1] % TILE == 0 else of_heads
