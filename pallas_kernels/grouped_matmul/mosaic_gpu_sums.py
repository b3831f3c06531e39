"""Sums of rows, to and from packed INT8, on Hopper GPUs (Pallas, Mosaic GPU): a block a row.

Called by `packed_sums.py`. A row stays in registers from the one time its parts are read to the one
time it is written.
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
from pallas_kernels.mosaic_gpu import WARPGROUP, launch, load, quantise, store, strided
from pallas_kernels.target import Target

MOST_COLUMNS = 8192
"""Most columns of a row, which the registers of a block hold."""

Addends = tuple[Array | None, Choices | None, int | None]
"""Fields of `packed_sums.Unsummed`."""


def gap(d: int, words: int) -> str:
    """Returns the property of a call that the kernels do not cover; empty: none."""
    if d % WARPGROUP or d > MOST_COLUMNS or words != d + WARPGROUP:
        return f"rows of {d} (multiples of {WARPGROUP} up to {MOST_COLUMNS})"
    return ""


def pack(
    sums: Addends,
    shape: tuple[int, int],
    words: int,
    major: tuple[int, int],
    target: Target,
    count: int = 1,
    *,
    everywhere: bool = True,
) -> tuple[Int8[Array, "part words"], ...]:
    """Packs sums of shape [tokens, d], if `gap` finds nothing; see `Unsummed.packed`. Returns
    `count` equal parts of the rows."""
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
    """Implements `packed_sums.sum_packed`."""
    shape = arrived.shape[1], d
    found = _run("sum_packed", _add_up, shape, jnp.float32, target, arrived, _as_floats(arrived))
    return found[0]


def add_up_and_pack(
    arrived: Int8[Array, "parts rows words"], d: int, target: Target, count: int = 1
) -> tuple[Int8[Array, "part words"], ...]:
    """Implements `packed_sums.sum_and_pack`; returns `count` equal parts of the rows."""
    body = functools.partial(_add_up_and_pack, d=d)
    shape, floats = (arrived.shape[1], arrived.shape[2]), _as_floats(arrived)
    return _run("sum_and_pack", body, shape, jnp.int8, target, arrived, floats, count=count)


def _as_floats(arrived: Array) -> Float32[Array, "all_rows numbers"]:
    """Views packed rows as FP32 numbers, of which one in each row is its scale, without a copy."""
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
    out_type = (jax.ShapeDtypeStruct((shape[0] // count, shape[1]), dtype),) * count
    return launch(body, name, out_type, shape[0], "row", target)(*arguments)


def _pack(
    *refs: Any,
    d: int,
    has_base: bool,
    has_gates: bool,
    major: tuple[int, int],
    everywhere: bool,
    count: int,
) -> None:
    """Packs one row.

    Refs, each if it exists: base [tokens, d]; rows [rows, d] or packed [rows, words], index [tokens
    * top_k], gates [tokens * top_k], and packed rows' scales; then the outputs [tokens / count,
    words]. At least base or rows exist.
    """
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
    """Stores the row that `make` computes in the output that contains it."""
    if len(outputs) == 1:
        _store_packed(outputs[0], row, make())
        return
    rows = outputs[0].shape[0]
    for number, output in enumerate(outputs):

        @pl.when(lax.div(row, rows) == number)
        def _(output: Any = output, first: int = number * rows) -> None:
            _store_packed(output, row - first, make())


def _add_up(arrived: Any, scales: Any, output: Any) -> None:
    """Sums one row of the parts [parts, rows, words], with their scales, into [rows, d]."""
    row = lax.axis_index("row")
    store(output.at[row], _sum(arrived, scales, row, output.shape[1]))


def _add_up_and_pack(arrived: Any, scales: Any, *outputs: Any, d: int) -> None:
    """Sums one row of [parts, rows, words] with their scales, and packs it into the outputs."""
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
    return load(row, strided(row.shape[0])).astype(jnp.float32)


def _store_packed(output: Any, row: jax.Array, total: jax.Array) -> None:
    d = total.shape[0]
    values, scale = quantise(total, jnp.int8)
    store(output.at[row, pl.ds(0, d)], values)
    # A packed row has `WARPGROUP` bytes behind its values.
    place = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=strided(WARPGROUP))
    bits = lax.bitcast_convert_type(jnp.broadcast_to(scale, place.shape), jnp.int32)
    byte = (bits >> (8 * jnp.minimum(place, 3))) & 255
    behind = jnp.where(place < 4, byte, jnp.zeros_like(byte))
    store(output.at[row, pl.ds(d, WARPGROUP)], behind.astype(jnp.int8))
