"""Index scores on Hopper GPUs (Pallas, Mosaic GPU), from which XLA chooses.

Called by `api.py`, which has checked the arguments; `reference.py` defines the result. A block of
threads scores a share of one token's positions, 64 at a time: keys are the left operand of wgmma
and the heads' queries the right one, so that ReLU, weights and the sum over the heads stay within a
warp, and 4 bytes of a position leave the multiprocessor for the 256 that it reads. Plain XLA copies
the keys first and writes the scores of all heads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.attention.mosaic_gpu_walk import BLOCK, copies
from pallas_kernels.attention.reference import in_parts
from pallas_kernels.mosaic_gpu import interpreter, load, processors, store
from pallas_kernels.sparse_attention.reference import ChoiceCall, best_positions
from pallas_kernels.target import Target

STAGES = 3
"""Steps of keys in shared memory: 16 KB each with 128 columns of 16 bits."""

BLOCKS = 3
"""Blocks of threads that a multiprocessor holds, with their queries in 196 KB of shared memory."""

AT_ONCE = 256
"""Tokens whose scores lie in memory at a time: 34 MB at 32K positions."""

MOST_HEADS = 128
"""Heads whose scores of 64 positions fit in the registers of a warpgroup."""


def gap(call: ChoiceCall, target: Target) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    _, heads, width = call.queries.shape
    page_size, dtype = call.key_pages.shape[2], call.key_pages.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"keys in {dtype} (there are some for 16 bits)"
    if heads % 8 or heads > MOST_HEADS or width % 64 or width > 256:
        return f"{heads} index heads of {width} (multiples of 8 up to 128, and of 64 up to 256)"
    if page_size % BLOCK and (page_size % 8 or BLOCK % page_size):
        return f"page_size {page_size} (8, 16, 32, or a multiple of {BLOCK})"
    return ""


def choose_positions(call: ChoiceCall, top_k: int, target: Target) -> Int32[Array, "tokens chosen"]:
    """`api.choose_positions` on Hopper, if `gap` finds nothing in the call."""

    def choose(some: tuple[Array, ...]) -> Array:
        queries, weights, sequence, position = some
        part = ChoiceCall(queries, weights, *call[2:5], sequence, position)
        return best_positions(scores_of(part, target), position, top_k)

    tokens = call.queries, call.weights, call.sequence_of_token, call.position
    return in_parts(choose, tokens, AT_ONCE)


def scores_of(call: ChoiceCall, target: Target) -> Float32[Array, "tokens context"]:
    """Runs the kernel. Scores behind a token's own block are undefined."""
    tokens, heads, width = call.queries.shape
    page_size, columns = call.key_pages.shape[2], call.page_table.shape[1]
    context, dtype = columns * page_size, call.key_pages.dtype
    blocks = -(-context // BLOCK)
    parts = max(1, min(BLOCKS * processors(target) // tokens, blocks))

    kernel = plgpu.kernel(
        functools.partial(_body, parts=parts),
        kernel_name="index_scores",
        out_type=(jax.ShapeDtypeStruct((tokens, blocks * BLOCK), jnp.float32),),
        scratch_types={
            "query_smem": plgpu.SMEM((heads, width), dtype),
            "key_smem": plgpu.SMEM((STAGES, BLOCK, width), dtype),
            "query_loaded": plgpu.Barrier(num_arrivals=1),
            "loaded": plgpu.Barrier(num_arrivals=copies(page_size), num_barriers=STAGES),
            "released": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        },
        grid=(tokens, parts),
        grid_names=("token", "part"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpreter(target),
    )
    queries, where = call.queries.astype(dtype), (call.sequence_of_token, call.position)
    (found,) = kernel(queries, call.weights, call.key_pages, call.page_table, *where)
    return found[:, :context]


def _body(
    queries: Any,  # [tokens, heads, width]
    weights: Any,  # [tokens, heads]
    keys: Any,  # [pages, 1, page_size, width]
    table: Any,  # [sequences, columns]
    sequence: Any,  # [tokens]
    position: Any,  # [tokens]
    scores: Any,  # [tokens, blocks * BLOCK]
    *,
    parts: int,
    query_smem: Any,  # [heads, width]
    key_smem: Any,  # [STAGES, BLOCK, width]
    query_loaded: Any,
    loaded: Any,
    released: Any,
) -> None:
    """Scores a share of the blocks that one token sees."""
    token, part = lax.axis_index("token"), lax.axis_index("part")
    pool, _, page_size, _ = keys.shape
    heads, (sequences, columns) = queries.shape[1], table.shape
    own = jnp.clip(sequence[token], 0, sequences - 1)
    last = jnp.minimum(position[token], columns * page_size - 1)
    blocks = (last + BLOCK) // BLOCK
    share = (blocks + parts - 1) // parts
    begin = part * share
    end = jnp.minimum(begin + share, blocks)
    count = copies(page_size)
    rows = BLOCK // count

    def fetch(block: Any) -> None:
        slot = lax.rem(block - begin, STAGES)
        for index in range(count):
            place = block * BLOCK + index * rows
            column = jnp.minimum(place // page_size, columns - 1)
            page = jnp.clip(table[own, column], 0, pool - 1)
            plgpu.copy_gmem_to_smem(
                keys.at[page, 0, pl.ds(lax.rem(place, page_size), rows)],
                key_smem.at[slot, pl.ds(index * rows, rows)],
                loaded.at[slot],
            )

    def score(block: Any, share_of_head: Any) -> Any:
        step = block - begin
        slot, ahead = lax.rem(step, STAGES), block + STAGES - 1

        @pl.when(ahead < end)
        def _ahead() -> None:
            # The slot of the step before is filled again: all warps must have multiplied its keys.
            @pl.when(step > 0)
            def _release() -> None:
                plgpu.barrier_wait(released.at[lax.rem(step - 1, STAGES)])

            fetch(ahead)

        plgpu.barrier_wait(loaded.at[slot])

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, key_smem.at[slot], query_smem.T)
            return acc[...]

        found = pl.run_scoped(multiply, plgpu.ACC((BLOCK, heads), jnp.float32))
        # The sums have been read, so wgmma reads the keys no more. The last steps' releases are
        # waited for by no step: their slots are not filled again.
        plgpu.barrier_arrive(released.at[slot])
        weighed = jnp.maximum(found, 0.0) * lax.broadcast_in_dim(share_of_head, found.shape, [1])
        store(scores.at[token, pl.ds(block * BLOCK, BLOCK)], weighed.sum(axis=1))
        return share_of_head

    @pl.when(begin < end)
    def _score() -> None:
        plgpu.copy_gmem_to_smem(queries.at[token], query_smem, query_loaded)
        for index in range(STAGES - 1):
            pl.when(begin + index < end)(functools.partial(fetch, begin + index))
        share_of_head = load(weights.at[token], plgpu.Layout.WGMMA.reduce(0))
        plgpu.barrier_wait(query_loaded)
        lax.fori_loop(begin, end, score, share_of_head)
