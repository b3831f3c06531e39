"""Grouped matrix products: checks the call, then runs the backend.

Called by the expert layers of a model. Knows nothing of routing: rows must be sorted by group.
Group g owns the `group_sizes[g]` rows from `sum(group_sizes[:g])` on; rows past `sum(group_sizes)`
are padding, give zeros and cost nothing. Groups may be empty. The sum of the group sizes, which
only the device knows, must not exceed the number of rows. Group sizes in NumPy are compile-time
constants, as are the plans that kernels derive from them.

Weights are [groups, d_out, d_in], as in checkpoints: floats of the rows' dtype, or a `QuantArray`;
on CPUs also floats of any dtype that lie input by input (`InputMajor`). TPU kernels read values in
`Words` where they lie; elsewhere these are copied.
FP8 weights: rows are not quantised; FP32 sums over each block of d_in are multiplied by the block's
scale and accumulated. INT8 weights: every row is quantised to INT8 too (`quantize_rows`), sums are
int32 and are multiplied by both scales (W8A8). INT4 weights: like FP8 weights, with a scale and
optionally a zero point for every group of d_in (W4A16). MXFP4 weights: as floats (W4A16).

`row_format="float"`: rows are not quantised for INT8 weights either (W8A16); for FP8 weights it is
the same as None.

`row_format="fp8"` or `"int8"`, the format of the weights (`"int8"` for INT4 weights, W4A8): rows
are quantised in blocks, as in DeepSeek-V3: a scale for every row and `ROW_BLOCK` = 128 columns.
Sums over 128 columns (FP32 or int32) are multiplied by both scales and accumulated in FP32.
`grouped_swiglu` quantises the hidden rows likewise, from FP32, in the epilogue of the product that
makes them, where a kernel's tile holds 128 columns but not the whole row. Of TPUs, only v7x
supports it in FP8.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.activation import SWIGLU, Activation
from pallas_kernels.coverage import Fallback, fall_back, kernel_target
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import GroupedCall
from pallas_kernels.grouped_matmul.reference import WeightArray as _Readable
from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize import (
    EIGHT_BITS,
    FOUR_BITS,
    QuantArray,
    Words,
    check_quant_array,
    dequantize_weight,
    from_bits,
    in_arrays,
)
from pallas_kernels.quantize.product import ROW_BLOCK
from pallas_kernels.target import Target, current_target, kernels
from pallas_kernels.transforms import run_op
from pallas_kernels.tuned import Fields

WeightArray = _Readable | Words
Biases = tuple[
    Float[Array, "groups d_ff"], Float[Array, "groups d_ff"], Float[Array, "groups d_out"]
]
"""Biases of the products of gate, up and down, of all groups."""
_NARROW_ROWS = EIGHT_BITS | {jnp.dtype(jnp.int4): "int8"}
"""Formats of rows in blocks, by the dtype of weights that multiply them."""
_COST = "multiplies 8 rows at a time, one block after the other"


def grouped_matmul(
    rows: Float[Array, "rows d_in"],
    weights: Float[Array, "groups d_out d_in"] | QuantArray | Words,
    group_sizes: Int32[Array | np.ndarray, " window"],
    *,
    row_format: RowFormat | None = None,
    narrow: QuantArray | None = None,
    first: Int[Array, ""] | int | None = None,
    tiles: Fields | None = None,
) -> Float[Array, "rows d_out"]:
    """Multiply every row by the weights of its group.

    Args:
      first: the first group's place among the weights, which may be those of several layers: group
        g of the sizes has the weights of group first + g. None: weights and sizes have equally many
        groups.
      row_format: "fp8" or "int8", as the weights (INT4: "int8"): rows are quantised in blocks;
        "float": rows are not quantised; None: as the format of the weights requires.
      narrow: see `grouped_swiglu`.
      tiles: sizes that replace those of the device kind, by field (`pallas_kernels/README.md`).

    Returns:
      the products in the dtype of `rows`, accumulated in FP32.

    Raises:
      ValueError: the shapes, dtypes, formats or tiles do not fit together.
      NotImplementedError: the backend has no such `row_format`; it is differentiated; or as
        `coverage.kernel_target`.
    """
    _check_rows(rows, group_sizes)
    groups = group_sizes.shape[0] if first is None else None
    _check_weights("weights", weights, rows, (groups, None, rows.shape[1]))
    _check_row_format(row_format, weights=weights)
    if _decodes(weights, rows):
        weights, row_format = _decoded("grouped_matmul", weights, rows), None
    target = _target("grouped_matmul", rows, (weights,), row_format, tiles)

    def compute(
        rows: Array,
        weights: WeightArray,
        narrow: QuantArray | None,
        first: Array | None,
        group_sizes: Array | np.ndarray,
    ) -> Array:
        call = GroupedCall(rows, (weights,), group_sizes, row_format, narrow)
        call = _placed(_readable(call, target), first, target)
        if target is None:
            return reference.grouped_matmul(call)
        return kernels("grouped_matmul", target).grouped_matmul(call, target, tiles)

    narrow, place = _in_format(narrow, weights), _place(first)
    return _run("grouped_matmul", compute, group_sizes, rows, weights, narrow, place)


def grouped_swiglu(
    rows: Float[Array, "rows d_model"],
    gate_weights: Float[Array, "groups d_ff d_model"] | QuantArray | InputMajor | Words,
    up_weights: Float[Array, "groups d_ff d_model"] | QuantArray | InputMajor | Words,
    down_weights: Float[Array, "groups d_out d_ff"] | QuantArray | InputMajor | Words,
    group_sizes: Int32[Array | np.ndarray, " window"],
    *,
    row_format: RowFormat | None = None,
    source: Int32[Array, " picked"] | None = None,
    narrow: QuantArray | None = None,
    zero_padding: bool = True,
    average: int | None = None,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
    first: Int[Array, ""] | int | None = None,
    tiles: Fields | None = None,
) -> Float[Array, "picked d_out"]:
    """Run every row through the SwiGLU network of its group: `(silu(x Wgᵀ) * (x Wuᵀ)) Wdᵀ`.

    Products are accumulated in FP32; silu and its product with the up projection are FP32 and
    rounded once, to the dtype of `rows`, before the down projection. If down is INT8 and
    `row_format` None, the rounded rows are quantised. The three weights may differ in format.

    Args:
      row_format: "fp8" or "int8", the format of all three weights (INT4 takes "int8", too): rows
        and hidden rows are quantised in blocks, the latter directly from FP32. "float": neither is
        quantised, and the weights have any 8-bit format. None: as the formats of the weights
        require.
      source: for each row of the groups, the index into `rows` (a token of several experts is
        several rows of the groups); None: `rows` in order. A row that is picked more than once is
        quantised once. Indices follow NumPy: negative ones count from the end, others are clamped.
      narrow: `rows` in 8 bits with one scale a row, if the caller received them so. A kernel
        multiplies these values, without rounding again, by weights of the same 8-bit format: on
        TPUs INT8, on v7x also FP8, without a `row_format`; on a Hopper GPU with one. Its values may
        be the first columns of a wider array, which such a kernel reads in place.
      zero_padding: False: results past the groups' rows are undefined and cost no memory traffic.
      average: expected rows of a group, if that is not all rows over all groups: some rows may not
        exist, some groups surely have none. Affects only sizes: of tiles on Hopper GPUs, of blocks
        of rows on CPUs.
      activation: what makes hidden rows of the products of gate and up. With biases, or another
        one than `SWIGLU`, kernels compute the three products one by one, and round between them.
      biases: of the networks; None: they have none.
      first: as of `grouped_matmul`, for all weights and biases.
      tiles: as of `grouped_matmul`, for both products.

    Returns:
      the outputs in the dtype of `rows`, one for each row of the groups.

    Raises:
      ValueError: the shapes, dtypes, formats or tiles do not fit together.
      NotImplementedError: the backend has no such `row_format`; it is differentiated; or as
        `coverage.kernel_target`.
    """
    _check_rows(rows, group_sizes)
    d_model = rows.shape[1]
    groups = group_sizes.shape[0] if first is None else gate_weights.shape[0]
    _check_weights("gate_weights", gate_weights, rows, (groups, None, d_model))
    d_ff = gate_weights.shape[1]
    _check_weights("up_weights", up_weights, rows, (groups, d_ff, d_model))
    _check_weights("down_weights", down_weights, rows, (groups, None, d_ff))
    _check_row_format(
        row_format, gate_weights=gate_weights, up_weights=up_weights, down_weights=down_weights
    )
    if source is not None and (source.ndim != 1 or source.dtype != jnp.int32):
        raise ValueError(f"source is {source.dtype}{source.shape}, needs int32 of rank 1")
    weights = gate_weights, up_weights, down_weights
    if all(_decodes(array, rows) for array in weights):
        gate, up, down = (_decoded("grouped_swiglu", array, rows) for array in weights)
        weights, row_format = (gate, up, down), None
    target = _target("grouped_swiglu", rows, weights, row_format, tiles)
    if biases is not None:
        _check_biases(biases, gate_weights, down_weights)
    if target is not None and (biases is not None or activation != SWIGLU):
        # No kernel adds biases or computes other activations between its products.
        given = rows if source is None else rows[source]
        multiply: Callable[..., Array] = functools.partial(
            grouped_matmul,
            group_sizes=group_sizes,
            row_format=row_format,
            first=first,
            tiles=tiles,
        )
        ends = jnp.cumsum(jnp.asarray(group_sizes))
        group = jnp.sum(ends[:, None] <= jnp.arange(given.shape[0]), axis=0)  # padding: past all
        group = jnp.where(group < ends.shape[0], group + (first or 0), groups)

        def product(some: Array, place: int) -> Array:
            found = multiply(some, weights[place]).astype(jnp.float32)
            if biases is None:
                return found
            added = biases[place].at[group].get(mode="fill", fill_value=0)
            return found + added.astype(jnp.float32)

        hidden = reference.gated(product(given, 0), product(given, 1), activation)
        return product(hidden.astype(rows.dtype), 2).astype(rows.dtype)

    def compute(
        rows: Array,
        weights: tuple[WeightArray, ...],
        source: Array | None,
        narrow: QuantArray | None,
        biases: Biases | None,
        first: Array | None,
        group_sizes: Array | np.ndarray,
    ) -> Array:
        options = source, zero_padding, average, activation, biases
        call = GroupedCall(rows, weights, group_sizes, row_format, narrow, *options)
        call = _placed(_readable(call, target), first, target)
        if target is None:
            return reference.grouped_swiglu(call)
        return kernels("grouped_matmul", target).grouped_swiglu(call, target, tiles)

    narrow = _in_format(narrow, gate_weights, up_weights)
    arrays = rows, weights, source, narrow, biases, _place(first)
    return _run("grouped_swiglu", compute, group_sizes, *arrays)


def _readable(call: GroupedCall, target: Target | None) -> GroupedCall:
    """Returns the call with arrays in place of `Words`, unless its kernel reads these."""
    plain = target is None or target.interpret
    return call._replace(weights=in_arrays(call.weights)) if plain else call


def _place(first: Int[Array, ""] | int | None) -> Int32[Array, ""] | None:
    return None if first is None else jnp.asarray(first, jnp.int32)


def _placed(call: GroupedCall, first: Array | None, target: Target | None) -> GroupedCall:
    """Returns the call for groups that begin at the group `first` of the weights. Backends other
    than TPUs' get sizes of all groups, which are 0 outside the call's."""
    if first is None:
        return call
    if target is not None and target.backend == "mosaic_tpu":
        return call._replace(first=first)
    nothing = jnp.zeros(call.weights[0].shape[0], jnp.int32)
    sizes = lax.dynamic_update_slice_in_dim(nothing, jnp.asarray(call.group_sizes), first, 0)
    return call._replace(group_sizes=sizes)


def _decodes(weights: WeightArray, rows: Array) -> bool:
    """Whether the device's kernels multiply by MXFP4 weights only once they are floats."""
    held = isinstance(weights, QuantArray) and weights.dtype == jnp.float4_e2m1fn
    return held and current_target().backend == "mosaic_gpu" and rows.dtype.itemsize == 2


