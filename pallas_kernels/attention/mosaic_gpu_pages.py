"""Keys and values of a step in the Hopper kernel of paged attention: awaited, converted, cleared.

Called by `mosaic_gpu_kernel.py`, whose warpgroups are `Pages`. Knows nothing of queries or sums.

Pages in 8 bits are dequantised in shared memory to the cheapest 16-bit type: int8 to bfloat16,
float8 to float16. Because float16 has a small exponent range, values are scaled by 16: a row keeps
its precision if its largest magnitude is between 2e-3 and 4e3.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu_plan import ROWS, Sizes, compute_dtype
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK, Cursor, Walk
from pallas_kernels.mosaic_gpu import load, store

FLOAT16_FACTOR = 16
"""Factor applied to keys and values when they are converted to float16. Keys and values may reach
65504 / 16 = 4094 (larger ones become infinity), queries 65504."""
CONVERTED_COLUMNS = 64
"""Columns that a warpgroup converts at a time."""


class Unit(NamedTuple):
    """Scalars of the unit (work item and KV head) that a warpgroup is working on."""

    index: Any
    place: Any
    stride: Any
    last: Any
    first_row: Any  # of this warpgroup, among the rows of the unit
    block_shift: Any  # block of positions - step
    query_scales: Any  # [64], of queries in FP8; else None


class Pages:
    """The keys and values of one range of steps, as one warpgroup sees them."""

    def __init__(self, me: int, plan: Sizes, walk: Walk, smem: SimpleNamespace) -> None:
        """Stores references; derives which buffers and dtype the products use."""
        self.me, self.plan, self.walk, self.smem = me, plan, walk, smem
        self.leads = jnp.bool_(True if plan.own_ranges else me == 0)
        self.walker = me if plan.own_ranges else 0
        self.converts = hasattr(smem, "k_converted") or plan.one_buffer or plan.fp8_keys
        self.shared = not hasattr(smem, "v_smem")
        self.dtype = compute_dtype(next(iter(walk.parts.values())).source.dtype)
        self.factor = FLOAT16_FACTOR if self.converts and self.dtype == jnp.float16 else 1

    def _wait_until_loaded(self, slot: Any, name: str = "k") -> None:
        """Waits for a step's copies into this slot, or for those of keys or values alone."""
        plgpu.barrier_wait(self.walk.parts[name].loaded.at[slot])

    def _meet(self) -> None:
        """Waits for all warps that work on the same unit."""
        met = self.smem.met.at[self.walker]
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    def _meet_others(self) -> None:
        """Waits like `_meet`, but only if several warpgroups share a unit."""
        if self.plan.warpgroups > self.plan.walkers:
            self._meet()

    def _meet_to_convert(self) -> None:
        """Waits until the keys or values converted before have been multiplied."""
        if self.plan.own_ranges and (self.plan.one_buffer or self.shared):
            self._meet()
        else:
            self._meet_others()

    def _keys(self, slot: Any) -> Any:
        return self._of_step(slot, "k")

    def _values(self, slot: Any) -> Any:
        if self.shared:
            return self._keys(slot).at[:, pl.ds(0, self.plan.v_width)]
        return self._of_step(slot, "v")

    def _of_step(self, slot: Any, name: str) -> Any:
        if self.plan.one_buffer:
            width = self.plan.v_width if name == "v" else self.smem.k_smem.shape[2]
            return self.smem.converted.at[self.walker + zero(slot), :, pl.ds(0, width)]
        if self.converts:
            return getattr(self.smem, name + "_converted").at[self.walker + zero(slot)]
        return getattr(self.smem, name + "_smem").at[slot]

    def _convert_keys(self, slot: Any, cursor: Cursor | None) -> None:
        self._meet_to_convert()
        self._convert("k", slot, self._keys(slot), cursor)

    def _convert_values(self, slot: Any, cursor: Cursor | None) -> None:
        # Own ranges refill keys and values of a slot at different times, so each has a barrier.
        if self.plan.own_ranges:
            self._wait_until_loaded(slot, "v")
        self._convert("v", slot, self._values(slot), cursor)

    def _convert(self, name: str, slot: Any, target: Any, cursor: Cursor | None) -> None:
        """Converts [64, width] with scales [64]; the warpgroups of a unit share the columns.

        A warpgroup that issues its own copies starts the next one: the slot has been read.
        """
        source = getattr(self.smem, name + "_smem").at[slot]
        scales = getattr(self.smem, name + "_scales_smem").at[slot]
        layout = plgpu.Layout.WGMMA_UPCAST_4X
        by_row = load(scales, layout.reduce(1)) * self.factor
        by_row = by_row.astype(target.dtype)
        warpgroups = self.plan.warpgroups // self.plan.walkers
        # The one that copies has the last share, which may be smaller.
        me = warpgroups - 1 - (self.me - self.walker)
        shares = source.shape[1] // CONVERTED_COLUMNS

        def columns(index: int) -> Any:
            return pl.ds((index * warpgroups + me) * CONVERTED_COLUMNS, CONVERTED_COLUMNS)

        mine = (shares - me + warpgroups - 1) // warpgroups
        # The next part is being loaded while one is converted.
        part: Any = load(source.at[:, columns(0)], layout)
        for index in range(mine):
            last = index + 1 == mine
            later = None if last else load(source.at[:, columns(index + 1)], layout)
            converted = part.astype(target.dtype) * along(by_row, part, 0)
            store(target.at[:, columns(index)], converted)
            part = later
        # wgmma reads shared memory through the asynchronous proxy and would miss these stores
        # without this fence. The copy below may only begin now that the slot has been loaded.
        plgpu.commit_smem()
        if self.plan.own_ranges and isinstance(cursor, Cursor):
            self.walk.start(cursor, self.leads, (name, name + "_scales"))

    def _clear_unseen(self, unit: Unit, slot: Any, first: Any) -> None:
        """Zeroes values of positions that no row sees: they may hold NaN, and 0 * NaN is NaN."""
        window_start = unit.place - self.plan.window + 1 if self.plan.window else 0
        values = self._values(slot)

        def clear() -> None:
            position = first + iota((BLOCK, ROWS), 0)
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
            self._meet_others()  # No other multiplies a position that is not cleared yet.


def zero(slot: Any) -> Any:
    """Returns 0 in a form that the compiler cannot fold.

    For a constant index into shared memory the compiler keeps all derived values in registers. For
    queries of 576 columns, the 36 descriptors that wgmma takes occupy 72 registers.
    """
    return jnp.minimum(slot, 0)


def iota(shape: tuple[int, int], dimension: int) -> Any:
    """Returns 0, 1, … along a dimension, in the register layout of a wgmma's sums."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def along(vector: Any, matrix: Any, dimension: int) -> Any:
    """Broadcasts a vector, which runs along this dimension of a matrix, to the matrix's shape."""
    return lax.broadcast_in_dim(vector, matrix.shape, [dimension])
