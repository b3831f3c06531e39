"""The Hopper kernel of paged attention: one persistent block an SM walks its share of the pages.

Called by `mosaic_gpu.py`, which lays the queries out in units and cuts their pages into ranges.
Knows nothing of tokens or batches.

A unit is 64 rows a warpgroup (query heads of some tokens) that read one key/value head of one
sequence. A step is 64 positions of a unit. The steps of all units, one after the other, are cut
into equal ranges, one a block: so every SM has the same work, however ragged the lengths. A unit
whose steps lie in several ranges leaves a piece of its result in each; `combine` adds them up.

Every warpgroup computes, S = Q Kᵀ and O += P V, with P in registers. The first one also starts the
copies, some steps ahead; all of them tell it when they have read a slot.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels.attention.reference import Cache

ROWS = 64
"""Query rows of a warpgroup: M of a wgmma."""
BLOCK = 64
"""Positions of a step."""
OTHER_SHARED_MEMORY = 2048
"""Bytes for barriers and reductions."""
LOG2_E = math.log2(math.e)
UNSEEN = -1e30
"""The largest score of a row that has seen nothing; finite, so that differences are no NaN."""


class Plan(NamedTuple):
    """What is compiled.

    Attributes:
      warpgroups: that compute; a unit has 64 rows for each.
      blocks: of threads, each with a range of steps.
      stages: steps whose pages are in shared memory, or on their way, at one time.
      scale: of the scores.
      window: positions that a row sees, its own included; 0: all.
      v_width: of the values; without pages of values they are the first elements of the keys.
      heads: rows of an item for each of its tokens.
      units_per_item: units that share a place and a sequence, one after the other.
      units_per_kv_head: how many of those, one after the other, share a key/value head.
      p_in_registers: False for interpret mode, which knows wgmma only on shared memory.
    """

    warpgroups: int
    blocks: int
    stages: int
    scale: float
    window: int
    v_width: int
    heads: int
    units_per_item: int
    units_per_kv_head: int
    p_in_registers: bool


class Work(NamedTuple):
    """Which positions the units read, and how they are cut into ranges.

    Attributes:
      sequence: row of the page table, of every item.
      place: position of the item's first token; padding: -1.
      stride: from one token's position to the next one's.
      last: position of the item's last token, or of the last one that is cached; padding: -1.
      first_block: the first step of an item reads the positions from 64 * first_block on.
      start: of every unit, its first step; at the end the number of all steps.
      first_unit: of every block, the unit in which its range begins.
    """

    sequence: Int32[Array, " items"]
    place: Int32[Array, " items"]
    stride: Int32[Array, " items"]
    last: Int32[Array, " items"]
    first_block: Int32[Array, " items"]
    start: Int32[Array, " units_and_end"]
    first_unit: Int32[Array, " blocks"]


class _Cursor(NamedTuple):
    """Where the copies are: the next step to be copied, what it reads, and whose it is."""

    step: Any
    unit: Any
    end: Any  # the first step that is another unit's
    kv_head: Any
    sequence: Any
    shift: Any  # block of positions = step + shift
    pages: Any  # of the step; read ahead, so that no copy waits for them


def attend(
    queries: Float[Array, "units rows head_dim"],
    k_pages: Num[Array, "pages kv_heads page_size head_dim"],
    v_pages: Num[Array, "pages kv_heads page_size v_width"] | None,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    work: Work,
    plan: Plan,
    *,
    out_dtype: Any,
    interpret: Any,
) -> tuple[Array, Array, Array, Array]:
    """Run the kernel.

    Returns:
      for units that lie in one range, the output [units, rows, v_width] and the log of the sum of
      the exponentials [units, rows], anything for the others; for those the FP32 pieces of both,
      [2 * blocks, rows, ...]: at 2 * c that of the unit in which range c begins, if part of it is
      in the range before, at 2 * c + 1 that of the last one, if more of it is in the next range.
    """
    units, rows, head_dim = queries.shape
    dtype = k_pages.dtype
    pieces = 2 * plan.blocks
    copies = _copies(k_pages.shape[2])
    out_type = (
        jax.ShapeDtypeStruct((units, rows, plan.v_width), out_dtype),
        jax.ShapeDtypeStruct((units, rows), jnp.float32),
        jax.ShapeDtypeStruct((pieces, rows, plan.v_width), jnp.float32),
        jax.ShapeDtypeStruct((pieces, rows), jnp.float32),
    )
    scratch = {
        "q_smem": plgpu.SMEM((plan.warpgroups, ROWS, head_dim), queries.dtype),
        "k_smem": plgpu.SMEM((plan.stages, BLOCK, head_dim), dtype),
        "q_loaded": plgpu.Barrier(num_barriers=plan.warpgroups),
        "loaded": plgpu.Barrier(
            num_barriers=plan.stages, num_arrivals=copies if v_pages is None else 2 * copies
        ),
        "released": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=plan.warpgroups),
        "cleared": plgpu.Barrier(num_arrivals=plan.warpgroups),
    }
    if v_pages is not None:
        scratch["v_smem"] = plgpu.SMEM((plan.stages, BLOCK, plan.v_width), dtype)
    if not plan.p_in_registers:
        scratch["p_smem"] = plgpu.SMEM((plan.warpgroups, ROWS, BLOCK), queries.dtype)
    pages = (k_pages,) if v_pages is None else (k_pages, v_pages)
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan, pages_arrays=len(pages)),
        kernel_name="paged_attention",
        out_type=out_type,
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )
    return tuple(kernel(queries, page_table, *pages, *work))


def stages_of(cache: Cache, warpgroups: int, shared_memory: int) -> int:
    """As many as fit, 8 at the most."""
    head_dim = cache.k_pages.shape[3]
    width = head_dim if cache.v_pages is None else head_dim + cache.v_width
    step = BLOCK * width * cache.k_pages.dtype.itemsize
    room = shared_memory - warpgroups * ROWS * head_dim * 2 - OTHER_SHARED_MEMORY
    return min(8, room // step)


def _copies(page_size: int) -> int:
    """Pages, or parts of one, that a step reads."""
    return max(1, BLOCK // page_size)


def _body(queries, page_table, *refs, plan: Plan, pages_arrays: int, **scratch):
    """What every warpgroup of a block does."""
    pages, refs = refs[:pages_arrays], refs[pages_arrays:]
    work, (out, lse, out_pieces, lse_pieces) = Work(*refs[:-4]), refs[-4:]
    q_smem, k_smem = scratch["q_smem"], scratch["k_smem"]
    v_smem = scratch.get("v_smem")
    loaded, released = scratch["loaded"], scratch["released"]
    pool, _, page_size, _ = pages[0].shape
    sequences, columns = page_table.shape
    units = queries.shape[0]
    copies = _copies(page_size)
    copied_rows = BLOCK // copies

    block = lax.axis_index("block")
    me = lax.axis_index("warpgroup") if plan.warpgroups > 1 else 0
    total = work.start[units]
    begin, finish = block * total // plan.blocks, (block + 1) * total // plan.blocks

    # ------------------------------------------------------------------ copies
    def page_ids(sequence, block_of_positions):
        column = block_of_positions * BLOCK // page_size
        ids = [
            page_table[sequence, jnp.minimum(column + index, columns - 1)]
            for index in range(copies)
        ]
        return tuple(jnp.clip(page, 0, pool - 1) for page in ids)

    def open_unit(unit):
        """Everything but the step of a cursor."""
        unit = jnp.minimum(unit, units - 1)
        item = unit // plan.units_per_item
        return (
            unit,
            work.start[unit + 1],
            unit % plan.units_per_item // plan.units_per_kv_head,
            jnp.clip(work.sequence[item], 0, sequences - 1),
            work.first_block[item] - work.start[unit],
        )

    def cursor_at(step, unit_fields):
        sequence, shift = unit_fields[-2:]
        return _Cursor(step, *unit_fields, page_ids(sequence, step + shift))

    def advance(cursor: _Cursor) -> _Cursor:
        fields = cursor[1:6]
        step = cursor.step + 1
        fields = lax.cond(
            (step >= cursor.end) & (step < finish),
            lambda: open_unit(cursor.unit + 1),
            lambda: fields,
        )
        return cursor_at(step, fields)

    def copy(cursor: _Cursor):
        """Start to copy the keys and values of a step into its slot."""
        slot = lax.rem(cursor.step, plan.stages)
        offset = 0
        if page_size > BLOCK:
            offset = lax.rem((cursor.step + cursor.shift) * BLOCK, page_size)
        for index, page in enumerate(cursor.pages):
            for source, target in zip(pages, (k_smem, v_smem), strict=False):
                plgpu.copy_gmem_to_smem(
                    source.at[page, cursor.kv_head, pl.ds(offset, copied_rows)],
                    target.at[slot, pl.ds(index * copied_rows, copied_rows)],
                    loaded.at[slot],
                )

    def copy_next(cursor: _Cursor) -> _Cursor:
        pl.when((me == 0) & (cursor.step < finish))(lambda: copy(cursor))
        return advance(cursor)

    # --------------------------------------------------------------- computing
    def attend_unit(carry):
        unit, step, cursor = carry
        item = unit // plan.units_per_item
        end = jnp.minimum(work.start[unit + 1], finish)
        shift = work.first_block[item] - work.start[unit]
        place, stride, last = work.place[item], work.stride[item], work.last[item]
        first_row = (unit % plan.units_per_kv_head * plan.warpgroups + me) * ROWS

        mine = pl.ds(me * ROWS, ROWS)
        q_mine = q_smem.at[me]
        plgpu.copy_gmem_to_smem(queries.at[unit, mine], q_mine, scratch["q_loaded"].at[me])
        plgpu.barrier_wait(scratch["q_loaded"].at[me])

        row_layout = plgpu.Layout.WGMMA.reduce(1)
        largest = plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), row_layout)
        total_weight = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout)
        mixed = plgpu.layout_cast(jnp.zeros((ROWS, plan.v_width), jnp.float32), plgpu.Layout.WGMMA)

        def attend_step(step, carry):
            cursor, largest, total_weight, mixed = carry
            slot = lax.rem(step, plan.stages)

            def refill():
                # The slot of the step before this one is what the next copy goes to.
                if plan.warpgroups > 1:
                    pl.when(me == 0)(wait_for_release)
                else:
                    wait_for_release()

            def wait_for_release():
                plgpu.barrier_wait(released.at[lax.rem(step - 1, plan.stages)])

            pl.when(step > begin)(refill)
            cursor = lax.cond(step > begin, lambda: copy_next(cursor), lambda: cursor)

            plgpu.barrier_wait(loaded.at[slot])
            k_block = k_smem.at[slot]
            v_block = k_block.at[:, pl.ds(0, plan.v_width)] if v_smem is None else v_smem.at[slot]
            first = (step + shift) * BLOCK  # position
            window_start = place - plan.window + 1 if plan.window else 0
            at_edge = (first + BLOCK > last + 1) | (first < window_start)

            def clear():
                """What no row sees may be NaN, and 0 * NaN is NaN."""
                position = first + plgpu.broadcasted_iota(
                    jnp.int32, (BLOCK, ROWS), 0, layout=plgpu.Layout.WGMMA
                )
                seen = (position <= last) & (position >= window_start)
                for column in range(0, plan.v_width, ROWS):
                    part = v_block.at[:, pl.ds(column, ROWS)]
                    part[...] = jnp.where(seen, part[...], jnp.zeros((), part.dtype))
                plgpu.commit_smem()

            @pl.when(at_edge)
            def _():
                pl.when(me == 0)(clear)
                if plan.warpgroups > 1:
                    plgpu.barrier_arrive_and_wait(scratch["cleared"])

            def multiply(acc):
                plgpu.wgmma(acc, q_mine, k_block.T)
                return acc[...]

            scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK), jnp.float32))
            scores = scores * (plan.scale * LOG2_E)

            def mask(scores):
                shape, layout = (ROWS, BLOCK), plgpu.Layout.WGMMA
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                own = place + stride * ((row + first_row) // plan.heads)
                position = first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
                seen = position <= own
                if plan.window:
                    seen &= position > own - plan.window
                return jnp.where(seen, scores, -jnp.inf)

            scores = mask(scores)
            new_largest = jnp.maximum(largest, scores.max(axis=1))
            shrink = jnp.exp2(largest - new_largest)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
            total_weight = total_weight * shrink + weights.sum(axis=1)
            mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
            mixed = mix(mixed, weights.astype(q_smem.dtype), v_block)
            plgpu.barrier_arrive(released.at[slot])
            return cursor, new_largest, total_weight, mixed

        def mix(mixed, weights, values):
            if plan.p_in_registers:
                return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(
                    plgpu.ACC.init(mixed)
                )
            p_mine = scratch["p_smem"].at[me]
            p_mine[...] = weights
            plgpu.commit_smem()

            def multiply(acc):
                plgpu.wgmma(acc, p_mine, values)
                return acc[...]

            return mixed + pl.run_scoped(multiply, plgpu.ACC(mixed.shape, jnp.float32))

        cursor, largest, total_weight, mixed = lax.fori_loop(
            step, end, attend_step, (cursor, largest, total_weight, mixed)
        )

        blind = total_weight == 0.0
        share = jnp.where(blind, 0.0, 1.0 / total_weight)
        mixed = mixed * lax.broadcast_in_dim(share, mixed.shape, [0])
        log_sum = jnp.where(blind, -jnp.inf, (largest + jnp.log2(total_weight)) / LOG2_E)
        whole = (work.start[unit] >= begin) & (work.start[unit + 1] <= finish)

        @pl.when(whole)
        def _():
            plgpu.store(out.at[unit, mine], mixed.astype(out.dtype), optimized=False)
            plgpu.store(lse.at[unit, mine], log_sum, optimized=False)

        @pl.when(jnp.logical_not(whole))
        def _():
            piece = 2 * block + jnp.where(work.start[unit] < begin, 0, 1)
            plgpu.store(out_pieces.at[piece, mine], mixed)
            plgpu.store(lse_pieces.at[piece, mine], log_sum, optimized=False)

        return unit + 1, end, cursor

    @pl.when(begin < finish)
    def _():
        unit = work.first_unit[block]
        cursor = cursor_at(begin, open_unit(unit))
        for _ in range(plan.stages):
            cursor = copy_next(cursor)
        lax.while_loop(lambda carry: carry[1] < finish, attend_unit, (unit, begin, cursor))
