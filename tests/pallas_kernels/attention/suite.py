"""Tests of every backend of `paged_attention`, against NumPy: inherit, and say for what target.

Pages hold NaN wherever no token was written, tables have ids outside of the pool wherever no page
is needed, and the queries of padding tokens are NaN: nothing of that may show.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention_places, joined, paged_attention
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.nightly import nightly

SCALE = 0.3
PADDING = (0, 0)
"""Among the chunks of a batch: one padding token."""


class Sizes(NamedTuple):
    """Heads and cache of a case."""

    q_heads: int = 4
    kv_heads: int = 1
    head_dim: int = 16
    v_width: int = 16
    shared: bool = False
    rope: int = 0
    """Last columns of shared keys that are kept in BF16, in an array of their own."""
    cache: str = "float32"
    """float32, bfloat16, int8, fp8 (its bits) or e4m3 (FP8 as such)."""
    values: str = ""
    """Format of the values; empty: as the keys."""
    window: int = 0
    products: int = 0
    """Positions whose probabilities share a scale in INT8; 0: products are in floats."""


class Case(NamedTuple):
    """A call and what it should give."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: np.ndarray
    lse: np.ndarray


def rows_in_format(rows, cache):
    """Returns rows as a cache keeps them, their scales, and the numbers they stand for, float64."""
    shape = rows.shape
    if cache in ("float32", "bfloat16"):
        kept = np.asarray(jnp.asarray(rows, cache))
        return kept, None, kept.astype(np.float64)
    flat = jnp.asarray(rows.reshape(-1, shape[-1]))
    format = "int8" if cache == "int8" else "fp8"
    values, scales = (np.asarray(array) for array in quantize_rows(flat, format))
    values, scales = values.reshape(shape), scales.reshape(shape[:-1])
    kept = values.view(np.uint8) if cache == "fp8" else values
    return kept, scales, values.astype(np.float64) * scales[..., None]


def attend(query, keys, values, last, sizes, scales):
    """One token's attention: query [q_heads, d], keys and values [length, kv_heads, _]; with
    products in INT8 the values' scales [length, kv_heads], too."""
    first = max(0, last - sizes.window + 1) if sizes.window else 0
    seen = slice(first, last + 1)
    group = query.shape[0] // keys.shape[1]
    output, lse = [], []
    for head, row in enumerate(query.astype(np.float64)):
        place = seen, head // group
        if sizes.products:
            latent = slice(sizes.head_dim - sizes.rope)
            row[latent] = round_to_int8(row[latent])
        scores = SCALE * keys[place] @ row
        weights = np.exp(scores - scores.max())
        total = weights.sum()
        if sizes.products:
            weights *= scales[place]
            parts = np.split(weights, range(sizes.products, len(weights), sizes.products))
            weights = np.concatenate([round_to_int8(part) for part in parts]) / scales[place]
        output.append(weights @ values[place] / total)
        lse.append(scores.max() + np.log(total))
    return np.stack(output), np.asarray(lse)


def round_to_int8(row):
    """Multiples of a 127th of the largest magnitude."""
    step = np.abs(row).max() / 127
    return np.round(row / step) * step


def mark_edges(rows, last, window):
    """Makes the first column of the output tell which rows a token saw: weights are nearly equal,
    and numbers are large in the first and the last row that the last token sees, and in the row
    before the first one."""
    rows *= 0.1
    rows[..., 0] = 0
    rows[last, ..., 0] = 50
    if window and last >= window:
        rows[last - window + 1, ..., 0] = 50
        rows[last - window, ..., 0] = -50


def poison(shape, kept):
    """NaN, also as the bits of FP8; INT8 has none, but its scales have."""
    return np.full(shape, 0x7F if kept.dtype.kind in "iu" else np.nan).astype(kept.dtype)


