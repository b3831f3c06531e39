"""Grouped products on TPU (Pallas, Mosaic).

Called by `api.py`, which has checked the arguments. Knows nothing of routing or of layers.

Rows are cut into tiles, and so are the columns of the weights. A *visit* is a pair of a group and a
row tile that contains some of its rows; XLA computes the list of visits, and the grid is (column
tiles, visits). Rows and outputs are pipelined by the grid; rows that are picked by their index may
be fetched by the kernel instead, a visit ahead (`mosaic_tpu_fetch.py`). Weights are streamed by the
kernel: one column tile of every non-empty group, in order, each read once however many row tiles
its group spans, and always one tile ahead of the products. A weight tile is waited for in pieces at
their first use, so the first product starts after one piece. A visit multiplies a few rows at a
time, and only rows of its group. A tile of padding rows has a visit too, which reads nothing and
writes zeros.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul import mosaic_tpu_fetch as fetch
from pallas_kernels.grouped_matmul.mosaic_tpu_formats import (
    factor_of,
    format_name,
    of_groups,
    same_format,
    with_scales_of,
)
from pallas_kernels.grouped_matmul.mosaic_tpu_pick import pick_rows
from pallas_kernels.grouped_matmul.mosaic_tpu_plan import (
    LANES,
    Pieces,
    Sizes,
    Visits,
    arrange_scales,
    arrange_zeros,
    plan_call,
    plan_visits,
)
from pallas_kernels.grouped_matmul.mosaic_tpu_product import (
    Blocks,
    product,
    store_quantised,
    store_whole_rows,
)
from pallas_kernels.grouped_matmul.mosaic_tpu_words import as_words
from pallas_kernels.grouped_matmul.reference import GroupedCall
from pallas_kernels.grouped_matmul.tile_list import when_known
from pallas_kernels.grouped_matmul.tiles import tpu_tiles
from pallas_kernels.quantize import (
    FOUR_BITS,
    Format,
    QuantArray,
    Words,
    quantize_rows,
    quantize_weight,
)
from pallas_kernels.quantize.product import ROW_BLOCK
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields
from pallas_kernels.varying import varying_shape

INTERPRET = pltpu.InterpretParams(detect_races=True)


def grouped_matmul(
    call: GroupedCall, target: Target, tiles: Fields | None
) -> Float[Array, "rows d_out"]:
    """Multiplies every row by the weights of its group."""
    rows, weights, sizes, row_format, narrow = call[:5]
    factor, as_floats = factor_of(rows, row_format, target, narrow), row_format == "float"
    return _grouped_products(
        factor, weights, sizes, rows.dtype, target, call.first, as_floats=as_floats, given=tiles
    )


def grouped_swiglu(
    call: GroupedCall, target: Target, tiles: Fields | None
) -> Float[Array, "picked d_out"]:
    """Runs rows through the SwiGLU network of their group: gate and up in one pass, then down."""
    rows, weights, group_sizes, row_format, narrow, source = call[:6]
    gate_weights, up_weights, down_weights = weights
    factor, as_floats = factor_of(rows, row_format, target, narrow), row_format == "float"
    products = partial(
        _grouped_products,
        group_sizes=group_sizes,
        target=target,
        first=call.first,
        as_floats=as_floats,
        zero_padding=False,
        given=tiles,
    )
    hidden: Any
    if same_format(gate_weights, up_weights):
        out_format = None if row_format == "float" else row_format
        narrow_rows = row_format is None and down_weights.dtype == jnp.int8
        pair = partial(products, factor, (gate_weights, up_weights), out_dtype=rows.dtype)
        hidden = pair(out_format=out_format, narrow_rows=narrow_rows, source=source)
    else:
        gate, up = (
            products(factor, (weights,), out_dtype=jnp.float32, source=source)
            for weights in (gate_weights, up_weights)
        )
        hidden = factor_of(_swiglu(gate, up), row_format, target)
        hidden = hidden if isinstance(hidden, QuantArray) else hidden.astype(rows.dtype)
    zero_padding = call.zero_padding
    return products(hidden, (down_weights,), out_dtype=rows.dtype, zero_padding=zero_padding)


class _Inputs(NamedTuple):
    """The kernel's inputs, as arrays outside and as refs inside.

    Attributes:
      visits: in SMEM.
      tables: in SMEM, for rows that the kernel fetches; else None.
      rows: [rows, d_in or more]; the ref [tile_rows, d_in]; of rows that are fetched, in HBM.
      row_scales: of rows in 8 bits: one array [rows, 1], or [rows, blocks of ROW_BLOCK]; the ref
        [tile_rows, _].
      weights: one or two arrays [groups or more, d_out, d_in], in HBM; `visits.stream` says which.
      scales: for each of them, if quantised, as `arrange_scales` gives them.
      zeros: of INT4 weights that have some, likewise.
    """

    visits: Visits
    tables: fetch.Tables | None
    rows: Any
    row_scales: tuple[Any, ...]
    weights: tuple[Any, ...]
    scales: tuple[Any, ...]
    zeros: tuple[Any, ...] = ()


class _Call(NamedTuple):
    """Compile-time constants of the kernel.

    Attributes:
      inputs: the structure of `_Inputs`.
      column_tiles: number of weight tiles of a group.
      blocks: layout of the scales.
      row_dtype: dtype of the rows, which the kernel may get as bits.
      scale_columns: columns of an 8-bit result that share a scale; 0: the result has no 8 bits.
      whole_rows: whether all columns of a row share a scale.
      in_words: of weights that are `Words`, the first entry of each.
    """

    plan: Sizes
    inputs: Any
    column_tiles: int
    blocks: Blocks
    row_dtype: Any
    scale_columns: int
    whole_rows: bool
    in_words: tuple[int, ...]


def _grouped_products(
    factor: Array | QuantArray,
    weights: tuple[Any, ...],
    group_sizes: Array | np.ndarray,
    out_dtype: DTypeLike,
    target: Target,
    first: Array | None = None,
    out_format: Format | None = None,
    narrow_rows: bool = False,
    as_floats: bool = False,
    source: Array | None = None,
    zero_padding: bool = True,
    given: Fields | None = None,
) -> Any:
    """Multiplies rows by one weight, or computes the SwiGLU of two weights of the same format.

    Args:
      factor: the rows, floats, or in 8 bits, with a scale for a row or for `ROW_BLOCK` columns;
        may have more columns than d_in.
      out_dtype: dtype of the result.
      first: group of the weights that the first of the sizes belongs to; None: the weights have no
        other groups.
      out_format: format of a result in 8 bits with such blocks, a `QuantArray`; None: floats.
      narrow_rows: the result is in INT8 with a scale a row, as the next product would quantise it,
        if rows are in 8 bits and a tile has all columns.
      as_floats: floats stay floats even for INT8 weights, which are then treated like FP8 ones.
      source: index of the rows to take; None: all.
      zero_padding: tiles of padding alone become zeros; else they are not written.
      given: tiles that a caller of the op set.
    """
    row_scales: tuple[Array, ...] = ()
    rows: Array
    if isinstance(factor, QuantArray):
        rows, row_scales = factor.values, (factor.scales,)
    else:
        rows = factor
    if not row_scales and rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"rows is {rows.dtype}, on TPU use bfloat16 or float32")
    count, (_, d_out, d_in) = (rows if source is None else source).shape[0], weights[0].shape
    if 0 in (count, d_out, rows.shape[0]):
        empty = jnp.zeros((count, d_out), out_dtype)
        return quantize_weight(empty, out_format, (1, ROW_BLOCK)) if out_format else empty
    if out_format:
        out_dtype = jnp.int8 if out_format == "int8" else jnp.float8_e4m3fn
    in_blocks = isinstance(factor, QuantArray) and factor.block[1] == ROW_BLOCK
    if weights[0].dtype == jnp.int8 and not row_scales and not as_floats:
        rows, scale_of_row = quantize_rows(rows, "int8")
        row_scales = (scale_of_row[:, None],)
    row_dtype = rows.dtype
    if rows.shape[1] > d_in:
        # Rows stay as they came: XLA would make a pass of a cut, or of another dtype.
        is_whole = d_in % LANES == 0
        rows = lax.bitcast_convert_type(rows, jnp.uint8) if is_whole else rows[:, :d_in]
    values: tuple[Any, ...] = tuple(w.values if isinstance(w, QuantArray) else w for w in weights)
    dtypes = tuple(jnp.dtype(array.dtype) for array in values)
    in_words: tuple[int, ...] = ()
    if isinstance(values[0], Words):
        in_words = tuple(w.first for w in values)
        values = tuple(w.words for w in values)
    # 4 bits in VMEM take a byte a value.
    column_bytes = d_in * dtypes[0].itemsize * len(values)
    if dtypes[0] in FOUR_BITS:
        column_bytes += sum(4 * s.size // (s.shape[0] * s.shape[1]) for s in of_groups(weights))
    if first is not None:
        weights = tuple(with_scales_of(w, first, group_sizes.shape[0]) for w in weights)
    quantised = [w for w in weights if isinstance(w, QuantArray)]
    scales = [arrange_scales(w) for w in quantised]
    zeros = tuple(arrange_zeros(w) for w in quantised if w.zeros is not None)
    by_column, block_in = scales[0][1:] if scales else (False, d_in)
    product_in = min(ROW_BLOCK, block_in) if in_blocks else block_in
    format = format_name(dtypes[0], row_dtype, in_blocks, product_in < d_in)
    widths = d_in, d_out
    tiles, steps = tpu_tiles(target.device_kind, len(weights), widths, format, given)
    sizes = (count, d_in), rows.dtype.itemsize, d_out, column_bytes, jnp.dtype(out_dtype).itemsize
    plan, tables = plan_call(tiles, steps, *sizes, given), None
    if source is not None:
        fetching = fetch.plan(target.device_kind, rows.shape[0], plan, tiles, steps, sizes, given)
        if fetching is None:
            rows = pick_rows(rows, source, jnp.sum(group_sizes, dtype=jnp.int32))
            row_scales = tuple(scales[source] for scales in row_scales)
        else:
            plan, (tables, row_scales) = fetching, fetch.tables(source, rows, row_scales)
    visits, visit_count = when_known(plan_visits, group_sizes, count, plan.tile_rows, zero_padding)
    if first is not None:
        visits = visits._replace(stream=visits.stream + first)
    held = as_words(rows) if target.interpret and tables is not None else rows
    inputs = _Inputs(
        visits, tables, held, row_scales, values, tuple(s.array for s in scales), zeros
    )
    leaves, structure = jax.tree.flatten(inputs)
    column_tiles, scale_columns = d_out // plan.tile_columns, ROW_BLOCK if out_format else 0
    whole_rows = []  # of a product, before they are in INT8
    if narrow_rows and column_tiles == 1 and rows.dtype.itemsize == 1:
        whole_rows = [pltpu.VMEM((plan.steps[0], d_out), out_dtype)]
        out_dtype, scale_columns = jnp.int8, d_out
    rows_block = _block(lambda n, v, visits: (visits.rows_tile[v], 0))
    scales_block = _block(lambda n, v, visits: (visits.group[v], n, 0, 0))
    out_specs = [
        pl.BlockSpec(
            (plan.tile_rows, plan.tile_columns), _block(lambda n, v, visits: (visits.tile[v], n))
        )
    ]
    out_shape = [varying_shape((count, d_out), out_dtype, leaves)]
    if scale_columns:
        # A tile's scales together, as a block has to have all of the last axis.
        units = pl.cdiv(plan.tile_columns, scale_columns)
        place = _block(lambda n, v, visits: (n, visits.tile[v], 0))
        out_specs.append(pl.BlockSpec((1, plan.tile_rows, units), place))
        out_shape.append(varying_shape((column_tiles, count, units), jnp.float32, leaves))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    blocks = Blocks(by_column, block_in, product_in)
    call = _Call(
        plan, structure, column_tiles, blocks, row_dtype, scale_columns, bool(whole_rows), in_words
    )
    out, *out_scales = pl.pallas_call(
        partial(_kernel, call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(jax.tree.leaves((visits, tables))),
            grid=(
                column_tiles,
                visit_count if isinstance(visit_count, Array) else int(visit_count),
            ),
            in_specs=[
                in_hbm if tables is not None else pl.BlockSpec((plan.tile_rows, d_in), rows_block),
                *[pl.BlockSpec((plan.tile_rows, s.shape[1]), rows_block) for s in row_scales],
                *[in_hbm] * len(values),
                *[
                    pl.BlockSpec(
                        (1, array.shape[1] // column_tiles, *array.shape[2:]), scales_block
                    )
                    for array in (*inputs.scales, *inputs.zeros)
                ],
            ],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.SemaphoreType.DMA((2, sum(pieces.number for pieces in plan.pieces))),
                *[pltpu.VMEM((2, plan.tile_columns, d_in), dtype) for dtype in dtypes],
                *whole_rows,
                *(fetch.buffers(plan.tile_rows, d_in, row_dtype) if tables is not None else ()),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=plan.vmem_bytes,
            disable_bounds_checks=tables is not None,  # indices are clipped
        ),
        interpret=INTERPRET if target.interpret else False,
        name="grouped_swiglu" if len(values) == 2 else "grouped_matmul",
    )(*leaves)
    if not scale_columns:
        return out
    block = (1, 0 if whole_rows else ROW_BLOCK)
    return QuantArray(out, jnp.swapaxes(out_scales[0], 0, 1).reshape(count, -1), block)


def _kernel(call: _Call, *refs: Any) -> None:
    """Runs one visit for one tile of columns."""
    plan, inputs = call.plan, jax.tree.unflatten(call.inputs, refs[: call.inputs.num_leaves])
    out, *others = refs[call.inputs.num_leaves :]
    out_scales = others.pop(0) if call.scale_columns else None
    semaphores, *others = others
    buffers, others = others[: len(inputs.weights)], others[len(inputs.weights) :]
    whole_rows = others.pop(0) if call.whole_rows else None
    # out: [tile_rows, tile_columns]; out_scales: [1, tile_rows, columns / scale_columns];
    # buffers: [2, tile_columns, d_in] for each weight; whole_rows: [steps[0], tile_columns];
    # others: `fetch.Buffers`, if rows are
    visits = inputs.visits
    n, v = pl.program_id(0), pl.program_id(1)
    before = jnp.maximum(v - 1, 0)
    new_tile = (v == 0) | (visits.tile[v] != visits.tile[before])
    new_weights = (v == 0) | (visits.rank[v] != visits.rank[before])
    groups = visits.groups[0]
    position = n * groups + visits.rank[v]  # in the stream of weights

    def copies(position: Any, piece: Any, place: Any) -> list[Any]:
        """The copies of one piece, columns `place` of the tile at a position of the stream."""
        group, slot = visits.stream[position % groups], position % 2
        column = place.start
        if call.column_tiles > 1:
            column += (position // groups) * plan.tile_columns
        if plan.tile_columns % LANES == 0:
            column = pl.multiple_of(column, LANES)
        return [
            pltpu.make_async_copy(
                (weight.bitcast(buffer.dtype) if call.in_words else weight).at[
                    group + first, pl.ds(column, place.size)
                ],
                buffer.at[slot, place],
                semaphores.at[slot, piece],
            )
            for weight, buffer, first in zip(
                inputs.weights, buffers, call.in_words or [0] * len(buffers), strict=True
            )
        ]

    def for_pieces(function: Callable[[Any, Any], None]) -> None:
        """Call `function(number of the piece, its columns)` for all pieces of a tile."""
        for pieces in plan.pieces:
            if pieces.number == 1:  # a column known here is aligned, whatever the width
                function(pieces.first, pl.ds(pieces.column, pieces.columns))
                continue

            def call_it(index: Any, _: None, pieces: Pieces = pieces) -> None:
                column = pieces.column + index * pieces.columns
                if pieces.columns % LANES == 0:
                    column = pl.multiple_of(column, LANES)
                function(pieces.first + index, pl.ds(column, pieces.columns))

            lax.fori_loop(0, pieces.number, call_it, None)

    def start(position: Any) -> None:
        def start_piece(piece: Any, place: Any) -> None:
            for copy in copies(position, piece, place):
                copy.start()

        for_pieces(start_piece)

    rows: Any = inputs.rows
    fetched_scales: list[Any] = []
    if inputs.tables is not None:
        arriving = fetch.Buffers(*others)
        fetch.start_next(inputs.tables, rows, arriving, visits, call.column_tiles)

    # Weights are double-buffered: load the very first tile, then always the next one ahead. Its
    # buffer is that of the tile before this one, whose visits are all over: a group's follow each
    # other, and the grid runs in order.
    pl.when((n == 0) & (v == 0) & (groups > 0))(lambda: start(position))
    pl.when(new_weights & (position + 1 < call.column_tiles * groups))(lambda: start(position + 1))

    @pl.when(new_tile)
    def zero() -> None:
        out[...] = jnp.zeros_like(out)
        if out_scales is not None:
            out_scales[...] = jnp.ones_like(out_scales)

    first, end = visits.start[v], visits.end[v]
    if inputs.tables is not None:
        rows, fetched_scales = fetch.finish(inputs.tables, arriving, first, end)
    aligned = first // plan.alignment * plan.alignment

    def step(place: Any, step_rows: int) -> None:
        """Multiply the rows from `place` on, without touching output rows of other groups."""
        row = jnp.minimum(place, plan.tile_rows - step_rows)
        part = pl.ds(pl.multiple_of(row, plan.alignment), step_rows)
        number = row + lax.broadcasted_iota(jnp.int32, (step_rows, 1), 0)
        owned = (number >= first) & (number < end)

        def multiply(piece: Any, columns: Any) -> None:
            # Once a piece, by the first step that needs it. The stream has only groups with rows,
            # so such a step exists: a copy that nothing waits for would end a later wait early, and
            # a second wait would never end.
            pl.when(new_weights & (place == aligned))(
                lambda: wait(copies(position, piece, columns))
            )
            # All columns of a width that is no multiple of `LANES` are one unit (`arrange_scales`).
            whole = plan.tile_columns % LANES == 0
            units = pl.ds(columns.start // LANES, columns.size // LANES if whole else 1)
            products = [
                product(
                    call.blocks,
                    rows.at[part],
                    call.row_dtype,
                    buffer.at[position % 2, columns],
                    *(scales.at[0, units] for scales in inputs.scales[i : i + 1]),
                    *(zeros.at[0, units] for zeros in inputs.zeros[i : i + 1]),
                    row_scales=[
                        *(scales[part, :] for scales in inputs.row_scales),
                        *(scales[part, :][:, :1] for scales in fetched_scales),
                    ],
                )
                for i, buffer in enumerate(buffers)
            ]
            result = _swiglu(*products) if len(products) == 2 else products[0]
            if whole_rows is not None:
                whole_rows[pl.ds(0, step_rows), columns] = result.astype(whole_rows.dtype)
            elif out_scales is not None:
                store_quantised(result, owned, out, out_scales, part, columns, ROW_BLOCK)
            else:
                out[part, columns] = jnp.where(owned, result.astype(out.dtype), out[part, columns])

        for_pieces(multiply)
        if whole_rows is not None:
            store_whole_rows(whole_rows, (first, end), out, out_scales, row, step_rows)

    place = aligned
    for step_rows in plan.steps:
        left = jnp.where(first < end, end - place, 0)
        last = step_rows == plan.steps[-1]
        steps = pl.cdiv(left, step_rows) if last else left // step_rows
        lax.fori_loop(
            0, steps, lambda i, _, at=place, rows=step_rows: step(at + i * rows, rows), None
        )
        place += steps * step_rows


def wait(copies: list[Any]) -> None:
    """Waits for copies into VMEM. A test replaces it to see that a missing wait is noticed."""
    for copy in copies:
        copy.wait()


def _swiglu(gate: Array, up: Array) -> Array:
    return gate * (1 / (1 + jnp.exp(-gate))) * up


def _block(index: Callable[[Any, Any, Visits], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """An index map of the grid's indices (tile of columns, visit) and the visits."""
    return lambda n, v, *scalars: index(n, v, Visits(*scalars[: len(Visits._fields)]))
