"""Sums of rows, to and from packed INT8, on Hopper GPUs (Pallas, Mosaic GPU): a block a row.

Called by `packed_sums.py`. A row stays in registers between the one time that its parts are read
and the one time that it is written.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int8

from pallas_kernels.grouped_matmul.routed import Choices
from pallas_kernels.mosaic_gpu import quantise, store
from pallas_kernels.target import Target

WARPGROUP = 128
"""Threads of a block; d is a multiple, and so many bytes are behind the values of a packed row."""
MOST_COLUMNS = 8192
"""Of a row that the registers of a block hold."""
VECTORS = (8, 4, 2, 1)
"""Neighbours that a thread may have, to choose from."""

Addends = tuple[Array | None, Choices | None, int | None]
"""Fields of `packed_sums.Unsummed`."""


def gap(d: int, words: int) -> str:
    """What of a call the kernels do not cover; empty: nothing."""
    if d % WARPGROUP or d > MOST_COLUMNS or words != d + WARPGROUP:
        return f"rows of {d} (multiples of {WARPGROUP} up to {MOST_COLUMNS})"
    return ""


def pack(
    sums: Addends,
    shape: tuple[int, int],
    words: int,
    major: tuple[int, int],
    target: Target,
    *,
    everywhere: bool = True,
) -> Int8[Array, "tokens words"]:
    """Sums of shape [tokens, d], for calls in which `gap` finds none; see `Unsummed.packed`."""
    return pack_pieces(sums, shape, words, major, target, everywhere=everywhere)[0]


def pack_pieces(
    sums: Addends,
    shape: tuple[int, int],
    words: int,
    major: tuple[int, int],
    target: Target,
    count: int = 1,
    *,
    everywhere: bool = True,
) -> tuple[Int8[Array, "part words"], ...]:
    """The same in `count` equal parts of the rows."""
    base, choices, packed = sums
    arguments: list[Array] = []
    if base is not None:
        arguments.append(base)
    if choices is not None:
        rows, gates, order = choices
        arguments += [rows, order.place.reshape(-1)]
        if gates is not None:
            arguments.append(gates.astype(jnp.float32).reshape(-1))
        if packed is not None:
            arguments.append(_as_floats(rows[None]))
    tokens, d = shape
    everywhere |= base is not None
    body = functools.partial(
        _pack,
        d=d,
        has_base=base is not None,
        has_gates=choices is not None and choices.gates is not None,
        major=major,
        everywhere=everywhere,
        count=count,
    )
    return _run("pack_sums", body, (tokens, words), jnp.int8, target, *arguments, count=count)


def add_up(
    arrived: Int8[Array, "parts rows words"], d: int, target: Target
) -> Float32[Array, "rows d"]:
    """See `packed_sums.sum_packed`."""
    shape = arrived.shape[1], d
    found = _run("sum_packed", _add_up, shape, jnp.float32, target, arrived, _as_floats(arrived))
    return found[0]


def add_up_and_pack(
    arrived: Int8[Array, "parts rows words"], d: int, target: Target, count: int = 1
) -> tuple[Int8[Array, "part words"], ...]:
    """See `packed_sums.sum_and_pack`; in so many equal parts of the rows."""
    body = functools.partial(_add_up_and_pack, d=d)
    shape, floats = (arrived.shape[1], arrived.shape[2]), _as_floats(arrived)
    return _run("sum_and_pack", body, shape, jnp.int8, target, arrived, floats, count=count)


def _as_floats(arrived: Array) -> Float32[Array, "all_rows numbers"]:
    """The FP32 numbers that the bytes are, of which one of a row is its scale: the same memory."""
    parts, rows, words = arrived.shape
    return lax.bitcast_convert_type(arrived.reshape(parts * rows, words // 4, 4), jnp.float32)


def _run(
    name: str,
    body: Any,
    shape: tuple[int, int],
    dtype: Any,
    target: Target,
    *arguments: Array,
    count: int = 1,
) -> tuple[Array, ...]:
    found: tuple[Array, ...] = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=(jax.ShapeDtypeStruct((shape[0] // count, shape[1]), dtype),) * count,
        grid=(shape[0],),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if target.interpret else None,
    )(*arguments)
    return found


def _layout(d: int) -> Any:
    vector = next(size for size in VECTORS if d % (WARPGROUP * size) == 0)
    return plgpu.Layout.WG_STRIDED((d,), vec_size=vector)


def _pack(
    *refs: Any,
    d: int,
    has_base: bool,
    has_gates: bool,
    major: tuple[int, int],
    everywhere: bool,
    count: int,
) -> None:
    """One row of: base [tokens, d] and rows [rows, d], index and gates [tokens * top_k], or
    one of both; then the outputs [tokens / count, words]. There may be no gates. Behind rows that
    are packed, [rows, words], and gates come the rows' scales."""
    operands, outputs = list(refs[:-count]), refs[-count:]
    row, (outer, inner) = lax.axis_index("row"), major
    tokens = count * outputs[0].shape[0]
    block = tokens // (outer * inner)
    number = lax.div(row, block)
    outer_first = lax.rem(number, outer) * inner + lax.div(number, outer)
    token = outer_first * block + lax.rem(row, block)
    base: Any = operands.pop(0) if has_base else None
    if not operands:
        _in_its_part(outputs, row, lambda: _wide(base.at[token]))
        return
    rows, index, *operands = operands
    gates: Any = operands.pop(0) if has_gates else None
    top_k = index.shape[0] // tokens
    places = [index[token * top_k + choice] for choice in range(top_k)]

    def add_up() -> jax.Array:
        chosen: Any = None
        for choice, place in enumerate(places):
            at = jnp.maximum(place, 0)
            wide = _wide(rows.at[at, pl.ds(0, d)])
            for scales in operands:
                wide = wide * scales[at, d // 4]
            if gates is not None:
                wide = wide * gates[token * top_k + choice]
            here = jnp.broadcast_to(place >= 0, wide.shape)
            wide = jnp.where(here, wide, jnp.zeros_like(wide))
            chosen = wide if chosen is None else chosen + wide
        return chosen if base is None else _wide(base.at[token]) + chosen

    if everywhere:
        _in_its_part(outputs, row, add_up)
    else:
        pl.when(functools.reduce(jnp.maximum, places) >= 0)(
            lambda: _in_its_part(outputs, row, add_up)
        )


def _in_its_part(outputs: Sequence[Any], row: jax.Array, make: Callable[[], jax.Array]) -> None:
    """Stores what `make` gives for a row in that one of the outputs which has it."""
    if len(outputs) == 1:
        _store_packed(outputs[0], row, make())
        return
    rows = outputs[0].shape[0]
    for number, output in enumerate(outputs):

        @pl.when(lax.div(row, rows) == number)
        def _(output: Any = output, first: int = number * rows) -> None:
            _store_packed(output, row - first, make())


def _add_up(arrived: Any, scales: Any, output: Any) -> None:
    """One row of [parts, rows, words] and its scales, to [rows, d]."""
    row = lax.axis_index("row")
    store(output.at[row], _sum(arrived, scales, row, output.shape[1]))


def _add_up_and_pack(arrived: Any, scales: Any, *outputs: Any, d: int) -> None:
    """One row of [parts, rows, words] and its scales, to the outputs that make up [rows, words]."""
    row = lax.axis_index("row")
    _in_its_part(outputs, row, lambda: _sum(arrived, scales, row, d))


def _sum(arrived: Any, scales: Any, row: jax.Array, d: int) -> jax.Array:
    parts, rows, _ = arrived.shape
    total: Any = None
    for part in range(parts):
        wide = _wide(arrived.at[part, row, pl.ds(0, d)]) * scales[part * rows + row, d // 4]
        total = wide if total is None else total + wide
    return total


def _wide(row: Any) -> jax.Array:
    layout = _layout(row.shape[0])
    return plgpu.load(row, layout=layout, optimized=False).astype(jnp.float32)


def _store_packed(output: Any, row: jax.Array, total: jax.Array) -> None:
    d = total.shape[0]
    values, scale = quantise(total, jnp.int8)
    store(output.at[row, pl.ds(0, d)], values)
    layout = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
    place = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=layout)
    bits = lax.bitcast_convert_type(jnp.broadcast_to(scale, place.shape), jnp.int32)
    byte = (bits >> (8 * jnp.minimum(place, 3))) & 255
    behind = jnp.where(place < 4, byte, jnp.zeros_like(byte))
    store(output.at[row, pl.ds(d, WARPGROUP)], behind.astype(jnp.int8))
