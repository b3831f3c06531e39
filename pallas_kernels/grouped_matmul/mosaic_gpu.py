"""Grouped products on Hopper GPUs (Pallas, Mosaic GPU): picks tiles and prepares operands.

Called by `api.py`, which has checked the arguments. The kernel of products is in
`mosaic_gpu_kernel.py`. Another one, here, picks the rows of groups: only the device knows how many
of the rows in the buffer belong to a group, and XLA's gather would copy all.

Operands of wgmma, by the format of the weights (without a `row_format`):
  floats: BF16 or FP16 rows and weights, as they are.
  INT8: rows quantised to INT8, one scale a row (`quantize_rows`), int32 sums. With the `row_format`
    "float", values are converted to the dtype of the rows, BF16 or FP16.
  FP8: Hopper converts e4m3 to FP16 at full rate and to BF16 not at all, so rows are FP16 too. Each
    BF16 row is first multiplied by a power of two that makes its values fit. The loss is below
    2^-38 of the row's largest magnitude.

With the `row_format` "fp8" or "int8", rows and weights both have 8 bits, and nothing is converted.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.grouped_matmul.mosaic_gpu_kernel import grouped_product
from pallas_kernels.grouped_matmul.mosaic_gpu_tiles import (
    WeightArray,
    inner_of,
    is_per_channel,
    pick_tiles,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    SPARE_SCALES,
    Epilogue,
    Operands,
    Tiles,
    quantises,
)
from pallas_kernels.grouped_matmul.reference import GroupedCall
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS, list_tiles, running_sum, when_known
from pallas_kernels.grouped_matmul.tiles import Kind
from pallas_kernels.mosaic_gpu import WARPGROUP, interpreter, load, processors, store, strided
from pallas_kernels.quantize import (
    FOUR_BITS,
    QuantArray,
    from_bits,
    quantize_rows,
    quantize_weight,
)
from pallas_kernels.quantize.product import ROW_BLOCK
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields

BLOCKS = 8
"""Thread blocks of a multiprocessor: each copies one row at a time, and waits for it."""


class Picked(NamedTuple):
    """Rows that a product takes.

    Attributes:
      source: an index for every row of the result; negative ones count from the end.
      ends: where the groups' rows end; the rows after the last group do not exist.
    """

    source: Int32[Array, " picked"]
    ends: Int32[Array, " groups"]
    target: Target


def pick_rows(
    rows: Shaped[Array, "rows columns"], picked: Picked, d: int | None = None
) -> Shaped[Array, "picked d"]:
    """Returns the rows at `picked.source`; rows behind the last group are undefined.

    Args:
      d: number of leading columns to copy; None: all.
    """
    (source, ends, target), d = picked, d or rows.shape[1]
    if d % WARPGROUP:
        return rows[source, :d]
    kernel = plgpu.kernel(
        _body,
        kernel_name="pick_rows",
        out_type=jax.ShapeDtypeStruct((len(source), d), rows.dtype),
        grid=(BLOCKS * processors(target),),
        grid_names=("block",),
        interpret=interpreter(target),
    )
    return kernel(rows, source, ends)


def _body(
    rows: Any,  # [rows, columns]
    source: Any,  # [picked]
    ends: Any,  # [groups]
    output: Any,  # [picked, d]
) -> None:
    """Copies every `blocks`-th row, starting at this block's number."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    d = output.shape[1]
    layout = strided(d, most=16 // rows.dtype.itemsize)  # 16 bytes
    count, last = ends[ends.shape[0] - 1], rows.shape[0] - 1

    def copy(round_: jax.Array, _: None) -> None:
        row = round_ * blocks + block
        index = source[row]
        index = jnp.minimum(jnp.maximum(jnp.where(index < 0, index + last + 1, index), 0), last)
        store(output.at[row], load(rows.at[index, pl.ds(0, d)], layout))

    lax.fori_loop(0, lax.div(count - block + blocks - 1, blocks), copy, None)


OUT_MULTIPLE = 64  # of d_out, d_in: blocks of TMA copies


class RowsInBlocks(NamedTuple):
    """Rows in 8 bits, with a scale for every block of columns.

    Attributes:
      values: [rows, d_in].
      scales: FP32 [d_in / ROW_BLOCK, rows + SPARE_SCALES].
    """

    values: Array
    scales: Array


def grouped_matmul(
    call: GroupedCall, target: Target, tiles: Fields | None
) -> Float[Array, "rows d_out"]:
    """Multiplies every row by the weights of its group, for a call in which `gap` finds nothing."""
    rows, weights, sizes, row_format, narrow = call[:5]
    if rows.shape[0] == 0:
        return jnp.zeros((0, weights[0].shape[1]), rows.dtype)
    operand, _ = _whole_blocks(rows, row_format, narrow=narrow)
    found = _product(
        operand,
        weights,
        sizes,
        rows.dtype,
        target,
        as_floats=row_format == "float",
        given=tiles,
        one_group=isinstance(sizes, np.ndarray) and sizes.tolist() == [rows.shape[0]],
    )
    return found[0][: rows.shape[0]]


def grouped_swiglu(
    call: GroupedCall, target: Target, tiles: Fields | None
) -> Float[Array, "picked d_out"]:
    """Runs every row through the SwiGLU network of its group: gate and up in one pass, then down.
    For calls in which `gap` finds nothing."""
    rows, weights, group_sizes, row_format, narrow, source = call[:6]
    *gate_and_up, down_weights = weights
    count = (rows if source is None else source).shape[0]
    if 0 in (count, rows.shape[0]):
        return jnp.zeros((count, down_weights.shape[1]), rows.dtype)
    picked = (
        None if source is None else Picked(source, running_sum(jnp.asarray(group_sizes)), target)
    )
    operand, later = _whole_blocks(rows, row_format, picked, narrow)
    hidden_dtype = operand.values.dtype if isinstance(operand, RowsInBlocks) else rows.dtype
    product = functools.partial(
        _product,
        group_sizes=group_sizes,
        target=target,
        as_floats=row_format == "float",
        average=call.average,
        given=tiles,
    )
    hidden = product(
        operand,
        tuple(gate_and_up),
        out_dtype=hidden_dtype,
        epilogue=_swiglu,
        picked=later,
        zero_padding=False,
    )
    between = RowsInBlocks(*hidden) if isinstance(operand, RowsInBlocks) else hidden[0]
    zero_padding = call.zero_padding
    out = product(between, (down_weights,), out_dtype=rows.dtype, zero_padding=zero_padding)
    return out[0][:count]


def hidden_in_blocks(
    rows: QuantArray, gate_weights: WeightArray, up_weights: WeightArray, target: Target
) -> RowsInBlocks:
    """First of two steps of one SwiGLU network with FP8 weights: returns the hidden rows, the input
    of `down_of_blocks`, in FP8 blocks.

    Args:
      rows: FP8, one scale a row; a multiple of `BLOCK_ROWS`. Values may be the first columns of a
        wider array.
    """
    spread = jnp.broadcast_to(
        rows.scales, (rows.values.shape[0], gate_weights.shape[2] // ROW_BLOCK)
    )
    scales = jnp.pad(spread.T, ((0, 0), (0, SPARE_SCALES)))
    operand = RowsInBlocks(from_bits(rows.values), scales)
    gate_and_up = gate_weights, up_weights
    return RowsInBlocks(*_of_one_group(operand, gate_and_up, operand.values.dtype, target, _swiglu))


def down_of_blocks(
    hidden: RowsInBlocks, down_weights: WeightArray, out_dtype: DTypeLike, target: Target
) -> Float[Array, "rows d_out"]:
    """Second step after `hidden_in_blocks`: multiplies the hidden rows by the down weights."""
    return _of_one_group(hidden, (down_weights,), out_dtype, target)[0]


def _of_one_group(
    rows: RowsInBlocks, weights: tuple[WeightArray, ...], *options: Any
) -> tuple[Array, ...]:
    size = np.asarray([rows.values.shape[0]], np.int32)
    return _product(rows, weights, size, *options, zero_padding=False, one_group=True)


def _whole_blocks(
    rows: Float[Array, "rows d_in"],
    row_format: str | None,
    picked: Picked | None = None,
    narrow: QuantArray | None = None,
) -> tuple[Array | RowsInBlocks, Picked | None]:
    """Returns rows in the format of the products, padded to whole blocks of `BLOCK_ROWS`, and the
    picking that is still to be done (None: the rows are picked already).

    Args:
      narrow: rows in this format, if they were received in it; maybe with more columns.
    """
    if picked is not None:
        missing = -picked.source.shape[0] % BLOCK_ROWS
        picked = picked._replace(source=jnp.pad(picked.source, (0, missing)))
    elif missing := -rows.shape[0] % BLOCK_ROWS:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
    if row_format in (None, "float"):
        return rows, picked
    blocks = rows.shape[1] // ROW_BLOCK
    if narrow is not None:
        filling = ((0, rows.shape[0] - narrow.values.shape[0]), (0, 0))
        spread = jnp.broadcast_to(jnp.pad(narrow.scales, filling), (rows.shape[0], blocks))
        quantised = QuantArray(jnp.pad(narrow.values, filling), spread, (1, ROW_BLOCK))
    else:
        quantised = quantize_weight(rows, "int8" if row_format == "int8" else "fp8", (1, ROW_BLOCK))
    values, scales = _rows_of(quantised.values, picked, rows.shape[1]), quantised.scales
    scales = scales if picked is None else scales[picked.source]
    return RowsInBlocks(values, jnp.pad(scales.T, ((0, 0), (0, SPARE_SCALES)))), None


def _rows_of(rows: Array, picked: Picked | None, d: int | None = None) -> Array:
    return rows if picked is None else pick_rows(rows, picked, d)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1.0 + jnp.exp(-gate)) * up


def _format(weights: WeightArray) -> Any:
    return (weights.dtype, weights.block) if isinstance(weights, QuantArray) else weights.dtype


def gap(row_dtype: DTypeLike, weights: Sequence[WeightArray], row_format: str | None = None) -> str:
    """Returns the property of a product, or of a SwiGLU network (gate, up, down), that the kernels
    do not cover; empty: none."""
    if row_dtype not in (jnp.bfloat16, jnp.float16):
        return f"rows in {jnp.dtype(row_dtype)} (there are some for 16 bits)"
    if len(weights) > 1 and _format(weights[0]) != _format(weights[1]):
        return "gate and up in different formats"
    return next(filter(None, (_gap(array, row_format) for array in weights)), "")


def _gap(weights: WeightArray, row_format: str | None) -> str:
    d_out, d_in = weights.shape[1:]
    if weights.dtype in FOUR_BITS:
        return f"{'INT4' if weights.dtype == jnp.int4 else 'MXFP4'} weights"
    if d_out % OUT_MULTIPLE or d_in % OUT_MULTIPLE:
        return f"weights [{d_out}, {d_in}] (multiples of {OUT_MULTIPLE})"
    if row_format in ("fp8", "int8") and d_in % ROW_BLOCK:
        return f"rows of {d_in} in blocks (multiples of {ROW_BLOCK})"
    if not isinstance(weights, QuantArray) or is_per_channel(weights):
        return ""
    block_out, block_in = weights.block
    if block_out % OUT_MULTIPLE or block_in % inner_of(weights):
        return f"scales of blocks of {block_out} x {block_in}"
    return ""


def _product(
    rows: Array | RowsInBlocks,
    weights: tuple[WeightArray, ...],
    group_sizes: Int32[Array | np.ndarray, " groups"],
    out_dtype: DTypeLike,
    target: Target,
    epilogue: Epilogue = lambda product: product,
    *,
    as_floats: bool = False,
    picked: Picked | None = None,
    zero_padding: bool = True,
    average: int | None = None,
    given: Fields | None = None,
    one_group: bool = False,
) -> tuple[Array, ...]:
    """Runs the kernel: `epilogue` of the products with all weights, which share one format.

    Args:
      as_floats: multiply in floats even with INT8 weights.
      picked: which rows to take, if `rows` is no `RowsInBlocks`; None: all.
      zero_padding: whether padding rows become zeros; otherwise they are not written.
      average, given, one_group: see `pick_tiles`; rows that fill up a block belong to no group.

    Returns:
      the results of `grouped_product`.
    """
    all_rows = rows.values if isinstance(rows, RowsInBlocks) else rows
    count = (all_rows if picked is None else picked.source).shape[0]
    kind = kind_of(weights[0], in_blocks=isinstance(rows, RowsInBlocks), as_floats=as_floats)
    quantised = quantises(out_dtype)
    groups = group_sizes.shape[0]
    tiles = pick_tiles(
        *(count, weights, groups, target, kind, quantised, given),
        average=average,
        one_group=one_group,
    )
    operands = _operands(
        rows, weights, tiles, as_floats=as_floats, picked=picked, one_group=one_group
    )
    zero_padding = zero_padding and not one_group
    tile_list = when_known(list_tiles, group_sizes, count, tiles.listed_rows, zero_padding)
    found = grouped_product(
        operands, tile_list, epilogue, out_dtype, tiles, processors(target), interpreter(target)
    )
    if tiles.splits == 1:
        return found
    sums = functools.reduce(jnp.add, found[0])  # in order, whatever XLA makes of a sum over an axis
    return (sums[: weights[0].shape[1], :count].T.astype(out_dtype),)


def kind_of(weights: WeightArray, *, in_blocks: bool = False, as_floats: bool = False) -> Kind:
    """Returns the name that `tiles.py` has for the kind of operands."""
    if in_blocks:
        return "rows in blocks"
    if not isinstance(weights, QuantArray):
        return "16 bits"
    per_channel = is_per_channel(weights)
    if weights.dtype == jnp.int8 and not as_floats:
        return "int8" if per_channel else "int8 blocks"
    return "converted" if per_channel else "converted blocks"


def _operands(
    rows: Array | RowsInBlocks,
    weights: tuple[WeightArray, ...],
    tiles: Tiles,
    *,
    as_floats: bool = False,
    picked: Picked | None = None,
    one_group: bool = False,
) -> Operands:
    """Returns the kernel's operands: rows and weights in wgmma's dtypes, and scales."""
    first = weights[0]
    if not isinstance(first, QuantArray):
        assert isinstance(rows, Array)
        return Operands(_rows_of(rows, picked), weights)
    quantised = [array for array in weights if isinstance(array, QuantArray)]
    row_scales: Any = None
    block_scales: Any = None
    if isinstance(rows, RowsInBlocks):
        rows, block_scales = rows
    elif first.dtype == jnp.int8:
        if not as_floats:
            rows, row_scales = quantize_rows(rows, "int8")
    elif rows.dtype == jnp.bfloat16:
        rows, row_scales = _as_float16(rows)
    rows = _rows_of(rows, picked)
    if row_scales is not None:
        row_scales = row_scales if picked is None else row_scales[picked.source]
        # A tile of several groups may begin anywhere; of one group only the last one is cut.
        whole = one_group and not rows.shape[0] % tiles.listed_rows
        row_scales = jnp.pad(row_scales, (0, 0 if whole else tiles.listed_rows))
    values = tuple(from_bits(array.values) for array in quantised)
    if is_per_channel(first):
        # With rows in parts, columns that do not exist may read scales of other columns: padding to
        # a whole tile would take a launch.
        unit = OUT_MULTIPLE if tiles.in_parts else tiles.out
        scales = tuple(_channel_scales(array, unit) for array in quantised)
        return Operands(rows, values, row_scales, block_scales, channel_scales=scales)
    block_out, block_in = first.block
    block = (block_out or first.shape[1], block_in)
    scales = tuple(array.scales for array in quantised)
    return Operands(rows, values, row_scales, block_scales, block_scales=scales, block=block)


def _channel_scales(weights: QuantArray, tile_out: int) -> Float32[Array, "groups columns"]:
    """Returns a scale for every column of the output tiles, unused columns of the last included."""
    d_out = weights.shape[1]
    scales = weights.scales[:, :, 0]
    block_out = weights.block[0] or d_out
    if block_out > 1:
        scales = jnp.repeat(scales, block_out, axis=1)[:, :d_out]
    return jnp.pad(scales, ((0, 0), (0, -d_out % tile_out)))


def _as_float16(
    rows: Float[Array, "rows d_in"],
) -> tuple[Float[Array, "rows d_in"], Float32[Array, " rows"]]:
    """Returns rows in FP16, and the power of two by which each must be multiplied afterwards."""
    wide = rows.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=1), jnp.int32)
    # The largest magnitude of a row is in [2^exponent, 2^(exponent + 1)); zeros and subnormal
    # numbers count as 2^-100, so that the inverse is finite.
    exponent = jnp.maximum((bits >> 23) - 127, -100)
    scales = jax.lax.bitcast_convert_type((exponent - 14 + 127) << 23, jnp.float32)
    # The inverse of a power of two is exact.
    return (wide * (1 / scales)[:, None]).astype(jnp.float16), scales
