"""The Triton kernels of paged attention for GPUs before Hopper: one sums over ranges, one merges.

Called by `triton_gpu.py`, which lays the queries out; `ranges.py` says what units, steps, ranges
and lanes are. Knows nothing of tokens or batches.

A block of threads walks over one range and reads only positions that some row of its unit sees, row
by row of the pages, whatever their size. Triton's tiles are powers of two wide. Other widths are
cut into such columns (576 is 512 and 64).

Pages in 8 bits are widened to float16 in registers, exactly, by integer arithmetic that every
generation has. Scales of keys multiply scores. Scales of values multiply probabilities, over the
largest of the block, so that products stay in float16's range.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.ranges import (
    Cut,
    Work,
    piece_of,
    pieces,
    range_begin,
    range_of,
)
from pallas_kernels.attention.reference import Cache

LOG2_E = math.log2(math.e)
UNSEEN = -1e30
"""Initial running maximum of a row; finite, to avoid inf − inf."""
FP8_FACTOR = 256.0
"""The bits of an E4M3 number, moved to float16's places, are the number divided by this."""
INT8_BIAS = 1536.0
"""A float16 whose last bit is worth 1, like that of all numbers within 512 of this one."""
INT8_BIAS_BITS = 0x6600
COMBINED_ROWS = 16
"""Rows of a unit whose partial results a block of threads adds up."""
SMALLEST = 1e-30
"""Below all scales: avoids 0 / 0 where no position is seen."""


class Sizes(NamedTuple):
    """Compile-time sizes of the kernels.

    Attributes:
      cut: how the batch is cut.
      scale: factor of the scores.
      v_width: columns of the values; without pages of values they are the first ones of the keys.
      warps, stages: warps of a block of threads, and steps whose copies are under way at a time.
    """

    cut: Cut
    scale: float
    v_width: int
    warps: int
    stages: int


class _State(NamedTuple):
    """Sums carried from one step of a unit to the next."""

    largest: Any  # of the scores so far, times log2(e), [rows]
    total: Any  # sum of exp2(score - largest), [rows]
    mixed: tuple[Any, ...]  # sums of exp2(score - largest) * value, each [rows, columns]


def columns_of(width: int) -> list[tuple[int, int]]:
    """Returns first column and number of columns of parts that are powers of two."""
    parts, start = [], 0
    while start < width:
        size = 1 << ((width - start).bit_length() - 1)
        parts.append((start, size))
        start += size
    return parts


