"""Definition of the attention operations in plain `jax.numpy`; runs on devices without a kernel.

Called by `api.py`, which has checked the arguments, and by the tests of the kernels. Shares no code
with any kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from pallas_kernels.quantize import EIGHT_BITS
from pallas_kernels.quantize.bits import as_bits, from_bits
from pallas_kernels.varying import vary_like

GATHERED_BYTES = 8 * 2**20
"""Most bytes of FP32 keys and values gathered from the pages at one time."""

BLOCK_TOKENS = 128
"""Positions of a context that are read as one block."""

FIRST_TOKENS = 32
"""Positions of a block among the first `BLOCK_TOKENS`, without a window. Short contexts are not
padded to a long block, which takes a quarter less time a position."""

MOST_SLICES = 16
"""Most pages of a block that are cut out one by one: each takes time to compile."""

PRODUCT_TOKENS = 512
"""Positions of a block with products in INT8; a row's probabilities of a block share one scale."""

TILE_TOKENS = 64
"""Tokens of a batch that are taken together, in batches of at least this many."""

SHARING_TOKENS = 16
"""Fewest tokens of a sequence in a tile that share blocks; others are by themselves. A pass for one
sequence multiplies by the queries of the whole tile."""

CHUNK_ROWS = 128
"""Queries per block of `chunk_attention`, which bounds the memory of scores."""

ROWS, COLUMNS = ("tkgd", "tkgc"), ("tkdg", "tkcg")
"""Dimensions of queries and outputs, and of scores, of parts (t) with queries (g) as rows or as
columns: K heads (k), columns of a head (d), positions (c)."""


def write_rows(
    pages: tuple[Num[Array, "pages kv_heads page_size ..."], ...],
    rows: tuple[Num[Array, "tokens kv_heads ..."], ...],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> tuple[Num[Array, "pages kv_heads page_size ..."], ...]:
    """Writes a token's rows to row `position % page_size` of page `position // page_size`."""
    pool, kv_heads, page_size = pages[0].shape[:3]
    sequences, pages_per_sequence = page_table.shape
    page_of_sequence = position // page_size
    page = page_table.at[sequence_of_token, page_of_sequence].get(mode="clip")
    # Negative indices count from the end in JAX, so that -1 must not reach the scatter.
    exists = (
        (position >= 0)
        & (page_of_sequence < pages_per_sequence)
        & (sequence_of_token >= 0)
        & (sequence_of_token < sequences)
        & (page >= 0)
        & (page < pool)
    )
    # Pages and heads are merged into one dimension: a scatter over two non-adjacent dimensions is
    # in place on CPUs, but copies the pool on TPUs.
    page = jnp.where(exists, page, pool)[:, None] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)
    row = (position % page_size)[:, None]
    if page.size == 1:
        # XLA makes a slice's update of a scatter of one row. In a branch that copies all pages.
        page, row, rows = jax.tree.map(
            lambda array: jnp.repeat(array, 2, axis=0), (page, row, rows)
        )

    def write(array: Array, new: Array) -> Array:
        flat = as_bits(array).reshape(pool * kv_heads, *array.shape[2:])
        flat = flat.at[page, row].set(as_bits(new), mode="drop")
        return flat.reshape(array.shape).view(array.dtype)

    return tuple(write(array, new) for array, new in zip(pages, rows, strict=True))


class Cache(NamedTuple):
    """The pages of one layer, as `paged_attention` takes them."""

    k_pages: Num[Array, "pages kv_heads page_size head_dim"]
    v_pages: Num[Array, "pages kv_heads page_size v_head_dim"] | None
    """None: values are the first `v_width` elements of the keys."""
    k_scales: Float32[Array, "pages kv_heads page_size"] | None
    v_scales: Float32[Array, "pages kv_heads page_size"] | None
    v_width: int
    rope_pages: Float[Array, "pages kv_heads page_size rope_dim"] | None = None
    """The last columns of the keys; None: they are in `k_pages`."""
    int8_products: bool = False
    """Whether INT8 pages are multiplied by queries and probabilities rounded to INT8. The sums are
    FP32 here and exact: sums of 1,040 products of two numbers up to 127 are below 2^24."""

    def arrays(self) -> dict[str, Array]:
        """Returns the arrays that exist, by name: "k", "v", "k_scales", "v_scales", "rope"."""
        return {
            name.removesuffix("_pages"): array
            for name, array in self._asdict().items()
            if isinstance(array, jax.Array)
        }


