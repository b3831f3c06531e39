"""How the blocks of threads of the Hopper kernels walk over the pages of a batch.

Called by `mosaic_gpu_kernel.py`; the ranges are cut by `mosaic_gpu.py`. Knows nothing of what is
computed.

A step is 64 positions that a unit, one key/value head of one item, reads. The steps of all units,
one after the other, are cut into equal ranges, so that every multiprocessor has the same work
however ragged the lengths. A range has a block of threads for each lane, a lane being a part of a
unit's rows: the blocks of one range read the same pages at the same time, all but one from the
second-level cache.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

BLOCK = 64
"""Positions of a step."""


class Work(NamedTuple):
    """Which positions the units read, and how they are cut into ranges. In a kernel, the refs.

    Attributes:
      sequence: row of the page table, of every item.
      place: position of the item's first token; padding: -1.
      stride: from one token's position to the next one's.
      last: position of the item's last token, or of the last one that has a page; padding: -1.
      first_block: the first step of an item reads the positions from 64 * first_block on.
      start: of every unit, its first step; at the end the number of all steps.
      first_unit: of every range, the unit in which it begins.
    """

    sequence: Int32[Array, " items"]
    place: Int32[Array, " items"]
    stride: Int32[Array, " items"]
    last: Int32[Array, " items"]
    first_block: Int32[Array, " items"]
    start: Int32[Array, " units_and_end"]
    first_unit: Int32[Array, " ranges"]


class Cursor(NamedTuple):
    """The next step to be copied, what it reads, and whose it is."""

    step: Any
    unit: Any
    end: Any  # the first step that is another unit's
    sequence: Any
    block_shift: Any  # block of positions - step
    pages: Any  # of the step; read ahead, so that no copy waits for them


def copies(page_size: int) -> int:
    """Pages, or parts of one, that a step reads."""
    return max(1, BLOCK // page_size)


def range_begin(index: Any, total: Any, ranges: int) -> Any:
    """The first step of a range."""
    return index * total // ranges


def range_of(step: Any, total: Any, ranges: int) -> Any:
    """The range that a step is in: the last one that begins at it or before."""
    return ((step + 1) * ranges - 1) // total


class Walk:
    """One range of steps, as seen by a block of threads. All of it is traced into the kernel.

    Attributes:
      begin, finish: the steps of the range.
    """

    def __init__(
        self,
        work: Work,
        page_table: Any,
        sources: list[Any],
        targets: list[Any],
        loaded: Any,
        *,
        ranges: int,
    ) -> None:
        """Find the range of this block.

        Args:
          page_table: [sequences, pages_per_sequence].
          sources: arrays of pages, [pages, kv_heads, page_size, ...].
          targets: where their steps go, [stages, 64, ...].
          loaded: a barrier for every stage; all copies of a step arrive there.
        """
        self.work, self.page_table, self.loaded = work, page_table, loaded
        self.sources, self.targets = sources, targets
        self.index = lax.axis_index("range")
        self.stages = targets[0].shape[0]
        self.pool, self.kv_heads, self.page_size = sources[0].shape[:3]
        self.units = work.start.shape[0] - 1
        total = work.start[self.units]
        self.begin = range_begin(self.index, total, ranges)
        self.finish = range_begin(self.index + 1, total, ranges)

    def slot(self, step: Any) -> Any:
        """Where in the targets a step is."""
        return lax.rem(step, self.stages)

    def first_cursor(self) -> Cursor:
        """At the beginning of the range."""
        return self._cursor(self.begin, self._open(self.work.first_unit[self.index]))

    def copy(self, cursor: Cursor, here: Any) -> Cursor:
        """Start to copy a step, if this warpgroup is the one to do so; go on to the next step."""

        def start() -> None:
            slot, rows = self.slot(cursor.step), BLOCK // copies(self.page_size)
            offset: Any = 0
            if self.page_size > BLOCK:
                offset = lax.rem((cursor.step + cursor.block_shift) * BLOCK, self.page_size)
            head = lax.rem(cursor.unit, self.kv_heads)
            for index, page in enumerate(cursor.pages):
                for source, target in zip(self.sources, self.targets, strict=True):
                    plgpu.copy_gmem_to_smem(
                        source.at[page, head, pl.ds(offset, rows)],
                        target.at[slot, pl.ds(index * rows, rows)],
                        self.loaded.at[slot],
                    )

        pl.when(here & (cursor.step < self.finish))(start)
        step = cursor.step + 1
        unit_fields = lax.cond(
            (step >= cursor.end) & (step < self.finish),
            lambda: self._open(cursor.unit + 1),
            lambda: cursor[1:5],
        )
        return self._cursor(step, unit_fields)

    def _open(self, unit: Any) -> tuple[Any, ...]:
        """What a cursor says of a unit."""
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
        pages = tuple(jnp.clip(page, 0, self.pool - 1) for page in pages)
        unit, end = unit_fields[:2]
        return Cursor(step, unit, end, sequence, block_shift, pages)