def attend(
    queries: Float[Array, "units lanes rows head_dim"],
    cache: Cache,
    page_table: Int32[Array, "sequences pages_per_sequence"],
    work: Work,
    sizes: Sizes,
    *,
    out_dtype: Any,
    interpret: bool,
) -> tuple[Array, Array, Array, Array]:
    """Runs the first kernel.

    Returns:
      for units that lie in one range, outputs [units, lanes, rows, v_width] and logs of the sums of
      exponentials [units, lanes, rows]; other units' entries are undefined. For the others, pieces
      of both, [pieces, lanes, rows, ...], at the indices that `piece_of` gives; pieces of outputs
      have 16 bits if the output has.
    """
    units, lanes, rows, _ = queries.shape
    count = pieces(units, sizes.cut.ranges)
    place = cache.k_pages.shape[:3]
    # All rows of the pool, one after the other: their index is a page, a head and a row.
    present = {name: array.reshape(-1, *array.shape[3:]) for name, array in cache.arrays().items()}
    inputs = (queries, page_table, *work, *present.values())
    shape, of_pieces = (units, lanes, rows), (count, lanes, rows)
    results = [
        jax.ShapeDtypeStruct((*shape, sizes.v_width), out_dtype),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((*of_pieces, sizes.v_width), out_dtype),
        jax.ShapeDtypeStruct(of_pieces, jnp.float32),
    ]
    return pl.pallas_call(
        functools.partial(_attend, sizes=sizes, names=tuple(present), place=place),
        name="paged_attention",
        # Lanes first: those of a range run at the same time, and read its pages from memory once.
        grid=(lanes, sizes.cut.ranges),
        in_specs=[_whole(array.shape) for array in inputs],
        out_specs=[_whole(result.shape) for result in results],
        out_shape=results,
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
    )(*inputs)


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Returns the spec by which every block of threads gets the whole array, to index it."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _attend(
    queries: Any,  # [units, lanes, rows, head_dim]
    page_table: Any,  # [sequences, pages_per_sequence]
    *refs: Any,
    sizes: Sizes,
    names: tuple[str, ...],
    place: tuple[int, ...],
) -> None:
    """Runs one block of threads: a lane of all units of a range."""
    work = Work(*refs[: len(Work._fields)])
    refs = refs[len(Work._fields) :]
    pages, outputs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    cut = sizes.cut
    lane, index = pl.program_id(0), pl.program_id(1)
    units = work.start.shape[0] - 1
    total = work.start[units]
    begin = range_begin(index, total, cut.ranges)
    finish = range_begin(index + 1, total, cut.ranges)

    def attend_unit(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        unit, step = carry
        end = jnp.minimum(work.start[unit + 1], finish)
        block = _Block(sizes, queries, page_table, work, pages, unit, lane, place)
        state = lax.fori_loop(step, end, block.step, block.nothing())
        blind = state.total == 0.0
        total_or_one = jnp.where(blind, 1.0, state.total)
        log_sum = (state.largest + jnp.log2(total_or_one)) * (1.0 / LOG2_E)
        log_sum = jnp.where(blind, -jnp.inf, log_sum)

        def write(out: Any, lse: Any, where: Any) -> None:
            for part, mixed in zip(columns_of(sizes.v_width), state.mixed, strict=True):
                rows = mixed * (1.0 / total_or_one)[:, None]
                out[where, lane, :, pl.ds(*part)] = rows.astype(out.dtype)
            lse[where, lane, :] = log_sum

        begins = work.start[unit] >= begin
        whole = begins & (work.start[unit + 1] <= finish)
        piece = piece_of(index, unit, first=begins, units=units, ranges=cut.ranges)
        out, lse, out_pieces, lse_pieces = outputs
        pl.when(whole)(lambda: write(out, lse, unit))
        pl.when(jnp.logical_not(whole))(lambda: write(out_pieces, lse_pieces, piece))
        return unit + 1, end

    first_unit = work.first_unit[index]
    lax.while_loop(lambda carry: carry[1] < finish, attend_unit, (first_unit, begin))


class _Block:
    """A lane of one unit; every member is traced into the kernel."""

    def __init__(
        self,
        sizes: Sizes,
        queries: Any,
        page_table: Any,
        work: Work,
        pages: dict[str, Any],
        unit: Any,
        lane: Any,
        place: tuple[int, ...],
    ) -> None:
        """`place` is the number of pages, of heads, and of rows of a page."""
        cut = sizes.cut
        self.pool, self.kv_heads, self.page_size = place
        self.sizes, self.pages, self.page_table = sizes, pages, page_table
        item, self.head = lax.div(unit, self.kv_heads), lax.rem(unit, self.kv_heads)
        self.sequence = jnp.clip(work.sequence[item], 0, page_table.shape[0] - 1)
        self.last, first, stride = work.last[item], work.place[item], work.stride[item]
        self.shift = work.first_block[item] - work.start[unit]
        row = lax.iota(jnp.int32, cut.lane_rows) + lane * cut.lane_rows
        self.own = first + stride * lax.div(row, cut.heads)  # [rows]
        self.window_start = first - cut.window + 1 if cut.window else 0
        parts = columns_of(queries.shape[3])
        self.queries = [queries[unit, lane, :, pl.ds(*part)] for part in parts]

    def nothing(self) -> _State:
        """Returns the sums over no position."""
        rows = self.sizes.cut.lane_rows
        return _State(
            jnp.full((rows,), UNSEEN, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            tuple(
                jnp.zeros((rows, width), jnp.float32) for _, width in columns_of(self.sizes.v_width)
            ),
        )

    def step(self, step: Any, state: _State) -> _State:
        """Adds the positions of a step."""
        cut, table = self.sizes.cut, self.page_table
        position = lax.iota(jnp.int32, cut.block) + (step + self.shift) * cut.block  # [block]
        needed = (position <= self.last) & (position >= self.window_start)
        column = jnp.minimum(lax.div(position, self.page_size), table.shape[1] - 1)
        page = plgpu.load(table.at[self.sequence, column], mask=needed, other=0)
        page = jnp.clip(page, 0, self.pool - 1)
        row = (page * self.kv_heads + self.head) * self.page_size
        row = row + lax.rem(position, self.page_size)

        def load(name: str, part: tuple[int, int]) -> Any:
            first, width = part
            ref = self.pages[name].at[row[:, None], first + lax.iota(jnp.int32, width)[None, :]]
            return _widened(plgpu.load(ref, mask=needed[:, None], other=0))

        def load_scales(name: str) -> Any:
            return plgpu.load(self.pages[name].at[row], mask=needed, other=0.0)

        keys = [load("k", part) for part in columns_of(self.pages["k"].shape[1])]
        products = zip(self.queries, keys, strict=True)
        scores = sum(_product(query, key, 1) for query, key in products)
        factor = self.sizes.scale * LOG2_E * _factor(self.pages["k"].dtype)
        if "k_scales" in self.pages:
            scales = load_scales("k_scales")
            scores = scores * (scales * factor)[None, :]
        else:
            scores = scores * factor
        seen = position[None, :] <= self.own[:, None]
        if cut.window:
            seen &= position[None, :] > self.own[:, None] - cut.window
        scores = jnp.where(seen, scores, -jnp.inf)
        largest = jnp.maximum(state.largest, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - largest[:, None])
        shrink = jnp.exp2(state.largest - largest)
        total = state.total * shrink + jnp.sum(weights, axis=1)

        unit = jnp.float32(_factor(self.pages["k"].dtype))
        if "k_scales" in self.pages:
            if "v_scales" in self.pages:
                scales = load_scales("v_scales")
            most = jnp.maximum(jnp.max(scales), SMALLEST)
            weights = weights * (scales / most)[None, :]
            unit = unit * most
        parts = columns_of(self.sizes.v_width)
        values = [load("v", part) for part in parts] if "v" in self.pages else keys
        p = weights.astype(values[0].dtype)
        mixed = tuple(
            before * shrink[:, None] + _product(p, some, 0) * unit
            for before, some in zip(state.mixed, values, strict=False)
        )
        return _State(largest, total, mixed)


def _product(a: Any, b: Any, summed: int) -> Any:
    """Returns the sums, in FP32, over the columns of `a` and an axis of `b`."""
    axes = (((1,), (summed,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _widened(rows: Any) -> Any:
    """Returns rows as they are multiplied: INT8 in float16, bits of E4M3 in float16 over 256.

    NaN in E4M3 become finite numbers. Positions that no row sees are 0 before.
    """
    if rows.dtype == jnp.int8:
        bits = rows.astype(jnp.int16) + jnp.int16(INT8_BIAS_BITS)
        return lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(INT8_BIAS)
    if rows.dtype == jnp.uint8:
        wide = lax.bitcast_convert_type(rows, jnp.int8).astype(jnp.int16)
        # The sign is copied to the bit that is cleared.
        bits = jnp.left_shift(wide, jnp.int16(7)) & jnp.int16(-0x4001)
        return lax.bitcast_convert_type(bits, jnp.float16)
    return rows


def _factor(dtype: Any) -> float:
    return FP8_FACTOR if dtype == jnp.uint8 else 1.0


def combine(
    out: Float[Array, "units lanes rows v_width"],
    lse: Float32[Array, "units lanes rows"],
    out_pieces: Float[Array, "pieces lanes rows v_width"],
    lse_pieces: Float32[Array, "pieces lanes rows"],
    start: Int32[Array, " units_and_end"],
    cut: Cut,
    *,
    interpret: bool,
) -> tuple[Float[Array, "units lanes rows v_width"], Float32[Array, "units lanes rows"]]:
    """Runs the second kernel: adds up the pieces of units that lie in several ranges, in place."""
    units, lanes, rows, _ = out.shape
    tile = min(COMBINED_ROWS, rows)
    inputs = (out, lse, out_pieces, lse_pieces, start)
    return pl.pallas_call(
        functools.partial(_combine, cut=cut, tile=tile),
        name="paged_attention_combine",
        grid=(units, lanes, rows // tile),
        in_specs=[_whole(array.shape) for array in inputs],
        out_specs=[_whole(out.shape), _whole(lse.shape)],
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (out, lse)],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*inputs)


def _combine(
    _out: Any,
    _lse: Any,
    out_pieces: Any,  # [pieces, lanes, rows, v_width]
    lse_pieces: Any,  # [pieces, lanes, rows]
    start: Any,  # [units + 1]
    out: Any,  # [units, lanes, rows, v_width]
    lse: Any,  # [units, lanes, rows]
    *,
    cut: Cut,
    tile: int,
) -> None:
    """Runs one block of threads: some rows of a unit."""
    unit, lane, units = pl.program_id(0), pl.program_id(1), start.shape[0] - 1
    rows = pl.ds(pl.program_id(2) * tile, tile)
    begin, end, total = start[unit], start[unit + 1], start[units]
    first = range_of(begin, total, cut.ranges)
    last = range_of(end - 1, total, cut.ranges)
    parts = columns_of(out.shape[3])

    def add(range_: Any, state: _State) -> _State:
        piece = piece_of(range_, unit, first=range_ == first, units=units, ranges=cut.ranges)
        # A piece in which a row saw nothing has -inf; the difference of two of them is NaN.
        log_sum = jnp.maximum(lse_pieces[piece, lane, rows], UNSEEN)
        largest = jnp.maximum(state.largest, log_sum)
        shrink, weight = jnp.exp(state.largest - largest), jnp.exp(log_sum - largest)

        def sums(before: Any, part: tuple[int, int]) -> Any:
            values = out_pieces[piece, lane, rows, pl.ds(*part)].astype(jnp.float32)
            return before * shrink[:, None] + values * weight[:, None]

        mixed = tuple(map(sums, state.mixed, parts))
        return _State(largest, state.total * shrink + weight, mixed)

    @pl.when(first < last)
    def _() -> None:
        nothing = _State(
            jnp.full((tile,), UNSEEN, jnp.float32),
            jnp.zeros((tile,), jnp.float32),
            tuple(jnp.zeros((tile, width), jnp.float32) for _, width in parts),
        )
        state = lax.fori_loop(first, last + 1, add, nothing)
        share = 1.0 / state.total
        for part, mixed in zip(parts, state.mixed, strict=True):
            out[unit, lane, rows, pl.ds(*part)] = (mixed * share[:, None]).astype(out.dtype)
        blind = state.largest == UNSEEN
        lse[unit, lane, rows] = jnp.where(blind, -jnp.inf, state.largest + jnp.log(state.total))
