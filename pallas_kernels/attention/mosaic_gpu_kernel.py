"""The Hopper kernel of paged attention: S = Q Kᵀ, and O += P V in the registers.

Called by `mosaic_gpu.py`, which lays the queries out; `mosaic_gpu_walk.py` says what units, steps,
ranges and lanes are. Knows nothing of tokens or batches.

A block has one or two warpgroups, all of which compute. The first one also issues the copies, some
steps ahead; the others signal when they have read a slot. Two warpgroups either own 64 rows each,
or (`split_values`, for values too wide for one warpgroup's registers) share 64 rows: each then
computes half of a step's positions of S, and half of the columns of V.

Pages in 8 bits are dequantised in shared memory to the cheapest 16-bit type: int8 to bfloat16,
float8 to float16. Because float16 has a small exponent range, values are scaled by 16: a row keeps
its precision if its largest magnitude is between 2e-3 and 4e3.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.attention.mosaic_gpu_plan import ROWS, Sizes, arrays_of, scratch_types
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK, Cursor, Walk, Work
from pallas_kernels.attention.reference import Cache
from pallas_kernels.mosaic_gpu import store

LOG2_E = math.log2(math.e)
UNSEEN = -1e30
"""Initial running maximum of a row; finite, to avoid inf − inf."""
FLOAT16_FACTOR = 16
"""Factor applied to keys and values when they are converted to float16."""
CONVERTED_COLUMNS = 64
"""Columns that a warpgroup converts at one time."""


class _Unit(NamedTuple):
    """What a warpgroup computes until the next one; scalars."""

    index: Any
    place: Any
    stride: Any
    last: Any
    first_row: Any  # of this warpgroup, among the rows of the unit
    block_shift: Any  # block of positions - step


class _State(NamedTuple):
    """From one step of a unit to the next."""

    cursor: Cursor | None
    largest: Any  # of the scores so far, [64]
    total: Any  # sum of exp2(score - largest) over the positions of this warpgroup, [64]
    mixed: Any  # sum of exp2(score - largest) * value, [64, columns]


def attend(
    queries: Float[Array, "units lanes rows head_dim"],
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    work: Work,
    plan: Sizes,
    *,
    out_dtype: Any,
    interpret: Any,
) -> tuple[Array, Array, Array, Array]:
    """Run the kernel.

    Returns:
      for units that lie in one range, the output [units, lanes, rows, v_width] and the log of the
      sum of the exponentials [units, lanes, rows], anything for the others; for those the FP32
      pieces of both, [2 * ranges, lanes, rows, ...]: at 2 * c that of the unit in which range c
      begins, if part of it is in the range before, at 2 * c + 1 that of the last one, if more of it
      is in the next range.
    """
    units, lanes, rows, _ = queries.shape
    arrays = arrays_of(cache)
    pieces = 2 * plan.ranges
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan, names=tuple(arrays)),
        kernel_name="paged_attention",
        out_type=(
            jax.ShapeDtypeStruct((units, lanes, rows, plan.v_width), out_dtype),
            jax.ShapeDtypeStruct((units, lanes, rows), jnp.float32),
            jax.ShapeDtypeStruct((pieces, lanes, rows, plan.v_width), jnp.float32),
            jax.ShapeDtypeStruct((pieces, lanes, rows), jnp.float32),
        ),
        scratch_types=scratch_types(cache, plan, queries.dtype),
        grid=(plan.ranges, plan.lanes),
        grid_names=("range", "lane"),
        num_threads=plan.warpgroups + plan.has_copier,
        thread_name="warpgroup",
        # All sums and maxima are of what one warp has.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    return tuple(kernel(queries, page_table, *arrays.values(), *work))


def _body(
    queries: Any, page_table: Any, *refs: Any, plan: Sizes, names: tuple[str, ...], **scratch: Any
) -> None:
    """What every warpgroup of every block does."""
    sources, refs = refs[: len(names)], refs[len(names) :]
    outputs = refs[len(Work._fields) :]
    walk = Walk(
        Work(*refs[: len(Work._fields)]),
        page_table,
        list(sources),
        [scratch[name + "_smem"] for name in names],
        scratch["loaded"],
        ranges=plan.ranges,
    )

    @pl.when(walk.begin < walk.finish)
    def _() -> None:
        # Each has code of its own, in which all of its places are constants: that saves registers.
        for index in range(plan.warpgroups + plan.has_copier):
            warpgroup = _Warpgroup(index, plan, walk, queries, outputs, SimpleNamespace(**scratch))
            pl.when(lax.axis_index("warpgroup") == index)(warpgroup.run)


class _Warpgroup:
    """Walks one range for one lane, together with the other warpgroups of its block."""

    def __init__(
        self, me: int, plan: Sizes, walk: Walk, queries: Any, outputs: Any, smem: SimpleNamespace
    ) -> None:
        """Only where things are; `run` does it."""
        self.plan, self.walk, self.smem = plan, walk, smem
        self.queries, self.outputs = queries, outputs
        self.lane: Any = lax.axis_index("lane") if plan.lanes > 1 else jnp.int32(0)
        self.me = me
        self.leads = jnp.bool_(me == 0)
        self.row_group = self.me // (plan.warpgroups // plan.row_groups)
        self.rows = pl.ds(self.row_group * ROWS, ROWS)
        self.column_start = self.me * plan.columns if plan.split_values else 0
        self.columns = pl.ds(self.column_start, plan.columns)
        self.position_start = self.me * plan.positions if plan.split_values else 0
        self.positions = pl.ds(self.position_start, plan.positions)
        self.converts = hasattr(smem, "k_converted")
        self.shared = not hasattr(smem, "v_smem")
        self.factor = FLOAT16_FACTOR if self.converts and smem.q_smem.dtype == jnp.float16 else 1

    def run(self) -> None:
        """Copy, or attend for every unit of the range, or both."""
        if not self.plan.has_copier:
            cursor = self.walk.first_cursor()
            for _ in range(self.walk.stages):
                cursor = self.walk.copy(cursor, self.leads)
            self._attend(cursor)
            return
        if self.me == 0:
            self._attend(None)
        else:
            self._copy()

    def _copy(self) -> None:
        walk = self.walk

        def copy(step: Any, cursor: Cursor) -> Cursor:
            pl.when(step >= walk.begin + walk.stages)(lambda: self._wait_until_released(step))
            return walk.copy(cursor, jnp.bool_(True))

        lax.fori_loop(walk.begin, walk.finish, copy, walk.first_cursor())

    def _attend(self, cursor: Cursor | None) -> None:
        walk = self.walk
        unit = walk.work.first_unit[walk.index]
        lax.while_loop(
            lambda carry: carry[1] < walk.finish, self._attend_unit, (unit, walk.begin, cursor)
        )

    def _wait_until_released(self, step: Any) -> None:
        """The slot of this step can be overwritten."""
        plgpu.barrier_wait(self.smem.released.at[self.walk.slot(step)])

    def _wait_until_loaded(self, slot: Any) -> None:
        """Wait until the data of the step in this slot has arrived."""
        plgpu.barrier_wait(self.smem.loaded.at[slot])

    def _meet(self) -> None:
        """Wait for all warps of the block."""
        plgpu.barrier_arrive(self.smem.met)
        plgpu.barrier_wait(self.smem.met)

    def _meet_others(self) -> None:
        """As `_meet`, where the warps of one warpgroup need not wait for each other."""
        if self.plan.warpgroups > 1:
            self._meet()

    def _attend_unit(self, carry: tuple[Any, Any, Cursor | None]) -> tuple[Any, Any, Cursor | None]:
        index, step, cursor = carry
        plan, work, smem = self.plan, self.walk.work, self.smem
        item = index // self.walk.kv_heads
        end = jnp.minimum(work.start[index + 1], self.walk.finish)
        unit = _Unit(
            index,
            work.place[item],
            work.stride[item],
            work.last[item],
            (self.lane * plan.row_groups + self.row_group) * ROWS,
            work.first_block[item] - work.start[index],
        )
        self._meet()  # All have read the queries of the unit before.
        q_loaded = smem.q_loaded.at[self.row_group]

        def load_queries() -> None:
            plgpu.copy_gmem_to_smem(
                self.queries.at[index, self.lane, self.rows],
                smem.q_smem.at[self.row_group],
                q_loaded,
            )

        pl.when(self.leads)(load_queries) if plan.split_values else load_queries()
        plgpu.barrier_wait(q_loaded)

        state = _State(
            cursor,
            _filled((ROWS,), UNSEEN),
            _filled((ROWS,), 0.0),
            _filled((ROWS, plan.columns), 0.0),
        )
        state = lax.fori_loop(step, end, functools.partial(self._attend_step, unit), state)
        self._write(unit, state)
        return index + 1, end, state.cursor

    def _attend_step(self, unit: _Unit, step: Any, state: _State) -> _State:
        walk, smem = self.walk, self.smem
        slot = walk.slot(step)

        cursor = state.cursor
        if isinstance(cursor, Cursor):
            cursor = self._copy_beside(step, cursor)
        self._wait_until_loaded(slot)
        first = (step + unit.block_shift) * BLOCK  # position
        scores = self._scores(unit, slot, first) * (self.plan.scale * LOG2_E / self.factor)
        scores = jnp.where(self._seen(unit, first), scores, -jnp.inf)
        largest = jnp.maximum(state.largest, scores.max(axis=1))
        if self.plan.split_values:
            largest = jnp.maximum(largest, self._of_other(largest))
        weights = jnp.exp2(scores - _along(largest, scores, 0))
        shrink = jnp.exp2(state.largest - largest)
        total = state.total * shrink + weights.sum(axis=1)
        if self.converts:
            plgpu.barrier_arrive(smem.released.at[slot])
        mixed = state.mixed * _along(shrink, state.mixed, 0)
        mixed = self._mix(mixed, weights.astype(smem.q_smem.dtype), slot)
        if not self.converts:
            plgpu.barrier_arrive(smem.released.at[slot])
        return _State(cursor, largest, total, mixed)

    def _copy_beside(self, step: Any, cursor: Cursor) -> Cursor:
        """Start the next copy, into the slot of the step before this one."""
        started = step > self.walk.begin
        pl.when(started & self.leads)(lambda: self._wait_until_released(step - 1))
        return lax.cond(started, lambda: self.walk.copy(cursor, self.leads), lambda: cursor)

    # ----------------------------------------------------------------------------- keys, values
    def _keys(self, slot: Any) -> Any:
        return self._of_step(slot, "k")

    def _values(self, slot: Any) -> Any:
        if self.shared:
            return self._keys(slot).at[:, pl.ds(0, self.plan.v_width)]
        return self._of_step(slot, "v")

    def _of_step(self, slot: Any, name: str) -> Any:
        if self.converts:
            return getattr(self.smem, name + "_converted").at[_zero(slot)]
        return getattr(self.smem, name + "_smem").at[slot]

    def _scores(self, unit: _Unit, slot: Any, first: Any) -> Any:
        """[64, positions]; afterwards the values can be read, too."""
        smem = self.smem
        if self.converts:
            self._meet_others()  # All have read what was converted before.
            self._convert(smem.k_smem.at[slot], smem.k_scales_smem.at[slot], self._keys(slot))
        if self.shared or not self.converts:
            self._clear_unseen(unit, slot, first)
        if self.converts:
            self._meet_others()

        def multiply(acc: Any) -> Any:
            keys = self._keys(slot).at[self.positions]
            plgpu.wgmma(acc, smem.q_smem.at[self.row_group + _zero(slot)], keys.T)
            if self.converts and not self.shared:
                # While the tensor cores are at work.
                self._convert(smem.v_smem.at[slot], smem.v_scales_smem.at[slot], self._values(slot))
            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.plan.positions), jnp.float32))
        if self.converts and not self.shared:
            self._clear_unseen(unit, slot, first)
            self._meet_others()
        return scores

    def _convert(self, source: Any, scales: Any, target: Any) -> None:
        """Convert [64, width] with scales [64], every warpgroup its share of the columns."""
        layout = plgpu.Layout.WGMMA_UPCAST_4X
        by_row = plgpu.load(scales, layout=layout.reduce(1), optimized=False) * self.factor
        by_row = by_row.astype(target.dtype)
        warpgroups, shares = self.plan.warpgroups, source.shape[1] // CONVERTED_COLUMNS

        def convert(index: Any, _: None = None) -> None:
            start = (index * warpgroups + self.me) * CONVERTED_COLUMNS
            columns = pl.ds(start, CONVERTED_COLUMNS)
            part = plgpu.load(source.at[:, columns], layout=layout, optimized=False)
            store(target.at[:, columns], part.astype(target.dtype) * _along(by_row, part, 0))

        if warpgroups == 1:
            for index in range(shares):
                convert(index)
        else:  # not unrolled, for want of registers
            mine = (shares - self.me + warpgroups - 1) // warpgroups
            lax.fori_loop(0, mine, convert, None)
        plgpu.commit_smem()

    def _clear_unseen(self, unit: _Unit, slot: Any, first: Any) -> None:
        """Zero the positions that no row sees: they may hold NaN, and 0 * NaN is NaN."""
        window_start = unit.place - self.plan.window + 1 if self.plan.window else 0
        values = self._values(slot)

        def clear() -> None:
            position = first + _iota((BLOCK, ROWS), 0)
            seen = (position <= unit.last) & (position >= window_start)

            def clear_columns(index: Any, _: None) -> None:
                part = values.at[:, pl.ds(index * ROWS, ROWS)]
                part[...] = jnp.where(seen, part[...], jnp.zeros((), part.dtype))

            lax.fori_loop(0, self.plan.v_width // ROWS, clear_columns, None)
            plgpu.commit_smem()

        @pl.when((first + BLOCK > unit.last + 1) | (first < window_start))
        def _() -> None:
            self._meet_others()  # Shares of other warpgroups are converted.
            pl.when(self.leads)(clear)
            self._meet_others()

    def _seen(self, unit: _Unit, first: Any) -> Any:
        """[64, positions]: which rows see which positions."""
        shape = (ROWS, self.plan.positions)
        own = unit.place + unit.stride * ((_iota(shape, 0) + unit.first_row) // self.plan.heads)
        position = _iota(shape, 1) + (first + self.position_start)
        seen = position <= own
        return seen & (position > own - self.plan.window) if self.plan.window else seen

    # ------------------------------------------------------------------------- what is mixed
    def _of_other(self, vector: Any) -> Any:
        """What the other warpgroup has in place of this vector, [64]."""
        exchange = self.smem.exchange
        exchange[self.me] = vector
        self._meet()
        layout = plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(exchange.at[1 - self.me], layout=layout, optimized=False)

    def _mix(self, mixed: Any, weights: Any, slot: Any) -> Any:
        """mixed + weights @ values."""
        values = self._values(slot).at[:, self.columns]
        p: Any = weights
        if self.plan.split_values or not self.plan.p_in_registers:
            p = self.smem.p_smem.at[self.rows]
            p[:, self.positions] = weights
            plgpu.commit_smem()
        if self.plan.split_values:
            self._meet()
        if self.plan.p_in_registers:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, p, values))(plgpu.ACC.init(mixed))

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, p, values)
            return acc[...]

        return mixed + pl.run_scoped(multiply, plgpu.ACC(mixed.shape, jnp.float32))

    def _write(self, unit: _Unit, state: _State) -> None:
        """Write a unit, or a piece of it."""
        walk, total = self.walk, state.total
        if self.plan.split_values:
            total = total + self._of_other(total)
        blind = total == 0.0
        share = jnp.where(blind, jnp.zeros_like(total), 1.0 / (total * self.factor))
        mixed = state.mixed * _along(share, state.mixed, 0)
        log_sum = (state.largest + jnp.log2(total)) * (1.0 / LOG2_E)
        log_sum = jnp.where(blind, jnp.full_like(total, -jnp.inf), log_sum)
        out, lse, out_pieces, lse_pieces = self.outputs
        start, end = walk.work.start[unit.index], walk.work.start[unit.index + 1]
        whole = (start >= walk.begin) & (end <= walk.finish)

        def write(array: Any, sums: Any, index: Any) -> None:
            target = array.at[index, self.lane, self.rows, self.columns]
            store(target, mixed.astype(array.dtype))

            @pl.when(self.leads | (not self.plan.split_values))
            def _() -> None:
                store(sums.at[index, self.lane, self.rows], log_sum)

        piece = 2 * walk.index + jnp.where(start < walk.begin, 0, 1)
        # Either or: one after the other, and what is converted for one would be kept for the next.
        lax.cond(
            whole,
            lambda: write(out, lse, unit.index),
            lambda: write(out_pieces, lse_pieces, piece),
        )


def _zero(slot: Any) -> Any:
    """0, which the compiler does not know.

    It keeps all that it can compute of a constant place in shared memory in registers: of queries
    of 576 columns, the 36 descriptors that wgmma takes are 72 of them.
    """
    return jnp.minimum(slot, 0)


def _filled(shape: tuple[int, ...], value: float) -> Any:
    layout = plgpu.Layout.WGMMA
    return plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), layout if len(shape) == 2 else layout.reduce(1)
    )


def _iota(shape: tuple[int, int], dimension: int) -> Any:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _along(vector: Any, matrix: Any, dimension: int) -> Any:
    """A vector that runs along this dimension of a matrix, as large as that."""
    return lax.broadcast_in_dim(vector, matrix.shape, [dimension])