class Where(NamedTuple):
    """Places of a batch's tokens, as `api.py` explains them."""

    page_table: Int32[Array, "sequences pages_per_sequence"]
    sequence_of_token: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]


class PagedCall(NamedTuple):
    """A call of `api.paged_attention` that has been checked. Where only places are wanted, queries
    and cache are shapes and dtypes."""

    queries: Any
    """Floats [tokens, q_heads, head_dim]."""
    cache: Cache
    where: Where
    window: int
    scale: float = 1.0
    with_lse: bool = False
    out_dtype: Any = None
    runs: int = 0
    neighbours: bool = False
    """Whether token after token has the pool's pages in their order, the same number each."""


def pages_gap(cache: Cache) -> str:
    """Returns what kernels of GPUs cannot handle about the formats of the pages; empty: nothing."""
    dtype = cache.k_pages.dtype
    if cache.rope_pages is not None:
        return f"latents in {dtype} with their rotated part in an array of its own"
    if cache.int8_products:
        return "products in INT8"
    if dtype not in (jnp.bfloat16, jnp.float16, *EIGHT_BITS):
        return f"a cache in {dtype} (there are some for 16 and 8 bits)"
    if cache.v_pages is not None and cache.v_pages.dtype != dtype:
        return f"keys in {dtype} with values in {cache.v_pages.dtype}"
    return ""


