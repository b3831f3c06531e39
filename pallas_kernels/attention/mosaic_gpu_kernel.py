"""The Hopper kernel of paged attention: S = Q Kᵀ, and O += P V in the registers.

Called by `mosaic_gpu.py`, which lays the queries out; `ranges.py` says what units, steps,
ranges and lanes are. Knows nothing of tokens or batches.

A block has one or two warpgroups that compute. Beside one, another only issues the copies, some
steps ahead; of two, the first one issues them, and the other signals when it has read a slot. Two
warpgroups own 64 rows each, or (`split_values`, for values too wide for one warpgroup's registers)
share 64 rows: each then computes half of a step's positions of S, and half of the columns of V.

Keys in FP8 are multiplied as they are (`fp8_keys`), by queries of two FP8 terms, which have the
precision of BF16; their scales multiply scores. Values lie across the sum, along which alone wgmma
takes 8 bits. They, and the keys of other calls in 8 bits, are dequantised in shared memory
(`mosaic_gpu_pages.py`), which takes longer than wgmma and leaves the tensor cores idle. So two
warpgroups walk two ranges (`own_ranges`), with copies, queries and sums of their own: while one
dequantises the other one multiplies, and neither ever waits for the other. A slot is copied into
anew as soon as it has been dequantised or multiplied.
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
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.mosaic_gpu_pages import Pages, Unit, along, iota, zero
from pallas_kernels.attention.mosaic_gpu_plan import (
    ROWS,
    Sizes,
    compute_dtype,
    scratch_types,
)
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK, Cursor, Part, Walk
from pallas_kernels.attention.ranges import Work, piece_of, pieces
from pallas_kernels.attention.reference import Cache
from pallas_kernels.mosaic_gpu import load, store

LOG2_E = math.log2(math.e)
UNSEEN = -1e30
"""Initial running maximum of a row; finite, to avoid inf − inf."""


class _State(NamedTuple):
    """State that one step of a unit passes to the next."""

    cursor: Cursor | None
    largest: Any  # of the scores so far, [64]
    total: Any  # sum of exp2(score - largest) over the positions of this warpgroup, [64]
    mixed: Any  # sum of exp2(score - largest) * value, [64, columns]


def attend(
    queries: Float[Array, "terms units lanes rows head_dim"],
    query_scales: Float32[Array, "units lanes rows"] | None,
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    work: Work,
    plan: Sizes,
    *,
    out_dtype: Any,
    interpret: Any,
) -> tuple[Array, Array, Array, Array]:
    """Runs the kernel.

    Args:
      queries: one term, or with `fp8_keys` two, whose sum times `query_scales` is a query.

    Returns:
      For units that lie in one range: outputs [units, lanes, rows, v_width] and logs of the sums of
        exponentials [units, lanes, rows]; other units' entries are undefined. For the others:
        pieces of both, [pieces, lanes, rows, ...], at the indices that `piece_of` gives. Pieces of
        outputs have the 16-bit dtype of the products if `out_dtype` has 16 bits, else FP32.
    """
    units, lanes, rows, _ = queries.shape[1:]
    arrays = cache.arrays()
    count = pieces(units, plan.ranges)
    in_16_bits = jnp.dtype(out_dtype).itemsize == 2
    pieces_dtype = compute_dtype(cache.k_pages.dtype) if in_16_bits else jnp.float32
    scales = () if query_scales is None else (query_scales,)
    kernel = plgpu.kernel(
        functools.partial(_body, plan=plan, names=tuple(arrays)),
        kernel_name="paged_attention",
        out_type=(
            jax.ShapeDtypeStruct((units, lanes, rows, plan.v_width), out_dtype),
            jax.ShapeDtypeStruct((units, lanes, rows), jnp.float32),
            jax.ShapeDtypeStruct((count, lanes, rows, plan.v_width), pieces_dtype),
            jax.ShapeDtypeStruct((count, lanes, rows), jnp.float32),
        ),
        scratch_types=scratch_types(cache, plan, queries.dtype),
        grid=(plan.ranges // plan.walkers, plan.lanes),
        grid_names=("range", "lane"),
        num_threads=plan.warpgroups + plan.has_copier,
        thread_name="warpgroup",
        # Every sum and maximum is taken within one warp.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    return tuple(kernel(queries, page_table, *arrays.values(), *work, *scales))


def _body(
    queries: Any, page_table: Any, *refs: Any, plan: Sizes, names: tuple[str, ...], **scratch: Any
) -> None:
    """Kernel body, run by every warpgroup of every block: selects the warpgroup's own code."""
    sources, refs = refs[: len(names)], refs[len(names) :]
    after = refs[len(Work._fields) :]
    query_scales, outputs = (after[0], after[1:]) if plan.fp8_keys else (None, after)
    smem = SimpleNamespace(**scratch)
    here = lax.axis_index("warpgroup")

    def part(name: str, source: Any) -> Part:
        loaded = name[0] + "_loaded" if plan.own_ranges else "loaded"
        return Part(source, scratch[name + "_smem"], scratch[loaded])

    walks = [
        Walk(
            Work(*refs[: len(Work._fields)]),
            page_table,
            {name: part(name, source) for name, source in zip(names, sources, strict=True)},
            ranges=plan.ranges,
            walkers=plan.walkers,
            walker=walker,
        )
        for walker in range(plan.walkers)
    ]
    # Each warpgroup has its own code, in which all indices of buffers are constants. That saves
    # registers.
    for index in range(plan.warpgroups + plan.has_copier):
        walk = walks[min(index, plan.walkers - 1)]
        warpgroup = _Warpgroup(index, plan, walk, (queries, query_scales), outputs, smem)
        pl.when((walk.begin < walk.finish) & (here == index))(warpgroup.run)


