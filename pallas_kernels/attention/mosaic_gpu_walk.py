"""How the blocks of threads of the Hopper kernels walk over the pages of a batch.

Called by `mosaic_gpu_kernel.py`. `ranges.py` says what units, steps, ranges and lanes are, and cuts
the ranges. Knows nothing of the computation. A block of threads may have two walkers, each with a
range of its own.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.ranges import Work, range_begin

BLOCK = 64
"""Positions of a step."""


class Cursor(NamedTuple):
    """The next step to be copied, the pages that it reads, and the unit that it belongs to."""

    step: Any
    unit: Any
    end: Any  # the first step of the following unit
    sequence: Any
    block_shift: Any  # block of positions - step
    pages: Any  # of the step; read ahead, so that no copy waits for them


def copies(page_size: int) -> int:
    """Returns how many pages, or parts of one page, a step reads."""
    return max(1, BLOCK // page_size)


class Part(NamedTuple):
    """One array of pages and its ring in shared memory: refs.

    Attributes:
      source: an array of pages, [pages, kv_heads, page_size, ...].
      target: ring of steps in shared memory, [slots, 64, ...].
      loaded: a barrier for every slot, at which its copies arrive.
    """

    source: Any
    target: Any
    loaded: Any


class Walk:
    """One range of steps, as seen by a walker. All of it is traced into the kernel.

    Attributes:
      begin, finish: the steps of the range.
    """

    def __init__(
        self,
        work: Work,
        page_table: Any,
        parts: dict[str, Part],
        *,
        ranges: int,
        walkers: int = 1,
        walker: int = 0,
    ) -> None:
        """Find the range of this walker, one of `walkers` in its block.

        Args:
          page_table: [sequences, pages_per_sequence].
          parts: arrays to copy, by name; each walker has its own share of the slots.
        """
        self.work, self.page_table, self.parts = work, page_table, parts
        first = next(iter(parts.values()))
        self.index = lax.axis_index("range")
        self.stages = first.target.shape[0] // walkers
        self.first_slot = walker * self.stages
        if walkers > 1:
            self.index = self.index * walkers + walker
        self.pool, self.kv_heads, self.page_size = first.source.shape[:3]
        self.units = work.start.shape[0] - 1
        total = work.start[self.units]
        self.begin = range_begin(self.index, total, ranges)
        self.finish = range_begin(self.index + 1, total, ranges)

    def slot(self, step: Any) -> Any:
        """Returns the slot of the ring that holds a step."""
        # The compiler would know the index of a single slot and keep derived values in registers.
        turn = lax.rem(step, self.stages) if self.stages > 1 else jnp.minimum(step, 0)
        return turn + self.first_slot if self.first_slot else turn

    def first_cursor(self) -> Cursor:
        """Returns the cursor at the beginning of the range."""
        return self._cursor(self.begin, self._open(self.work.first_unit[self.index]))

    def copy(self, cursor: Cursor, here: Any) -> Cursor:
        """Starts to copy a step, if `here` (this warpgroup copies), and returns the next cursor."""
        self.start(cursor, here, tuple(self.parts))
        return self.after(cursor)

    def start(self, cursor: Cursor, here: Any, names: tuple[str, ...]) -> None:
        """Starts to copy the named parts of a step."""

        def start() -> None:
            slot, rows = self.slot(cursor.step), BLOCK // copies(self.page_size)
            offset: Any = 0
            if self.page_size > BLOCK:
                offset = lax.rem((cursor.step + cursor.block_shift) * BLOCK, self.page_size)
            head = lax.rem(cursor.unit, self.kv_heads)
            for index, page in enumerate(cursor.pages):
                page = jnp.clip(page, 0, self.pool - 1)
                for name in names:
                    source, target, loaded = self.parts[name]
                    plgpu.copy_gmem_to_smem(
                        source.at[page, head, pl.ds(offset, rows)],
                        target.at[slot, pl.ds(index * rows, rows)],
                        loaded.at[slot],
                    )

        pl.when(here & (cursor.step < self.finish))(start)

    def after(self, cursor: Cursor) -> Cursor:
        """Returns the cursor of the next step."""
        step = cursor.step + 1
        unit_fields = lax.cond(
            (step >= cursor.end) & (step < self.finish),
            lambda: self._open(cursor.unit + 1),
            lambda: cursor[1:5],
        )
        return self._cursor(step, unit_fields)

    def _open(self, unit: Any) -> tuple[Any, ...]:
        """Returns those fields of a cursor that depend on the unit alone."""
        unit = jnp.minimum(unit, self.units - 1)
        item = unit // self.kv_heads
        sequence = jnp.clip(self.work.sequence[item], 0, self.page_table.shape[0] - 1)
        start = self.work.start[unit]
        return unit, self.work.start[unit + 1], sequence, self.work.first_block[item] - start

    def _cursor(self, step: Any, unit_fields: tuple[Any, ...]) -> Cursor:
        sequence, block_shift = unit_fields[2:]
        column = (step + block_shift) * BLOCK // self.page_size
        last_column = self.page_table.shape[1] - 1
        pages = tuple(
            self.page_table[sequence, jnp.clip(column + index, 0, last_column)]
            for index in range(copies(self.page_size))
        )
        unit, end = unit_fields[:2]
        return Cursor(step, unit, end, sequence, block_shift, pages)
