"""Compressed attention (DeepSeek-V4 §2.3): rows of the last tokens, and rows that stand for several
tokens each.

One of the kinds of attention; `blocks.py` composes it with norms, router and residual. Runs inside
`shard_map` on the attention mesh: query heads and the groups of the output projection are split
over `tp`; cached rows, compressors and indexer are everywhere.

A row is key and value at once. Its last columns are rotated by its token's position, and outputs
are rotated back by the position of the query. A compressed row stands for `every` tokens and is
written when the last of them is computed, so that this token and later ones see it. Sums and gates
of the tokens whose row is not complete lie in the cache at places that follow from the tokens'
positions: drafts that are rejected are overwritten, and a prompt may be divided anywhere.

With an indexer, rows overlap: each is also made of the tokens of the row before, and a token
attends to the rows that the indexer chooses by keys compressed in the same way. Without one it
attends to all.

The kernels of attention and of sparse attention run where a device has them. A page with one or two
rows that stand for 128 tokens each is too small for them: these are copied into larger pages first
(`pallas_kernels/attention/joined.py`).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.config.attention.compressed import Compressed as Sizes
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Entry, Pages
from jaxserve.model.attention.rope import batch_rotation, rotation
from jaxserve.model.module import Formats, linear, matrix, rms_norm, scale, weight, zeros
from pallas_kernels.attention.api import merge, paged_attention, write_rows
from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.rotate_and_write import kept, rotate
from pallas_kernels.sparse_attention import attend_chosen, choose_positions

ENDS = 16
"""Tokens that complete a row whose rows are made at a time."""
OPEN_TOKENS = 16
"""Tokens whose sums and gates stay for overlapping compressed rows: two rows of up to 4 tokens, and
behind them up to 8 drafts, whose rows must not overwrite these."""


def written(pages: Pages, rows: Float[Array, "tokens width"], *where: Array) -> Pages:
    """Writes rows of tokens into pages, in the format of the pages: an array, in 8 bits also an
    array of scales."""
    row, scales = kept(rows[:, None], pages[0])
    return write_rows(pages, (row,) if scales is None else (row, scales), *where)


def by_kind(pages: Pages, values: int) -> tuple[Pages, list[Pages]]:
    """Divides a layer's pages, `values` arrays and behind them the scales of an 8-bit format, into
    those of sums and gates, which never have scales, and those of each kind of rows."""
    own, *others = pages[:values]
    kinds, scales = (own, *others[1:]), pages[values:]
    return tuple(others[:1]), list(zip(kinds, scales, strict=True) if scales else zip(kinds))


def together(open_rows: Pages, kinds: Sequence[Pages]) -> Pages:
    """Undoes `by_kind`."""
    (own, *others), *scales = zip(*kinds, strict=True)
    return (own, *open_rows, *others, *(array for arrays in scales for array in arrays))


class Compressor(nnx.Module):
    """Makes a row of the tokens that it stands for: a softmax over their gates, column by column,
    weights their sums.

    Attributes:
      map: [parts · 2 · width, d_model]: sums and gates of every token. Rows that overlap have two
        parts, for the row behind the token's own and for its own.
      bias: FP32 [every, parts · width], added to the gates of the tokens of a row.
      norm: [width].
    """

    def __init__(
        self, config: ModelConfig, sizes: Sizes, width: int, formats: Formats, rngs: nnx.Rngs
    ):
        self.sizes, self.width, self.epsilon = sizes, width, config.norm_epsilon
        self.columns = (2 if sizes.indexer else 1) * width
        d_model, fp32 = config.d_model, jnp.dtype(jnp.float32)
        self.map = weight(rngs, formats.dtype, compressed=2 * self.columns, d_model=d_model)
        self.bias = zeros(rngs, fp32, every=sizes.every, compressed=self.columns)
        self.norm = scale(rngs, formats.norms, compressed=width)

    def mapped(
        self, x: Float[Array, "tokens d_model"], position: Int[Array, " tokens"]
    ) -> Float[Array, "tokens columns"]:
        """Computes sums and gates of tokens."""
        sums, gates = jnp.split(linear(x, self.map), 2, axis=1)
        gates += self.bias[...][position % self.sizes.every].astype(gates.dtype)
        return jnp.concatenate([sums, gates], axis=1)

    def row(
        self,
        found: Float[Array, "rows tokens columns"],
        there: Bool[Array, "rows tokens"],
        last: Int[Array, " rows"],
    ) -> Float[Array, "rows width"]:
        """Makes rows of the sums and gates of their tokens, of which the last are at `last`."""
        sums, gates = jnp.split(found.astype(jnp.float32), 2, axis=-1)
        if self.sizes.indexer:  # the row before gives its first part, the own row the second
            own = jnp.arange(found.shape[1])[:, None] >= self.sizes.every
            halves = (jnp.split(part, 2, axis=-1) for part in (sums, gates))
            sums, gates = (jnp.where(own, second, first) for first, second in halves)
        gates = jnp.where(there[..., None], gates, -jnp.inf)
        row = jnp.sum(jax.nn.softmax(gates, axis=1) * jnp.where(there[..., None], sums, 0), axis=1)
        normed = rms_norm(row.astype(found.dtype), self.norm[...], self.epsilon)
        first = last - self.sizes.every + 1
        angles = rotation(first, self.sizes.rope_dim, self.sizes.rope)
        return turned(normed[:, None], angles)[:, 0]


def turned(
    x: Float[Array, "tokens heads width"], angles: tuple[Array, Array]
) -> Float[Array, "tokens heads width"]:
    """Rotates the last columns, pairs of neighbours, which become two halves."""
    still, rotated = jnp.split(x, [x.shape[-1] - 2 * angles[0].shape[-1]], axis=-1)
    return jnp.concatenate([still, rotate(rotated, *angles, interleaved=True)], axis=-1)


class RowIndexer(nnx.Module):
    """Scores Σ_h w_h · ReLU(q_h · k) of every compressed row, of which the best are chosen.

    Attributes:
      query: [heads·head_dim, q_latent], q_h from the normed query latent.
      weights: [heads, d_model], w_h of the token that looks.
      compressor: makes the keys.
    """

    def __init__(self, config: ModelConfig, sizes: Sizes, formats: Formats, rngs: nnx.Rngs):
        assert sizes.indexer
        self.sizes = sizes.indexer
        heads, width = self.sizes.heads, self.sizes.head_dim
        self.query = matrix(rngs, formats, index_heads=heads * width, latent=sizes.q_latent)
        self.weights = weight(rngs, formats.dtype, index_heads=heads, d_model=config.d_model)
        self.compressor = Compressor(config, sizes, width, formats, rngs)

    def choose(
        self,
        x: Float[Array, "tokens d_model"],
        latent: Float[Array, "tokens q_latent"],
        keys: Pages,
        angles: tuple[Array, Array],
        where: tuple[Array, Array, Array],
    ) -> Int[Array, "tokens chosen"]:
        """Numbers of the rows that each token attends to; -1: none."""
        heads, width, top_k = self.sizes.heads, self.sizes.head_dim, self.sizes.top_k
        query = turned(linear(latent, self.query).reshape(-1, heads, width), angles)
        weights = matmul(x, self.weights[...]) * (heads * width) ** -0.5
        return choose_positions(query, weights, keys, *where, top_k=top_k)


class CompressedAttention(nnx.Module):
    """Attention to rows of the last tokens and to compressed rows, under one softmax with a sink.

    Attributes:
      query_down: [q_latent, d_model]; query_norm: [q_latent].
      query_up: [q_heads·head_dim, q_latent]; every head is normed without weights.
      row: [head_dim, d_model]; row_norm: [head_dim].
      sinks: FP32 [q_heads], one more score of every head.
      out_down: [out_groups, out_latent, q_heads·head_dim / out_groups].
      out: [d_model, out_groups·out_latent].
      compressor, indexer: None where the layer has none.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, formats: Formats, rngs: nnx.Rngs):
        assert isinstance(kind.attention, Sizes)
        self.sizes = sizes = kind.attention
        self.epsilon, d_model, width = config.norm_epsilon, config.d_model, sizes.head_dim
        heads, groups = sizes.q_heads * width, sizes.out_groups
        self.query_down = matrix(rngs, formats, latent=sizes.q_latent, d_model=d_model)
        self.query_norm = scale(rngs, formats.norms, latent=sizes.q_latent)
        self.query_up = matrix(rngs, formats, q_heads=heads, latent=sizes.q_latent)
        self.row = matrix(rngs, formats, row=width, d_model=d_model)
        self.row_norm = scale(rngs, formats.norms, row=width)
        self.sinks = zeros(rngs, jnp.dtype(jnp.float32), q_heads=sizes.q_heads)
        inside = {"out_latent": sizes.out_latent, "head_columns": heads // groups}
        self.out_down = weight(rngs, formats.dtype, q_heads=groups, **inside)
        self.out = matrix(rngs, formats, d_model=d_model, out_heads=groups * sizes.out_latent)
        self.unit = config.page_unit if sizes.every else 0
        make = functools.partial(Compressor, config, sizes)
        self.compressor = make(width, formats, rngs) if sizes.every else None
        self.indexer = RowIndexer(config, sizes, formats, rngs) if sizes.indexer else None

    @staticmethod
    def entries(config: ModelConfig, sizes: Sizes, deployment: Deployment) -> Iterator[Entry]:
        """Declares the rows of the last tokens; with compressed rows also their tokens' sums and
        gates, the rows, and the indexer's keys. With an indexer a token adds to the row behind its
        own, too. Raises ConfigError if rows do not divide pages."""
        yield Entry(1, sizes.head_dim, ring=True)
        if not sizes.every:
            return
        if (page_size := deployment.cache.page_size) % (unit := config.page_unit):
            raise ConfigError(
                f"cache.page_size = {page_size} is no multiple of {unit}, the most tokens that one "
                "compressed row of the model stands for"
            )
        indexer = sizes.indexer
        width = 4 * (sizes.head_dim + indexer.head_dim) if indexer else 2 * sizes.head_dim
        tokens = max(1, unit // (OPEN_TOKENS if indexer else unit))
        yield Entry(1, width, deployment.dtype, every=tokens, ring=True, reader="compressor")
        yield Entry(1, sizes.head_dim, every=sizes.every)
        if indexer:
            yield Entry(1, indexer.head_dim, every=sizes.every, reader="indexer")

    walk = staticmethod(lambda *_: ())
    """Nothing: the places of the two kinds of rows differ."""

    def __call__(
        self, x: Float[Array, "tokens d_model"], pages: Pages, batch: RaggedBatch
    ) -> tuple[Float[Array, "tokens d_model"], Pages]:
        """Attention of normed tokens, as `LatentAttention.__call__` describes it."""
        tokens, width = x.shape[0], self.sizes.head_dim
        angles = batch_rotation(batch, self.sizes.rope_dim, self.sizes.rope)
        latent = rms_norm(linear(x, self.query_down), self.query_norm[...], self.epsilon)
        query = linear(latent, self.query_up).reshape(tokens, -1, width)
        query = turned(rms_norm(query, jnp.ones(width, x.dtype), self.epsilon), angles)
        row = rms_norm(linear(x, self.row), self.row_norm[...], self.epsilon)
        values = 3 + bool(self.indexer) if self.compressor else 1
        open_rows, (own, *others) = by_kind(pages, values)
        assert batch.ring_table is not None
        ring = batch.ring_table, *batch.where[1:]
        with jax.named_scope("write_pages"):
            own = written(own, turned(row[:, None], angles)[:, 0], *ring)
            if self.compressor:
                open_rows, others = self._compress(x, ring, open_rows, others, batch)
        scaled: Any = {"scale": width**-0.5, "v_width": width}

        def attend(rows: Pages, *where: Array, **window: int) -> Any:
            scales: Any = {"k_scales": rows[1]} if len(rows) > 1 else {}
            options = scales | scaled | window
            return paged_attention(query, rows[0], None, *where, with_lse=True, **options)

        with jax.named_scope("paged_attention"):
            mixed, lse = attend(own, *ring, window=self.sizes.window)
            if self.compressor:
                rows, *keys = others
                number = jnp.where(batch.position < 0, 0, batch.position + 1)
                where = *batch.where[:2], number // self.sizes.every - 1
                room = batch.page_table.shape[1] * rows[0].shape[2]
                if self.indexer and room > self.indexer.sizes.top_k:
                    chosen = self.indexer.choose(x, latent, keys[0], angles, where)
                    before, sums = attend_chosen(query, rows, chosen, *where[:2], **scaled)
                else:
                    before, sums = attend(rows, *where)
                mixed, lse = merge((mixed, before), (lse, sums)), jnp.logaddexp(lse, sums)
            share = jax.nn.sigmoid(lse - self.sinks[...])[:, :, None]
        mixed = (mixed.astype(jnp.float32) * share).astype(x.dtype)
        return self._out(mixed, angles), together(open_rows, (own, *others))

    def _out(self, mixed: Array, angles: tuple[Array, Array]) -> Float[Array, "tokens d_model"]:
        """Rotates outputs back and projects them, group of heads by group."""
        cosine, sine = angles
        still, rotated = jnp.split(mixed, [mixed.shape[-1] - 2 * cosine.shape[-1]], axis=-1)
        halves = jnp.split(rotate(rotated, cosine, -sine), 2, axis=-1)
        rotated = jnp.stack(halves, axis=-1).reshape(rotated.shape)  # neighbours again
        heads = jnp.concatenate([still, rotated], axis=-1)
        groups = self.out_down[...]
        heads = heads.reshape(len(mixed), len(groups), -1)
        low = [matmul(heads[:, at], groups[at]) for at in range(len(groups))]
        return linear(jnp.concatenate(low, axis=1).astype(mixed.dtype), self.out)

    def _compress(
        self, x: Array, where: Any, sums: Pages, compressed: list[Pages], batch: RaggedBatch
    ) -> tuple[Pages, list[Pages]]:
        """Writes the rows that tokens of the batch complete, and the batch's sums and gates.

        Args:
          where: the ring's page table, and sequence and position of each token.
          sums: pages of sums and gates.
          compressed: pages of compressed rows, and with an indexer those of its keys.
        """
        assert self.compressor
        (open_rows,) = sums
        makers = [self.compressor, *([self.indexer.compressor] if self.indexer else [])]
        every, tokens = self.sizes.every, x.shape[0]
        span = every * (2 if self.indexer else 1)
        own = jnp.concatenate([maker.mapped(x, batch.position) for maker in makers], axis=1)
        ring, slot, position = where
        kept_rows = open_rows.shape[2]
        per_unit = kept_rows * self.unit // (compressed[0][0].shape[2] * every)

        def place(position: Array) -> Array:
            """Row of a token's sums and gates in its sequence's pages."""
            return position // self.unit * per_unit + position % per_unit

        def cached(slots: Array, positions: Array) -> Array:
            rows = place(jnp.maximum(positions, 0))
            page = ring[slots[:, None], jnp.minimum(rows // kept_rows, ring.shape[1] - 1)]
            return open_rows[jnp.clip(page, 0, len(open_rows) - 1), 0, rows % kept_rows]

        ends = (position >= 0) & (position % every == every - 1)
        # A sequence's ends are `every` tokens apart.
        parts = -(-min(tokens, tokens // every + len(ring)) // ENDS)
        (token,) = jnp.nonzero(ends, size=parts * ENDS, fill_value=tokens)
        at = jnp.minimum(token, tokens - 1).reshape(parts, ENDS)
        last = jnp.where(token < tokens, position[at.reshape(-1)], -1).reshape(parts, ENDS)
        slots = slot[at]

        def make(part: Array, made: tuple[Array, ...]) -> tuple[Array, ...]:
            back = span - 1 - jnp.arange(span)
            wanted = last[part][:, None] - back
            inside = wanted >= batch.chunk_start[at[part]][:, None]
            found = jnp.where(
                inside[..., None],
                own[jnp.maximum(at[part][:, None] - back, 0)],
                cached(slots[part], wanted),
            )
            cuts = [2 * maker.columns for maker in makers][:-1]
            of_makers = zip(makers, jnp.split(found, cuts, axis=-1), made, strict=True)
            return tuple(
                rows.at[part].set(maker.row(some, wanted >= 0, last[part]))
                for maker, some, rows in of_makers
            )

        # The loop does not carry pages: on v7x XLA would give them another tiling for the gather of
        # chosen rows than the scatter has, and copy the pool on both sides of each.
        made = tuple(jnp.zeros((parts, ENDS, maker.width), x.dtype) for maker in makers)
        made = jax.lax.fori_loop(0, -(-jnp.sum(ends) // ENDS), make, made)
        where = batch.page_table, slots.reshape(-1), last.reshape(-1) // every  # -1 stays -1
        compressed = [
            written(held, rows.reshape(-1, rows.shape[2]), *where)
            for held, rows in zip(compressed, made, strict=True)
        ]
        # Of tokens with one place only the last is written.
        later = position + per_unit  # tokens that a roll brings to the end have lower positions
        same = (jnp.roll(slot, -per_unit) == slot) & (jnp.roll(position, -per_unit) == later)
        taken = same & (place(later) == place(position))
        places = jnp.where((position < 0) | taken, -1, place(position))
        return written(sums, own, ring, slot, places), compressed