def _decoded(op: str, weights: Any, rows: Array) -> Array:
    """Returns MXFP4 weights in the rows' dtype, and reports that this is slow."""
    cost = "gets the weights of all groups in 16 bits: 4 bytes more to move for each"
    kind = current_target().device_kind
    fall_back(Fallback(op, kind, "MXFP4 weights", cost, slow=True))
    return dequantize_weight(weights, rows.dtype)


def _in_format(narrow: QuantArray | None, *weights: WeightArray) -> QuantArray | None:
    """Returns 8-bit rows if the weights have their format, else None; FP8 may be given as bits."""
    if narrow is None:
        return None
    narrow = dataclasses.replace(narrow, values=from_bits(narrow.values))
    formats = {EIGHT_BITS.get(array.dtype) for array in (narrow, *weights)}
    return narrow if len(formats) == 1 and None not in formats else None


def _run(
    op: str, compute: Callable[..., Array], group_sizes: Array | np.ndarray, *arrays: Any
) -> Any:
    """Calls `compute(*arrays, group_sizes)`; group sizes in NumPy stay compile-time constants."""
    if isinstance(group_sizes, np.ndarray):
        return run_op(op, lambda *arrays: compute(*arrays, group_sizes), *arrays)
    return run_op(op, compute, *arrays, group_sizes)