def make_case(
    sizes, chunks, *, page_size, pages_per_sequence=10, seed=0, dtype=np.float32, edges=False
):
    """Builds sequences of chunks (length, tokens of the batch), their last tokens, with PADDING in
    between. `edges`: see `mark_edges`; rows before the window of the first token stay NaN."""
    rng = np.random.default_rng(seed)
    sequences = sum(chunk != PADDING for chunk in chunks)
    pool = sequences * pages_per_sequence + 1
    free = list(rng.permutation(pool))
    outside = [-1, -(2**31), pool, 2**31 - 1]
    table = rng.choice(outside, (sequences, pages_per_sequence))
    shape = (pages_per_sequence * page_size, sizes.kv_heads)
    widths = [sizes.head_dim] if sizes.shared else [sizes.head_dim, sizes.v_width]
    formats = [sizes.cache, sizes.values or sizes.cache]
    if sizes.rope:
        widths, formats = [sizes.head_dim - sizes.rope, sizes.rope], [sizes.cache, "bfloat16"]
    pages, scales = [None] * len(widths), [None] * len(widths)
    queries, sequence_of_token, position, output, lse = [], [], [], [], []

    def add(sequence, place, query, result):
        sequence_of_token.append(sequence)
        position.append(place)
        queries.append(query)
        output.append(result[0])
        lse.append(result[1])

    nothing = np.full((sizes.q_heads, sizes.head_dim), np.nan)
    zeros = np.zeros((sizes.q_heads, sizes.v_width)), np.full(sizes.q_heads, -np.inf)
    sequence = 0
    for chunk in chunks:
        if chunk == PADDING:
            add(0, -1, nothing, zeros)
            continue
        length, new = chunk
        used = [free.pop() for _ in range(-(-length // page_size))]
        table[sequence, : len(used)] = used
        meanings, every_scale = [], []
        unseen = max(0, length - new - sizes.window + 1) if edges and sizes.window else 0
        for index, width in enumerate(widths):
            rows = rng.normal(size=(*shape, width)).astype(np.float32)
            if edges:
                mark_edges(rows, length - 1, sizes.window)
            kept, scale, meaning = rows_in_format(rows, formats[index])
            meanings.append(meaning)
            every_scale.append(scale)
            if pages[index] is None:
                pages[index] = poison((pool, sizes.kv_heads, page_size, width), kept)
                scales[index] = np.full((pool, sizes.kv_heads, page_size), np.nan, np.float32)
            for place in range(unseen, length):
                page, row = used[place // page_size], place % page_size
                pages[index][page, :, row] = kept[place]
                if scale is not None:
                    scales[index][page, :, row] = scale[place]
        values = meanings[0][..., : sizes.v_width] if sizes.shared else meanings[1]
        if sizes.rope:
            meanings[0] = np.concatenate(meanings, axis=-1)
        for place in range(length - new, length):
            query = rng.normal(size=nothing.shape)
            query[:, 0] *= not edges
            query = np.asarray(jnp.asarray(query, dtype)).astype(np.float64)
            v_scales = every_scale[0 if sizes.shared else 1]
            result = attend(query, meanings[0], values, place, sizes, v_scales)
            add(sequence, place, query, result)
        sequence += 1
    quantised = [format in ("int8", "fp8", "e4m3") for format in formats]
    options = {
        "scale": SCALE,
        "window": sizes.window,
        "v_width": sizes.v_width if sizes.shared else 0,
        "k_scales": jnp.asarray(scales[0]) if quantised[0] else None,
        "v_scales": jnp.asarray(scales[1]) if quantised[1] and not sizes.shared else None,
        "rope_pages": jnp.asarray(pages[1]) if sizes.rope else None,
        "int8_products": sizes.products > 0,
        "with_lse": True,
    }
    arguments = (
        jnp.asarray(np.stack(queries), dtype),
        jnp.asarray(pages[0]),
        None if sizes.shared else jnp.asarray(pages[1]),
        *(jnp.asarray(array, jnp.int32) for array in (table, sequence_of_token, position)),
    )
    return Case(arguments, options, np.stack(output), np.stack(lse))


EDGES = (
    Sizes(),
    *nightly((Sizes(q_heads=8, head_dim=24, shared=True),), (Sizes(kv_heads=2, cache="fp8"),)),
)


class PagedAttentionSuite:
    """The cases: lengths at the edges of pages, and of blocks of two pages; up to five blocks."""

    target: Target
    page_size: int = 16
    block: int = 32
    """Positions that the kernel takes at a time."""
    item_tokens: int = 4
    """Tokens of a chunk that it takes together, of four heads."""
    edge_tolerance: float = 1e-5

    def compiled(self, case: Case) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The call, for the target, with what layers share computed for another layer's pages."""
        names = ("window", "v_width", "rope_pages")
        sizes = {name: case.options[name] for name in names if name in case.options}

        def attend(*arguments):
            with use_target(self.target):
                places = attention_places(*arguments[:3], arguments[3] - 1, *arguments[4:], **sizes)
                return paged_attention(*arguments, **case.options, places=places)

        return jax.jit(attend)

    def check(self, case: Case, tolerance: float = 1e-5) -> None:
        output, lse = self.compiled(case)(*case.arguments)
        assert output.dtype == case.arguments[0].dtype
        assert lse.dtype == jnp.float32
        output = np.asarray(output, np.float32)
        np.testing.assert_allclose(output, case.output, rtol=10 * tolerance, atol=tolerance)
        np.testing.assert_allclose(lse, case.lse, rtol=tolerance, atol=tolerance)

    def case(self, sizes: Sizes, chunks: list[tuple[int, int]], **options: Any) -> Case:
        return make_case(sizes, chunks, page_size=self.page_size, **options)

    def test_decode_at_the_edges_of_pages_and_blocks(self):
        """Also one position less than several blocks, before a sequence of whole ones."""
        page = self.page_size
        lengths = [1, page - 1, page, page + 1, 9 * page + 3, 2 * page, 2 * page + 1]
        lengths += [self.block - 1, 10 * page - 1, 10 * page]
        self.check(self.case(Sizes(), [(length, 1) for length in lengths]))

    def test_chunks_beside_decode_and_padding(self):
        """Chunks of less and more than an item has, one that starts a sequence; two heads. The
        first token of the first one does not see the last position of a block."""
        page = self.page_size
        chunks = [
            (8 * page + 2, 4),
            (9 * page + 3, 5),
            PADDING,
            (2 * page, 1),
            (11, 11),
            PADDING,
            (page + 2, 3),
        ]
        self.check(self.case(Sizes(kv_heads=2, v_width=24), chunks))

    def test_latent(self):
        """Values are the first elements of the keys; a draft of two tokens beside decode."""
        sizes = Sizes(shared=True, head_dim=24, v_width=16)
        self.check(self.case(sizes, [(self.page_size + 1, 1), (10 * self.page_size, 2)]))

    @pytest.mark.parametrize("cache", ["float32", *nightly("fp8")])
    @pytest.mark.parametrize("chunks", [((20, 1), (131, 1), (1, 1)), *nightly([(9, 1), (130, 2)])])
    def test_pages_of_two_rows(self, chunks, cache, monkeypatch):
        """They are joined: two tokens' pages at a time, and those of the whole table; the tables
        fill no whole number of larger pages."""
        monkeypatch.setattr(joined, "COPIED_BYTES", 2 * 256 * 128 * 4)
        self.page_size = 2
        sizes = Sizes(q_heads=16, shared=True, head_dim=128, v_width=128, cache=cache)
        self.check(self.case(sizes, chunks, pages_per_sequence=70))

    @pytest.mark.parametrize("sizes", EDGES)
    @pytest.mark.parametrize("decode", [True, False], ids=["decode", "chunk"])
    def test_window(self, sizes, decode):
        """The first position that the last token sees is the last of a block, the first, or beside
        it. Blocks that all tokens see whole lie within the window. The first two windows begin at
        a page's second position, and at the first of a page for the first token alone."""
        window, tokens = self.block + 40, 1 if decode else self.item_tokens
        chunks = [(4 * self.block + 9, tokens), (4 * self.block + 11, tokens)]
        chunks += [(self.block + window + beside, tokens) for beside in (-1, 0, 1)]
        self.page_size = self.block // 2
        sizes = sizes._replace(window=window)
        self.check(self.case(sizes, [*chunks, (2, 1)], edges=True), self.edge_tolerance)

    @pytest.mark.parametrize("cache", ["fp8", *nightly("int8")])
    def test_eight_bits(self, cache):
        chunks = [(9 * self.page_size + 3, 1), (self.page_size, 4)]
        self.check(self.case(Sizes(kv_heads=2, cache=cache), chunks))
        latent = Sizes(shared=True, head_dim=24, cache=cache)
        self.check(self.case(latent, [(9 * self.page_size, 1), PADDING]))

    def test_bfloat16(self):
        sizes = Sizes(cache="bfloat16")
        chunks = [(9 * self.page_size, 1), (5, 1)]
        self.check(self.case(sizes, chunks, dtype=jnp.bfloat16), tolerance=0.01)

    def test_chunk_that_sees_what_was_before_it(self):
        """All tokens of the chunk at one position, as latent attention asks for its history."""
        case = self.case(Sizes(), [(self.page_size + 5, 3)])
        queries, *pages, table, sequence, position = case.arguments
        position = jnp.full_like(position, position[0])
        same = jnp.broadcast_to(queries[:1], queries.shape)
        expected = (np.broadcast_to(one[:1], one.shape) for one in (case.output, case.lse))
        self.check(Case((same, *pages, table, sequence, position), case.options, *expected))

    def test_ids_and_positions_outside_are_clamped_and_padding_alone_gives_zeros(self):
        case = self.case(Sizes(), [(10 * self.page_size, 1)])  # of 10 pages
        attend = self.compiled(case)
        queries, k_pages, v_pages, table, sequence, position = case.arguments
        pages = [jnp.nan_to_num(array) for array in (k_pages, v_pages)]
        results = []
        for ids in ((-7, k_pages.shape[0] + 3), (0, k_pages.shape[0] - 1)):
            clamped = table.at[0, :2].set(jnp.asarray(ids, jnp.int32))
            results.append(attend(queries, *pages, clamped, sequence, position)[0])
        np.testing.assert_array_equal(*results)
        assert np.isfinite(results[0]).all()
        past = attend(queries, k_pages, v_pages, table, sequence, position + self.page_size)
        np.testing.assert_array_equal(past[0], attend(*case.arguments)[0])
        output, lse = attend(queries, *pages, table, sequence, jnp.full_like(position, -1))
        assert not np.asarray(output).any()
        assert np.isneginf(lse).all()


class RotatedPartSuite(PagedAttentionSuite):
    """Latents whose rotated part has its own array, and INT8 products: not every backend's."""

    products: int = 32
    """Positions whose probabilities share a scale."""

    @pytest.mark.parametrize(
        "sizes",
        [
            Sizes(kv_heads=2, cache="int8", v_width=24),
            Sizes(shared=True, head_dim=24, rope=8, cache="int8"),
        ],
        ids=["two heads", "rotated part"],
    )
    def test_products_in_int8(self, sizes):
        """A probability that lies between two whole numbers may be rounded to either."""
        page = self.page_size
        chunks = [(9 * page + 3, 1), PADDING, (5, 3), (2 * page + 1, 2)]
        sizes = sizes._replace(products=self.products)
        self.check(self.case(sizes, chunks), tolerance=0.005)

    def test_latent_in_eight_bits_without_its_rotated_part(self):
        sizes = Sizes(shared=True, head_dim=24, rope=8, cache="int8")
        self.check(self.case(sizes, [(9 * self.page_size, 1), PADDING, (5, 3)]))
