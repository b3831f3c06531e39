"""Picks the rows of the groups of a product on Hopper GPUs (Pallas, Mosaic GPU).

Called by `mosaic_gpu.py`. Only the device knows how many of the rows in the buffer belong to a
group. This kernel copies just these; XLA's gather would copy all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.mosaic_gpu import WARPGROUP, interpreter, load, processors, store, strided
from pallas_kernels.target import Target

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
    picked_rows: Array = kernel(rows, source, ends)
    return picked_rows


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