def fastest_row_format(
    rows: Float[Array, "rows d_model"], weights: tuple[WeightArray, ...]
) -> RowFormat | None:
    """Returns the fastest `row_format` for a SwiGLU network (gate, up, down).

    Hopper has no product of FP8 weights and wider rows: it converts the weights to FP16, in every
    tile, and multiplies at half the rate of rows in FP8 blocks, which move half the bytes.
    """
    if current_target().backend != "mosaic_gpu" or rows.dtype == jnp.float32:
        return None
    for array in weights:
        if not isinstance(array, QuantArray) or array.dtype in (jnp.int8, *FOUR_BITS):
            return None
        if 0 < array.block[1] < array.shape[2] and array.block[1] % ROW_BLOCK:
            return None
    quantised = [array for array in weights if isinstance(array, QuantArray)]
    kernel = kernels("grouped_matmul", current_target())
    return None if kernel.gap(rows.dtype, quantised, "fp8") else "fp8"


def _target(
    op: str,
    rows: Array,
    weights: tuple[WeightArray, ...],
    row_format: RowFormat | None,
    tiles: Fields | None,
) -> Target | None:
    """Returns the target whose kernel runs; None: plain XLA."""

    def gap(target: Target) -> str:
        if target.backend == "mosaic_tpu":  # refuses formats by itself
            plan = kernels("grouped_matmul", target, "_plan")
            return plan.gap((array.shape[1] for array in weights), target)
        kept = [array for array in weights if not isinstance(array, InputMajor | Words)]
        return kernels("grouped_matmul", target).gap(rows.dtype, kept, row_format)

    return kernel_target(op, gap, _COST, tiles)


