"""Attention inside a batch on a TPU core (Mosaic): `chunk_attention` without a cache.

Called by `api.py`, which has checked the arguments; `reference.py` defines the result.

Queries and keys are cut into square tiles; the grid is (heads, query tiles, key tiles). For each
pair of tiles XLA computes whether any query sees any key, and whether every query sees every key.
Pairs without a visible key are neither fetched nor multiplied, and only partially visible pairs are
masked. Scores never leave the core.

A probability of 0 does not hide a NaN value (0 * NaN is NaN). Therefore, before the kernel, the
value of a token that is not finite is replaced by zeros and its key by NaN: masked scores have no
effect whatever they are, and a query that does see the token still gets NaN.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.attention.mosaic_tpu import INTERPRETER
from pallas_kernels.attention.mosaic_tpu_kernel import LOWEST, finished, product
from pallas_kernels.attention.mosaic_tpu_memory import VMEM_BYTES
from pallas_kernels.attention.reference import ChunkCall
from pallas_kernels.attention.write_tpu import LANES
from pallas_kernels.target import Target

TILE, INTERPRETED_TILE = 512, 8
"""Most queries, and keys, of a tile: a multiple of `LANES`, unless it is interpreted."""


class Pairs(NamedTuple):
    """Visibility of each pair of query and key tiles, read by the kernel from scalar memory."""

    some: Int32[Array, "tiles tiles"]
    """1 where some query sees some key."""
    every: Int32[Array, "tiles tiles"]
    """1 where every query sees every key."""
    first: Int32[Array, " tiles"]
    """First key tile with `some` of each query tile; 0 without one."""
    last: Int32[Array, " tiles"]


def chunk_attention(
    call: ChunkCall, target: Target
) -> tuple[Float[Array, "tokens heads v_head_dim"], Float32[Array, "tokens heads"]]:
    """`api.chunk_attention` on a TPU."""
    queries, keys, values, sequence_of_token, position, scale = call
    tokens, heads, width = queries.shape
    v_width = values.shape[2]
    if 0 in queries.shape or v_width == 0:
        return jnp.zeros(values.shape, queries.dtype), jnp.full((tokens, heads), -jnp.inf)
    unit, largest = (INTERPRETED_TILE,) * 2 if target.interpret else (LANES, TILE)
    tile = min(largest, -(-tokens // unit) * unit)
    missing = -tokens % tile
    position = jnp.pad(position, (0, missing), constant_values=-1)
    sequence = jnp.pad(sequence_of_token, (0, missing))
    pairs = tile_pairs(sequence, position, tile)

    real = (position >= 0)[:, None, None]
    padding = ((0, missing), (0, 0), (0, 0))
    queries = jnp.where(real, jnp.pad(queries, padding), 0)
    values = jnp.pad(values, padding)
    finite = jnp.all(jnp.isfinite(values), axis=2, keepdims=True)
    keys = jnp.where(real & jnp.logical_not(finite), jnp.nan, jnp.pad(keys, padding))
    values = jnp.where(real & finite, values, 0)
    # Heads first, so that a tile belongs to one head; operands get one dtype.
    alike = queries.dtype == keys.dtype == values.dtype
    dtype = queries.dtype if alike else jnp.float32
    operands = [jnp.swapaxes(x, 0, 1).astype(dtype) for x in (queries, keys, values)]

    def of_keys(head: Any, q: Any, k: Any, *refs: Any) -> tuple[Any, ...]:
        found = Pairs(*refs)
        # A skipped pair maps to the tile that is already in VMEM, so nothing is fetched.
        return head, jnp.clip(k, found.first[q], found.last[q]), 0

    def row_of_keys(*indices: Any) -> tuple[Any, ...]:
        return 0, of_keys(*indices)[1]

    total = tokens + missing
    count = total // tile
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale * math.log2(math.e)),
        name="chunk_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pairs),
            grid=(heads, count, count),
            in_specs=[
                pl.BlockSpec((tile, 1), lambda head, q, k, *_: (q, 0)),
                pl.BlockSpec((tile, 1), lambda head, q, k, *_: (q, 0)),
                pl.BlockSpec((1, tile), row_of_keys),
                pl.BlockSpec((1, tile), row_of_keys),
                pl.BlockSpec((1, tile, width), lambda head, q, k, *_: (head, q, 0)),
                pl.BlockSpec((1, tile, width), of_keys),
                pl.BlockSpec((1, tile, v_width), of_keys),
            ],
            out_specs=[
                pl.BlockSpec((1, tile, v_width), lambda head, q, k, *_: (head, q, 0)),
                pl.BlockSpec((1, 1, tile), lambda head, q, k, *_: (head, 0, q)),
            ],
            scratch_shapes=[pltpu.VMEM((tile, size), jnp.float32) for size in (1, 1, v_width)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((heads, total, v_width), queries.dtype),
            jax.ShapeDtypeStruct((heads, 1, total), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=INTERPRETER if target.interpret else False,
    )(*pairs, sequence[:, None], position[:, None], sequence[None], position[None], *operands)
    return jnp.swapaxes(out, 0, 1)[:tokens], lse[:, 0, :tokens].T


def tile_pairs(
    sequence: Int32[Array, " tokens"], position: Int32[Array, " tokens"], tile: int
) -> Pairs:
    """Visibility of tiles of `tile` tokens, which must divide their number."""
    sequence, position = (array.reshape(-1, tile) for array in (sequence, position))
    real = position >= 0
    most = jnp.iinfo(jnp.int32).max

    def least(array: Array) -> Array:
        return jnp.min(jnp.where(real, array, most), axis=1)

    def greatest(array: Array) -> Array:
        return jnp.max(jnp.where(real, array, -1), axis=1)

    low, high = least(sequence), greatest(sequence)
    # Without a real token low is above every high. Queries in rows, keys in columns.
    some = (low[:, None] <= high[None]) & (low[None] <= high[:, None])
    some &= least(position)[None] <= greatest(position)[:, None]
    full = jnp.all(real, axis=1)
    every = full[:, None] & full[None] & (low == high)[:, None] & (low == high)[None]
    every &= some & (greatest(position)[None] <= least(position)[:, None])
    tiles = some.shape[0]
    exists = jnp.any(some, axis=1)
    first = jnp.where(exists, jnp.argmax(some, axis=1), 0)
    last = jnp.where(exists, tiles - 1 - jnp.argmax(some[:, ::-1], axis=1), 0)
    return Pairs(*(array.astype(jnp.int32) for array in (some, every, first, last)))


def _kernel(
    scale: float,
    some: Any,
    every: Any,
    first: Any,  # [tiles], for the index maps
    last: Any,
    q_sequence: Any,  # [tile, 1]
    q_position: Any,  # [tile, 1]
    k_sequence: Any,  # [1, tile]
    k_position: Any,  # [1, tile]
    queries: Any,  # [1, tile, head_dim]
    keys: Any,  # [1, tile, head_dim]
    values: Any,  # [1, tile, v_width]
    out: Any,  # [1, tile, v_width]
    lse: Any,  # [1, 1, tile]
    largest: Any,  # [tile, 1]
    total: Any,  # [tile, 1]
    mixed: Any,  # [tile, v_width]
) -> None:
    """One pair of tiles of one head; `scale` includes log2(e), since exponentials are powers of
    2."""
    q, k = pl.program_id(1), pl.program_id(2)

    @pl.when(k == 0)
    def begin() -> None:
        largest[...] = jnp.full_like(largest, LOWEST)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    def add(visible: Bool[Array, "tile tile"] | None) -> None:
        scores = product(queries[0], keys[0], 1) * scale
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        # Online softmax: exponentials are relative to the running maximum; when that grows from
        # `before` to `now`, the sums so far are rescaled by `fade`.
        before = largest[...]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, fade = jnp.exp2(scores - now), jnp.exp2(before - now)
        largest[...] = now
        total[...] = total[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
        mixed[...] = mixed[...] * fade + product(weights.astype(values.dtype), values[0], 0)

    @pl.when((some[q, k] == 1) & (every[q, k] == 0))
    def masked() -> None:
        visible = (q_sequence[...] == k_sequence[...]) & (k_position[...] <= q_position[...])
        add(visible & (k_position[...] >= 0))

    pl.when(every[q, k] == 1)(lambda: add(None))

    @pl.when(k == pl.num_programs(2) - 1)
    def end() -> None:
        rows, logarithm = finished(largest[...], total[...], mixed[...])
        out[0] = rows.astype(out.dtype)
        # Mosaic cannot reshape a column to a row: repeat it along the lanes and transpose.
        square = jnp.broadcast_to(logarithm, (logarithm.shape[0], LANES))
        lse[0] = square.T[:1]