class _Warpgroup(Pages):
    """Walks one range for one lane, together with the other warpgroups of its block."""

    def __init__(
        self, me: int, plan: Sizes, walk: Walk, queries: Any, outputs: Any, smem: SimpleNamespace
    ) -> None:
        """Stores references and this warpgroup's share of rows, columns and positions."""
        super().__init__(me, plan, walk, smem)
        (self.queries, self.query_scales), self.outputs = queries, outputs
        self.lane: Any = lax.axis_index("lane") if plan.lanes > 1 else jnp.int32(0)
        self.row_group = 0 if plan.own_ranges else me // (plan.warpgroups // plan.row_groups)
        self.rows = pl.ds(self.row_group * ROWS, ROWS)
        self.buffer = self.walker + self.row_group
        self.column_start = self.me * plan.columns if plan.split_values else 0
        self.columns = pl.ds(self.column_start, plan.columns)
        self.position_start = self.me * plan.positions if plan.split_values else 0
        self.positions = pl.ds(self.position_start, plan.positions)

    @property
    def looks_up_late(self) -> bool:
        """Whether the page of the next copy is looked up only after the scores are masked. From
        there nothing branches until the values have been multiplied. Plans that convert values
        beside the products of the scores need this: an earlier lookup would stall on its load. For
        all other plans the earlier lookup is better."""
        return self.plan.own_ranges and not self.plan.one_buffer and not self.shared

    def run(self) -> None:
        """Copies, or attends for every unit of the range, or does both."""
        if not self.plan.has_copier:
            cursor = self.walk.first_cursor()
            # Warpgroups that share slots leave one empty: a step refills the slot of the step
            # before, which the other warpgroup has had a whole step to leave. A warpgroup with its
            # own range refills each slot as soon as it has read it, so all are filled here.
            for _ in range(self.walk.stages - (not self.plan.own_ranges)):
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
            # A wait matches one release. Before the ring has gone round once nothing was released,
            # and a wait would last for ever; afterwards, without it, the copy would overwrite keys
            # that wgmma is reading.
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
        """Waits until the slot of this step can be overwritten."""
        plgpu.barrier_wait(self.smem.released.at[self.walk.slot(step)])

    def _attend_unit(self, carry: tuple[Any, Any, Cursor | None]) -> tuple[Any, Any, Cursor | None]:
        index, step, cursor = carry
        plan, work, smem = self.plan, self.walk.work, self.smem
        item = index // self.walk.kv_heads
        end = jnp.minimum(work.start[index + 1], self.walk.finish)
        unit = Unit(
            index,
            work.place[item],
            work.stride[item],
            work.last[item],
            (self.lane * plan.row_groups + self.row_group) * ROWS,
            work.first_block[item] - work.start[index],
            self._load_query_scales(index),
        )
        # Two warpgroups that share rows share their queries: without this meeting the copy of the
        # next ones would overwrite those that the slower one still multiplies. Within a warpgroup
        # Pallas itself has the warps meet before every copy and store.
        self._meet()  # All have read the queries of the unit before.
        q_loaded = smem.q_loaded.at[self.buffer]

        def load_queries() -> None:
            for term in range(plan.terms):
                plgpu.copy_gmem_to_smem(
                    self.queries.at[term, index, self.lane, self.rows],
                    smem.q_smem.at[self.buffer * plan.terms + term],
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

    def _attend_step(self, unit: Unit, step: Any, state: _State) -> _State:
        walk, smem = self.walk, self.smem
        slot = walk.slot(step)

        cursor, own_ranges = state.cursor, self.plan.own_ranges
        if isinstance(cursor, Cursor) and not own_ranges:
            self._copy_beside(step, cursor)
        self._wait_until_loaded(slot)
        first = (step + unit.block_shift) * BLOCK  # position
        factor = self.plan.scale * LOG2_E
        if self.plan.fp8_keys:
            scores = self._scores_of_fp8(unit, slot, first, cursor)
        else:
            scores, cursor = self._scores(unit, slot, first, cursor)
            factor /= self.factor
        scores = self._masked(scores * factor, unit, first)
        if isinstance(cursor, Cursor) and self.looks_up_late:
            cursor = walk.after(cursor)
        largest = jnp.maximum(state.largest, scores.max(axis=1))
        if self.plan.split_values:
            largest = jnp.maximum(largest, self._of_other(largest))
        weights = jnp.exp2(scores - along(largest, scores, 0))
        shrink = jnp.exp2(state.largest - largest)
        total = state.total * shrink + weights.sum(axis=1)
        # Values that were converted are multiplied from their buffer, so the slot is free already.
        # Others lie in the slot until wgmma has read them: released any earlier, it would be copied
        # into under the product. Own ranges release nothing: they start the next copy themselves.
        if self.converts and not own_ranges:
            plgpu.barrier_arrive(smem.released.at[slot])
        mixed = state.mixed * along(shrink, state.mixed, 0)
        mixed = self._mix(mixed, weights.astype(self.dtype), slot)
        if not self.converts:
            plgpu.barrier_arrive(smem.released.at[slot])
        return _State(cursor, largest, total, mixed)

    def _copy_beside(self, step: Any, cursor: Cursor) -> None:
        """Starts the next copy, into the slot of the previous step."""
        # In the first step the slot is the one that `run` left empty, which nobody releases.
        after_one = self.leads & (step > self.walk.begin)
        pl.when(after_one)(lambda: self._wait_until_released(step - 1))
        self.walk.start(cursor, self.leads, tuple(self.walk.parts))

    def _scores(
        self, unit: Unit, slot: Any, first: Any, cursor: Cursor | None
    ) -> tuple[Any, Cursor | None]:
        """Returns scores [64, positions] and the next copy's cursor; values can be read then."""
        smem, one_buffer = self.smem, self.plan.one_buffer
        if self.converts:
            self._convert_keys(slot, cursor)
        # Latents are keys and values at once: cleared only later, they would change while wgmma
        # reads them as keys. Values that are still to be converted are cleared after that.
        if self.shared or not self.converts:
            self._clear_unseen(unit, slot, first)
        # Each warpgroup converted a share of the keys; its products need all of them.
        if self.converts:
            self._meet_others()

        def multiply(acc: Any) -> tuple[Any, Cursor | None]:
            keys = self._keys(slot).at[self.positions]
            plgpu.wgmma(acc, smem.q_smem.at[self.buffer + zero(slot)], keys.T)
            # While the tensor cores are at work.
            later = cursor
            if isinstance(cursor, Cursor) and not self.looks_up_late:
                later = self.walk.after(cursor)
            # One buffer holds the keys that wgmma reads now, so values wait until it is done.
            if self.converts and not self.shared and not one_buffer:
                self._convert_values(slot, cursor)
            return acc[...], later

        scores, later = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.plan.positions), jnp.float32))
        if one_buffer:
            self._meet_to_convert()
            self._convert_values(slot, cursor)
        if self.converts and not self.shared:
            self._clear_unseen(unit, slot, first)
            # `_mix` multiplies the shares that the other warpgroup converted, too.
            self._meet_others()
        return scores, later

    def _load_query_scales(self, unit: Any) -> Any:
        if self.query_scales is None:
            return None
        scales = self.query_scales.at[unit, self.lane, self.rows]
        return load(scales, plgpu.Layout.WGMMA.reduce(1))

    def _scores_of_fp8(self, unit: Unit, slot: Any, first: Any, cursor: Cursor | None) -> Any:
        """Like `_scores`, for FP8 keys, which are multiplied in the slot that they were copied to.

        Starts to copy the next keys into that slot as soon as these have been multiplied.
        """
        smem = self.smem

        def multiply(acc: Any) -> Any:
            keys = smem.k_smem.at[slot]
            for term in range(self.plan.terms):
                query = smem.q_smem.at[self.buffer * self.plan.terms + term + zero(slot)]
                plgpu.wgmma(acc, query, keys.T)
            self._convert_values(slot, cursor)  # While the tensor cores are at work.
            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.plan.positions), jnp.float32))
        # The sums have been read, so wgmma is done with the keys; their scales are still needed.
        key_scales = load(smem.k_scales_smem.at[slot], plgpu.Layout.WGMMA.reduce(0))
        scores = scores * along(key_scales, scores, 1) * along(unit.query_scales, scores, 0)
        plgpu.commit_smem()  # All threads have read the scales.
        if isinstance(cursor, Cursor):
            self.walk.start(cursor, self.leads, ("k", "k_scales"))
        self._clear_unseen(unit, slot, first)
        return scores

    def _masked(self, scores: Any, unit: Unit, first: Any) -> Any:
        """Sets scores to -inf where a row does not see a position. Most steps need no mask."""
        full = first + BLOCK - 1 <= unit.place
        if self.plan.window:
            token = (unit.first_row + ROWS - 1) // self.plan.heads
            full &= first > unit.place + unit.stride * token - self.plan.window
        return lax.cond(
            full,
            lambda: scores,
            lambda: jnp.where(self._seen(unit, first), scores, -jnp.inf),
        )

    def _seen(self, unit: Unit, first: Any) -> Any:
        """Returns which rows see which positions, [64, positions]."""
        shape = (ROWS, self.plan.positions)
        own = unit.place + unit.stride * ((iota(shape, 0) + unit.first_row) // self.plan.heads)
        position = iota(shape, 1) + (first + self.position_start)
        seen = position <= own
        return seen & (position > own - self.plan.window) if self.plan.window else seen

    # -------------------------------------------------------------------------- mixing values
    def _of_other(self, vector: Any) -> Any:
        """Exchanges a vector [64] with the other warpgroup, and returns the vector received."""
        exchange = self.smem.exchange
        # One vector each is enough. Between two exchanges the warpgroups meet once more, in `_mix`
        # or at the next unit's queries, so that none overwrites what the other is about to read.
        exchange[self.me] = vector
        self._meet()
        return load(exchange.at[1 - self.me], plgpu.Layout.WGMMA.reduce(1))

    def _mix(self, mixed: Any, weights: Any, slot: Any) -> Any:
        """Returns mixed + weights @ values."""
        values = self._values(slot).at[:, self.columns]
        p: Any = weights
        if self.plan.split_values or not self.plan.p_in_registers:
            # Two that share rows have met over the maxima since the last product read it.
            p = self.smem.p_smem.at[pl.ds(self.buffer * ROWS, ROWS)]
            p[:, self.positions] = weights
            plgpu.commit_smem()
        # Each has the weights of half of the positions, and mixes all of them for its columns.
        if self.plan.split_values:
            self._meet()
        if self.plan.p_in_registers:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, p, values))(plgpu.ACC.init(mixed))

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, p, values)
            return acc[...]

        return mixed + pl.run_scoped(multiply, plgpu.ACC(mixed.shape, jnp.float32))

    def _write(self, unit: Unit, state: _State) -> None:
        """Writes the results of a unit, or of its piece in this range."""
        walk, total = self.walk, state.total
        if self.plan.split_values:
            total = total + self._of_other(total)
        blind = total == 0.0
        share = jnp.where(blind, jnp.zeros_like(total), 1.0 / (total * self.factor))
        mixed = state.mixed * along(share, state.mixed, 0)
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

        piece = piece_of(
            walk.index,
            unit.index,
            first=start >= walk.begin,
            units=walk.units,
            ranges=self.plan.ranges,
        )
        # A cond, not two writes in turn, which would keep converted values in registers for both.
        lax.cond(
            whole,
            lambda: write(out, lse, unit.index),
            lambda: write(out_pieces, lse_pieces, piece),
        )


def _filled(shape: tuple[int, ...], value: float) -> Any:
    layout = plgpu.Layout.WGMMA
    return plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), layout if len(shape) == 2 else layout.reduce(1)
    )
