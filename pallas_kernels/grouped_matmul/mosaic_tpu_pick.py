"""Brings the rows of a grouped product into the order of its groups, in plain XLA.

Called by `mosaic_tpu.py`, where the kernel does not fetch them itself (`mosaic_tpu_fetch.py`).
"""

from jax import lax
from jaxtyping import Array, Int32, Num

from pallas_kernels.varying import vary_like

PICKED_ROWS = 256
"""Rows that are gathered at a time."""


def pick_rows(
    rows: Num[Array, "rows d"], source: Int32[Array, " picked"], count: Int32[Array, ""]
) -> Num[Array, "picked d"]:
    """Returns `rows[source]`, gathered `PICKED_ROWS` at a time up to row `count`; rows behind that
    are undefined.

    XLA gathers row by row, some 33 bundles each for 7168 columns in 8 bits. With the experts
    divided over devices, most rows of the result's size belong to other devices.
    """
    if source.shape[0] < 2 * PICKED_ROWS or source.shape[0] % PICKED_ROWS:
        return rows[source]
    pieces = source.reshape(-1, PICKED_ROWS)

    def pick(index: Array, picked: Array) -> Array:
        return lax.dynamic_update_index_in_dim(picked, rows[pieces[index]], index, 0)

    nothing = lax.empty((*pieces.shape, rows.shape[1]), rows.dtype)
    nothing = vary_like(nothing, (rows, source, count))
    filled = lax.div(count + (PICKED_ROWS - 1), PICKED_ROWS)
    return lax.fori_loop(0, filled, pick, nothing).reshape(-1, rows.shape[1])