def _check_rows(rows: Array, group_sizes: Array | np.ndarray) -> None:
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"rows is {rows.dtype}{rows.shape}, needs floats [rows, d_in]")
    if group_sizes.ndim != 1 or group_sizes.dtype != jnp.int32 or group_sizes.shape[0] == 0:
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{group_sizes.shape}, needs int32 [groups]"
        )


def _check_weights(
    name: str,
    weights: WeightArray,
    rows: Array,
    expected: tuple[int | None, int | None, int],
) -> None:
    """Checks shape (None: any size) and dtype of one weight array."""
    if isinstance(weights, QuantArray):
        check_quant_array(name, weights)
    if isinstance(weights, InputMajor) and current_target().device_kind != "cpu":
        raise ValueError(f"{name} lies input by input, which {current_target().device_kind} cannot")
    fits = weights.ndim == 3 and all(
        size in (None, actual) for size, actual in zip(expected, weights.shape, strict=True)
    )
    if not fits:
        wanted = tuple("any" if size is None else size for size in expected)
        raise ValueError(f"{name} has shape {weights.shape}, needs {wanted}")
    if not isinstance(weights, QuantArray | InputMajor) and weights.dtype != rows.dtype:
        raise ValueError(f"{name} is {weights.dtype}, rows is {rows.dtype}")


def _check_biases(biases: Biases, gate: WeightArray, down: WeightArray) -> None:
    widths = gate.shape[1], gate.shape[1], down.shape[1]
    for name, bias, width in zip(("gate", "up", "down"), biases, widths, strict=True):
        if bias.shape != (gate.shape[0], width) or not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(
                f"the bias of {name} is {bias.dtype}{bias.shape}, needs floats "
                f"{(gate.shape[0], width)}"
            )


def _check_row_format(row_format: str | None, **weights: WeightArray) -> None:
    """Checks that all weights can be multiplied by rows in this format."""
    if row_format is None:
        return
    if row_format not in get_args(RowFormat):
        raise ValueError(f"row_format is {row_format!r}, needs None or {get_args(RowFormat)}")
    for name, array in weights.items():
        if not isinstance(array, QuantArray):
            raise ValueError(
                f"row_format is {row_format!r}, {name} is {array.dtype}, not in 8 or 4 bits"
            )
        if row_format == "float":
            continue
        if _NARROW_ROWS.get(array.dtype) != row_format:
            raise ValueError(f"row_format is {row_format!r}, {name} is {array.dtype}")
        block_in, is_int4 = array.block[1], array.dtype == jnp.int4
        part = is_int4 and block_in and ROW_BLOCK % block_in == 0
        if 0 < block_in < array.shape[2] and block_in % ROW_BLOCK and not part:
            raise ValueError(
                f"{name} has blocks of {block_in} of d_in; with row_format they need to be all of "
                f"{array.shape[2]} or a multiple of {ROW_BLOCK}{', or to divide it' * is_int4}"
            )