def paged_attention(
    call: PagedCall,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Gathers the pages of every token's sequence and attends, a block of positions at a time.

    Positions are taken block by block of `BLOCK_TOKENS` or `FIRST_TOKENS`, from the first that is
    seen to the last: the time is proportional to the sequences or to the window, not to the tables,
    and a table's width changes no bit. Larger batches are taken `TILE_TOKENS` tokens at a time. In
    a tile the tokens of a sequence with many, a piece of a prefill chunk, share every block, which
    is gathered once and multiplied by all their queries.
    """
    cache, where = call.cache, call.where
    tokens, q_heads, head_dim = call.queries.shape
    kv_heads = cache.k_pages.shape[1]
    queries = call.queries.reshape(tokens, kv_heads, q_heads // kv_heads, head_dim)

    def attend_tile(some: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        queries, sequence, position = some
        begins = jnp.concatenate([jnp.ones(1, bool), sequence[1:] != sequence[:-1]])
        run = jnp.cumsum(begins) - 1
        shares = jnp.sum(run[:, None] == run, axis=1) >= SHARING_TOKENS
        apart = _attend_tokens(queries, sequence, jnp.where(shares, -1, position), call)
        run = jnp.where(shares, jnp.cumsum(begins & shares) - 1, -1)
        return _attend_runs(queries, sequence, position, run, apart, call)

    if tokens < min(TILE_TOKENS, len(where.page_table)):
        # Where pages are numbered anew for each layer, XLA then computes the rows of these alone.
        rows = where.page_table.at[where.sequence_of_token].get(mode="clip")
        each = jnp.arange(tokens, dtype=jnp.int32)
        call = call._replace(where=Where(rows, each, where.position))
    arrays = queries, *call.where[1:]
    if tokens < TILE_TOKENS:
        output, lse = _attend_tokens(*arrays, call)
    else:
        output, lse = in_parts(attend_tile, arrays, TILE_TOKENS)
    return output.reshape(tokens, q_heads, cache.v_width), lse.reshape(tokens, q_heads)


def in_parts[Out](compute: Callable[[Any], Out], tokens: tuple[Array, ...], at_once: int) -> Out:
    """Computes rows of tokens, `at_once` tokens at a time.

    Args:
      compute: from arrays like `tokens`, but shorter, to arrays with a row for each token.
      tokens: arrays with a row for each token; the last part is filled up with copies of the last
        token, whose results are left out.
    """
    count = len(tokens[0])
    if count <= at_once:
        return compute(tokens)
    missing = -count % at_once
    wide = [
        jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)), mode="edge")
        for array in tokens
    ]
    parts = jax.lax.map(
        compute, tuple(array.reshape(-1, at_once, *array.shape[1:]) for array in wide)
    )
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], parts)


def _attend_runs(
    queries: Float[Array, "tokens kv_heads group head_dim"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    run: Int32[Array, " tokens"],
    start: tuple[Array, Array],
    call: PagedCall,
) -> tuple[Float[Array, "tokens kv_heads group v_width"], Float32[Array, "tokens kv_heads group"]]:
    """Attends from the tokens of one run (tokens with the same `run`, of one sequence) after the
    other. Tokens of run -1 keep their results in `start`."""
    tokens, kv_heads, group, head_dim = queries.shape
    columns = jnp.transpose(queries, (1, 3, 0, 2)).reshape(1, kv_heads, head_dim, tokens * group)

    def attend(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        mine = run == index
        sequence = sequence_of_token[jnp.argmax(mine)]
        own = jnp.where(mine, position, -1)
        output, lse = _attend_some(columns, sequence[None], own[None], call)
        output = jnp.transpose(output.reshape(kv_heads, -1, tokens, group), (2, 0, 3, 1))
        lse = jnp.swapaxes(lse.reshape(kv_heads, tokens, group), 0, 1)
        return (
            jnp.where(mine[:, None, None, None], output, state[0]),
            jnp.where(mine[:, None, None], lse, state[1]),
        )

    return jax.lax.fori_loop(0, jnp.max(run) + 1, attend, start)


def _attend_tokens(
    queries: Float[Array, "tokens kv_heads group head_dim"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    call: PagedCall,
) -> tuple[Float[Array, "tokens kv_heads group v_width"], Float32[Array, "tokens kv_heads group"]]:
    """Attends from every token by itself; `GATHERED_BYTES` bounds the tokens at one time."""
    cache = call.cache
    kv_heads, page_size, head_dim = cache.k_pages.shape[1], cache.k_pages.shape[2], queries.shape[3]
    width = head_dim if cache.v_pages is None else head_dim + cache.v_width
    at_once = GATHERED_BYTES // (_block_pages(cache) * page_size * kv_heads * width * 4)

    def attend(some: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        return _attend_some(some[0], some[1], some[2][:, None], call)

    return in_parts(attend, (queries, sequence_of_token, position), max(1, at_once))


def _block_pages(cache: Cache) -> int:
    """Returns the pages of a block of positions."""
    tokens = PRODUCT_TOKENS if cache.int8_products else BLOCK_TOKENS
    return -(-tokens // cache.k_pages.shape[2])


def _attend_some(
    queries: Float[Array, "parts kv_heads _ _"],
    sequence_of_part: Int32[Array, " parts"],
    position: Int32[Array, "parts tokens"],
    call: PagedCall,
) -> tuple[Float[Array, "parts kv_heads _ _"], Float32[Array, "parts kv_heads rows"]]:
    """Attends block by block, with a running maximum (Milakov and Gimelshein, 2018, "Online
    normalizer calculation for softmax").

    A part has tokens of one sequence; its rows of queries are those of its first token, then those
    of the next. Tokens at position -1 see nothing. Without a window the first blocks are shorter
    where parts have one token or one block; where they have several tokens, blocks that all of
    these see need no mask.

    Parts of several tokens have queries and outputs as columns, [parts, kv_heads, head_dim, rows].
    XLA:CPU then takes maxima and sums over a block for a whole vector of queries at once; over
    scores side by side it takes a maximum one number at a time.
    """
    cache, window, several = call.cache, call.window, position.shape[1] > 1
    page_size, count = cache.k_pages.shape[2], _block_pages(cache)
    form, along, across = (COLUMNS, 2, 3) if several else (ROWS, 3, 2)
    last = jnp.max(position, axis=1)
    lowest = jnp.min(jnp.where(position < 0, last[:, None], position), axis=1)
    # All parts share the boundaries of blocks; with a window each part has its own first block.
    first = jnp.zeros_like(last)
    if window:
        first = jnp.maximum(lowest - window + 1, 0) // (count * page_size)
    wide = call.scale * queries.astype(jnp.float32)
    each = queries.shape[across] // position.shape[1]

    def step(
        count: int, masked: bool, index: Array, state: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        largest, total, mixed = state
        block = count * page_size
        columns = (first[:, None] + index) * count + jnp.arange(count, dtype=jnp.int32)
        # Columns past the table are those of positions that no token sees.
        pages = call.where.page_table.at[sequence_of_part[:, None], columns].get(mode="clip")
        place = (first[:, None] + index) * block + jnp.arange(block, dtype=jnp.int32)
        place, own = jnp.expand_dims(place, across - 1), jnp.expand_dims(position, along - 1)
        seen_now = place <= own  # [parts, tokens, block], or as columns
        if window:
            seen_now &= place > own - window
        visible = jnp.repeat(seen_now, each, axis=across - 1)[:, None]

        gather = functools.partial(_gather, pages=pages)
        keys, scores = _scores(wide, cache, gather, form)
        values = keys[..., : cache.v_width] if cache.v_pages is None else gather(cache.v_pages)
        v_scales = cache.k_scales if cache.v_pages is None else cache.v_scales
        if masked:
            # A probability of 0 does not hide a row that holds NaN: 0 * NaN is NaN.
            values = jnp.where(jnp.any(seen_now, axis=across - 1)[:, None, :, None], values, 0.0)
            scores = jnp.where(visible, scores, -jnp.inf)
        now = jnp.maximum(largest, jnp.max(scores, axis=along))
        finite = jnp.where(jnp.isneginf(now), 0.0, now)
        weights = jnp.exp(scores - jnp.expand_dims(finite, along))
        kept = jnp.exp(largest - finite)
        total = total * kept + jnp.sum(weights, axis=along)
        if v_scales is not None:
            scales = jnp.expand_dims(gather(v_scales), across)
            weights *= jnp.where(visible, scales, 0.0) if masked else scales
        seen = _mix(weights, values, form, cache.int8_products)
        return now, total, mixed * jnp.expand_dims(kept, along) + seen

    rows, mixed = (*queries.shape[:2], queries.shape[across]), list(queries.shape)
    mixed[along] = cache.v_width
    start = jnp.full(rows, -jnp.inf), jnp.zeros(rows, jnp.float32), jnp.zeros(mixed, jnp.float32)
    others = (queries, sequence_of_part, position, *cache.arrays().values())
    start = jax.tree.map(lambda array: vary_like(array, others), start)
    state, done = start, jnp.int32(0)
    if not (window or cache.int8_products):
        if count % (few := -(-FIRST_TOKENS // page_size)) == 0 and few < count:
            blocks = jnp.max(last + few * page_size) // (few * page_size)
            blocks = jnp.minimum(blocks, count // few)
            if several:  # four short blocks take twice the time of a long one
                blocks = jnp.where(jnp.max(last) < count * page_size, blocks, 0)
            state = jax.lax.fori_loop(0, blocks, functools.partial(step, few, True), state)
            done = jnp.minimum(blocks, 1)
        if several:
            begin, done = done, jnp.maximum(done, jnp.min(lowest + 1) // (count * page_size))
            state = jax.lax.fori_loop(begin, done, functools.partial(step, count, False), state)
    blocks = jnp.max((last + count * page_size) // (count * page_size) - first)
    largest, total, mixed = jax.lax.fori_loop(
        done, blocks, functools.partial(step, count, True), state
    )
    seen = jnp.repeat(position >= 0, each, axis=1)[:, None]
    # A padding token sees nothing: its largest score is -inf and its total 0, or it met a block
    # that was not masked.
    total = jnp.where(total == 0, 1.0, total)
    output = jnp.where(jnp.expand_dims(seen, along), mixed / jnp.expand_dims(total, along), 0.0)
    return output.astype(queries.dtype), jnp.where(seen, largest + jnp.log(total), -jnp.inf)


def _scores(
    queries: Float32[Array, "parts kv_heads _ _"],
    cache: Cache,
    gather: Callable[[Array], Array],
    form: tuple[str, str],
) -> tuple[Float32[Array, "parts kv_heads context _"], Float32[Array, "parts kv_heads _ _"]]:
    """Returns the keys without their scales, and the scores of queries against them; `form` has
    the order of the last two dimensions of queries and of scores."""
    keys, (given, made) = gather(cache.k_pages), form
    product, row_scales = f"{given},tkcd->{made}", jnp.float32(1.0)
    met, rotated = jnp.split(queries, [keys.shape[-1]], axis=given.index("d"))
    if cache.int8_products:
        met, row_scales = _rounded(met, given.index("d"))
    highest = jax.lax.Precision.HIGHEST
    scores = row_scales * jnp.einsum(product, met, keys, precision=highest)
    if cache.k_scales is not None:
        scores *= jnp.expand_dims(gather(cache.k_scales), made.index("g"))
    if cache.rope_pages is not None:
        scores += jnp.einsum(product, rotated, gather(cache.rope_pages), precision=highest)
    return keys, scores


def _mix(
    weights: Float32[Array, "parts kv_heads _ _"],
    values: Float32[Array, "parts kv_heads context v_width"],
    form: tuple[str, str],
    int8_products: bool,
) -> Float32[Array, "parts kv_heads _ _"]:
    """Returns sums of values by weights. With `int8_products` values are INT8 and weights are
    rounded to it, `PRODUCT_TOKENS` at a time."""
    made, given = form
    along, at_once = given.index("c"), PRODUCT_TOKENS if int8_products else values.shape[2]
    mixed, scales = jnp.float32(0.0), jnp.float32(1.0)
    for start in range(0, values.shape[2], at_once):
        some = jax.lax.slice_in_dim(
            weights, start, min(start + at_once, values.shape[2]), axis=along
        )
        if int8_products:
            some, scales = _rounded(some, along)
        product, own = f"{given},tkcd->{made}", values[:, :, start : start + at_once]
        mixed += scales * jnp.einsum(product, some, own, precision=jax.lax.Precision.HIGHEST)
    return mixed


def _rounded(rows: Float32[Array, "..."], axis: int) -> tuple[Array, Array]:
    """Returns rows, which lie along an axis, rounded to whole numbers from -127 to 127, and the
    scale of each row."""
    largest = jnp.max(jnp.abs(rows), axis=axis, keepdims=True)
    scales = jnp.where(largest == 0, 1.0, largest / 127)
    return jnp.round(rows / scales), scales


def _gather(
    array: Num[Array, "pages kv_heads page_size ..."], pages: Int32[Array, "parts count"]
) -> Float32[Array, "parts kv_heads context ..."]:
    """Returns the rows of each part's pages, heads first and in FP32, which CPUs multiply fastest.
    XLA:CPU gathers number by number, in tasks of two threads, but copies slices in vectors."""
    bits, (parts, count) = as_bits(array), pages.shape
    if parts == 1 and count <= MOST_SLICES:
        size, inside = (1, *bits.shape[1:]), (0,) * (bits.ndim - 1)
        cut = functools.partial(jax.lax.dynamic_slice, bits, slice_sizes=size)
        every = [cut((page, *inside), allow_negative_indices=False) for page in pages[0]]
        return from_bits(jnp.concatenate(every, axis=2)).astype(jnp.float32)
    rows = bits.at[pages].get(mode="clip", wrap_negative_indices=False)
    rows = jnp.swapaxes(rows, 1, 2).reshape(parts, array.shape[1], -1, *array.shape[3:])
    return from_bits(rows).astype(jnp.float32)


class ChunkCall(NamedTuple):
    """A call of `api.chunk_attention` that has been checked."""

    queries: Float[Array, "tokens heads head_dim"]
    keys: Float[Array, "tokens heads head_dim"]
    values: Float[Array, "tokens heads v_head_dim"]
    sequence_of_token: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]
    scale: float


def chunk_attention(
    call: ChunkCall,
) -> tuple[Float[Array, "tokens heads v_head_dim"], Float32[Array, "tokens heads"]]:
    """Attends to the rows of the batch itself, a block of queries at a time."""
    queries, keys, values, sequence_of_token, position, scale = call
    # Heads first is what CPUs multiply fastest.
    keys = jnp.swapaxes(keys, 0, 1).astype(jnp.float32)
    values = jnp.swapaxes(values, 0, 1).astype(jnp.float32)
    # A probability of 0 does not hide a row that holds NaN: 0 * NaN is NaN. Such rows are left out
    # of the sums, and queries that see one get NaN.
    broken = ~jnp.all(jnp.isfinite(values), axis=(0, 2))
    values = jnp.where(broken[:, None], 0.0, values)

    def attend(some: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        query, sequence, own = some
        visible = (position >= 0) & (position <= own[:, None])
        visible &= sequence_of_token == sequence[:, None]  # [rows, tokens]
        out, lse = _attend_rows(query, keys, values, visible, scale)
        sees_broken = jnp.any(visible & broken, axis=1)
        return jnp.where(sees_broken[:, None, None], jnp.nan, out), lse

    out, lse = in_parts(attend, (queries, sequence_of_token, position), CHUNK_ROWS)
    return out.astype(queries.dtype), lse


def _attend_rows(
    queries: Float[Array, "rows heads head_dim"],
    keys: Float32[Array, "heads tokens head_dim"],
    values: Float32[Array, "heads tokens v_head_dim"],
    visible: Bool[Array, "rows tokens"],
    scale: float,
) -> tuple[Float32[Array, "rows heads v_head_dim"], Float32[Array, "rows heads"]]:
    """Attends from some tokens to the finite values of those that they see."""
    highest, wide = jax.lax.Precision.HIGHEST, jnp.swapaxes(queries, 0, 1).astype(jnp.float32)
    scores = scale * jnp.einsum("hrd,htd->hrt", wide, keys, precision=highest)
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0.0, largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("hrt,htv->hrv", weights, values, precision=highest)
    lse = (largest + jnp.log(total))[:, :, 0]
    return jnp.swapaxes(out / jnp.where(total == 0, 1.0, total), 0, 1), lse.T


def merge(
    outputs: Sequence[Float[Array, "tokens q_heads v_width"]],
    lses: Sequence[Float32[Array, "tokens q_heads"]],
) -> Float[Array, "tokens q_heads v_width"]:
    """Weigh every part by its share of the sum of the exponentials."""
    lse = jnp.stack(list(lses))  # [parts, tokens, q_heads]
    largest = jnp.max(lse, axis=0)
    shares = jnp.exp(lse - jnp.where(jnp.isneginf(largest), 0.0, largest))
    total = jnp.sum(shares, axis=0)
    shares = shares / jnp.where(total == 0, 1.0, total)
    merged = jnp.zeros(outputs[0].shape, jnp.float32)
    for share, output in zip(shares, outputs, strict=True):
        # A part that saw no position is ignored, even if it is NaN.
        said = jnp.where((share == 0)[..., None], 0.0, output.astype(jnp.float32))
        merged = merged + share[..., None] * said
    return merged.astype(outputs[0].dtype)
