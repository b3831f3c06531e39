"""How the blocks of threads of the Hopper kernels walk over the pages of a batch.

Called by `mosaic_gpu_kernel.py`; the ranges are cut by `mosaic_gpu.py`. Knows nothing of what is
computed.

A step is 64 positions that a unit, one key/value head of one item, reads. The steps of all units,
one after the other, are cut into equal ranges, so that every multiprocessor has the same work
however ragged the lengths. A range has a block of threads for each lane, a lane being a part of a
unit's rows: the blocks of one range read the same pages at the same time, all but one from the
second-level cache. A block may have two walkers, each with a range of its own.
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
    """The first step of a range. Of more ranges than steps the last ones are empty."""
    used, share, longer = _shares(total, ranges)
    index = jnp.minimum(index, used)
    return index * share + jnp.minimum(index, longer)


def range_of(step: Any, total: Any, ranges: int) -> Any:
    """The range that a step is in: the last one that begins at it or before.

    None of those in between two steps of a unit is empty: each has a part of it.
    """
    _, share, longer = _shares(total, ranges)
    of_longer = longer * (share + 1)
    later = longer + (step - of_longer) // jnp.maximum(share, 1)
    return jnp.where(step < of_longer, step // (share + 1), later)


def _shares(total: Any, ranges: int) -> tuple[Any, Any, Any]:
    """Ranges that have steps, how many each has, and how many of the first ones have one more.

    Steps are not multiplied by ranges: 16,384 tokens of a prompt after 128K others, on 4 heads,
    are 17 million steps, and that times 264 ranges exceeds 32 bits.
    """
    used = jnp.clip(total, 1, ranges)
    return used, total // used, total % used


class Part(NamedTuple):
    """What of a step is copied together: refs.

    Attributes:
      source: an array of pages, [pages, kv_heads, page_size, ...].
      target: where its steps go, [slots, 64, ...].
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
          parts: by name; each walker has its own ones of the slots.
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
        """Where in the targets a step is."""
        # Of one slot the compiler would know the place, and keep what follows from it in registers.
        turn = lax.rem(step, self.stages) if self.stages > 1 else jnp.minimum(step, 0)
        return turn + self.first_slot if self.first_slot else turn

    def first_cursor(self) -> Cursor:
        """At the beginning of the range."""
        return self._cursor(self.begin, self._open(self.work.first_unit[self.index]))

    def copy(self, cursor: Cursor, here: Any) -> Cursor:
        """Start to copy a step, if this warpgroup is the one to do so; go on to the next step."""
        self.start(cursor, here, tuple(self.parts))
        return self.after(cursor)

    def start(self, cursor: Cursor, here: Any, names: tuple[str, ...]) -> None:
        """Start to copy parts of a step."""

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
        """At the next step."""
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
        unit, end = unit_fields[:2]
        return Cursor(step, unit, end, sequence, block_shift, pages)
