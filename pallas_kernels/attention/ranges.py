"""Cuts a batch into units of rows, and the steps of all units into equal ranges, for GPU kernels.

Called by `mosaic_gpu.py` and `triton_gpu.py`, and by their kernels. Knows nothing of the
computation.

An item is one token or a few that read the same positions (`work_items.py`). For each key/value
head its rows, tokens x query heads, form one unit. A step is a block of positions that a unit
reads. The steps of all units, one after the other, are cut into equal ranges, so that every
multiprocessor has the same work however ragged the lengths. A range has a block of threads for
each lane, a lane being a part of a unit's rows: the blocks of one range read the same pages at the
same time, all but one from the second-level cache.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.reference import PagedCall, Where
from pallas_kernels.attention.work_items import WorkItems, work_items


class Cut(NamedTuple):
    """Sizes by which a batch is cut.

    Attributes:
      heads: query heads of a key/value head.
      item_tokens: the most tokens of an item.
      items: the most items that the batch may be cut into.
      lanes: parts of a unit's rows.
      lane_rows: rows of a lane; the last ones of a unit may be padding.
      ranges: number of ranges.
      block: positions of a step.
      window: positions that a row sees, its own included; 0: all.
    """

    heads: int
    item_tokens: int
    items: int
    lanes: int
    lane_rows: int
    ranges: int
    block: int
    window: int


class Work(NamedTuple):
    """Positions that the units read, and how they are cut into ranges. In a kernel, the refs.

    Attributes:
      sequence: row of the page table, of every item.
      place: position of the item's first token; padding: -1.
      stride: difference between the positions of consecutive tokens.
      last: position of the item's last token, or of the last one that has a page; padding: -1.
      first_block: the first step of an item reads the positions from `block * first_block` on.
      start: first step of every unit; at the end the number of all steps.
      first_unit: of every range, the unit in which it begins.
    """

    sequence: Int32[Array, " items"]
    place: Int32[Array, " items"]
    stride: Int32[Array, " items"]
    last: Int32[Array, " items"]
    first_block: Int32[Array, " items"]
    start: Int32[Array, " units_and_end"]
    first_unit: Int32[Array, " ranges"]


class Places(NamedTuple):
    """Positions that the tokens of a batch read: `Work`, the same for every layer of a window,
    without the fields that the batch itself has where every token is an item."""

    items: WorkItems | None
    """None: every token is an item."""
    sequence: Int32[Array, " items"] | None
    place: Int32[Array, " items"] | None
    """None: the same as `last`."""
    stride: Int32[Array, " items"]
    last: Int32[Array, " items"]
    first_block: Int32[Array, " items"] | None
    """None: zeros; `stride` is zeros too."""
    start: Int32[Array, " units_and_end"]
    first_unit: Int32[Array, " ranges"]

    def work(self, sequence_of_token: Array) -> Work:
        """All fields of `Work`."""
        return Work(
            sequence_of_token if self.sequence is None else self.sequence,
            self.last if self.place is None else self.place,
            self.stride,
            self.last,
            self.stride if self.first_block is None else self.first_block,
            self.start,
            self.first_unit,
        )


def most_items(call: PagedCall, item_tokens: int) -> int:
    """Returns how many items the batch of a call is cut into at most: as many as tokens, unless the
    number of its runs is known. Queries and results are laid out for that many whole items."""
    tokens = call.queries.shape[0]
    return min(tokens, tokens // item_tokens + call.runs) if call.runs else tokens


def cut_batch(
    cut: Cut,
    kv_heads: int,
    where: Where,
) -> Places:
    """Cuts a batch into items and ranges."""
    page_table, sequence_of_token, position = where
    items = None
    if cut.item_tokens == 1:
        place, stride, last = position, jnp.zeros_like(position), position
        sequence = sequence_of_token
    else:
        sequences, largest = page_table.shape[0], cut.item_tokens
        items = work_items(sequence_of_token, position, sequences=sequences, largest=largest)
        items = WorkItems(*(field[: cut.items] for field in items))
        last, stride, sequence = items.kv_length - 1, items.stride, items.sequence
        place = last - (items.count - 1) * stride

    first_block = jnp.zeros_like(last)
    if cut.window:
        first_block = jnp.clip(place - cut.window + 1, 0, jnp.maximum(last, 0)) // cut.block
    # A padding token that is an item is a step that sees nothing: it writes the zeros. An item
    # without tokens is none.
    blocks = jnp.maximum(last, -1 if items else 0) // cut.block + 1 - first_block
    start, first_unit = _ranges(blocks, kv_heads, cut.ranges)
    whole = items is None
    return Places(
        items,
        None if whole else sequence,
        None if whole else place,
        stride,
        last,
        None if whole and not cut.window else first_block,
        start,
        first_unit,
    )


def _ranges(blocks: Array, kv_heads: int, ranges: int) -> tuple[Array, Array]:
    """Returns `start` and `first_unit` of `Work`."""
    steps = jnp.repeat(blocks, kv_heads)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(steps, dtype=jnp.int32)])
    begin = range_begin(jnp.arange(ranges, dtype=jnp.int32), start[-1], ranges)
    ends_before = start[None, 1:] <= begin[:, None]
    return start, jnp.sum(ends_before, axis=1, dtype=jnp.int32)


def rows_of_units(
    queries: Float[Array, "tokens q_heads head_dim"], places: Places, cut: Cut
) -> Float[Array, "units lanes rows head_dim"]:
    """Returns the rows of every unit, token after token, filled up to whole lanes."""
    if places.items is None:
        of_items = queries[:, None]
    else:
        of_items = queries[_tokens_of_items(places.items, queries.shape[0], cut)]
    items, tokens, q_heads, head_dim = of_items.shape
    kv_heads = q_heads // cut.heads
    rows = of_items.reshape(items, tokens, kv_heads, cut.heads, head_dim)
    rows = jnp.swapaxes(rows, 1, 2).reshape(items * kv_heads, tokens * cut.heads, head_dim)
    padding = cut.lanes * cut.lane_rows - rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, padding), (0, 0)))
    return rows.reshape(items * kv_heads, cut.lanes, cut.lane_rows, head_dim)


def results_of_units(
    output: Float[Array, "units lanes rows v_width"],
    lse: Float32[Array, "units lanes rows"],
    places: Places,
    cut: Cut,
    kv_heads: int,
    position: Int32[Array, " tokens"],
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Returns the results of all units in the order of the batch's tokens."""
    output = _items_of_units(output, cut, kv_heads)
    lse = _items_of_units(lse[..., None], cut, kv_heads)[..., 0]
    items, (tokens,) = places.items, position.shape
    if items is None:
        return output, lse
    largest = cut.item_tokens
    slot = jnp.arange(items.first.size * largest, dtype=jnp.int32).reshape(-1, largest)
    offset = jnp.arange(largest, dtype=jnp.int32)
    token = _tokens_of_items(items, tokens, cut)
    place_of_slot = jnp.where(offset < items.count[:, None], token, tokens)
    slot_of_token = jnp.zeros(tokens, jnp.int32).at[place_of_slot].set(slot, mode="drop")
    exists = (position >= 0)[:, None]
    output = jnp.where(exists[..., None], output[slot_of_token], jnp.zeros((), output.dtype))
    return output, jnp.where(exists, lse[slot_of_token], -jnp.inf)


def _tokens_of_items(
    items: WorkItems, tokens: int, cut: Cut
) -> Int32[Array, "items tokens_per_item"]:
    """Returns which tokens an item has; past its end, some other ones."""
    offset = jnp.arange(cut.item_tokens, dtype=jnp.int32)
    return jnp.minimum(items.first[:, None] + offset, tokens - 1)


def _items_of_units(
    rows: Float[Array, "units lanes rows width"], cut: Cut, kv_heads: int
) -> Float[Array, "slots q_heads width"]:
    """Undoes the layout of `rows_of_units`. A slot is one of the tokens of an item."""
    width = rows.shape[-1]
    rows = rows.reshape(-1, kv_heads, cut.lanes * cut.lane_rows, width)
    rows = rows[:, :, : cut.item_tokens * cut.heads]
    rows = rows.reshape(-1, kv_heads, cut.item_tokens, cut.heads, width)
    return jnp.swapaxes(rows, 1, 2).reshape(-1, kv_heads * cut.heads, width)


def range_begin(index: Any, total: Any, ranges: int) -> Any:
    """Returns the first step of a range. Of more ranges than steps the last ones are empty."""
    used, share, longer = _shares(total, ranges)
    index = jnp.minimum(index, used)
    return index * share + jnp.minimum(index, longer)


def range_of(step: Any, total: Any, ranges: int) -> Any:
    """Returns the range that a step is in: the last one that begins at it or before.

    Ranges between two steps of a unit are never empty: each has some of its steps.
    """
    _, share, longer = _shares(total, ranges)
    of_longer = longer * (share + 1)
    later = longer + (step - of_longer) // jnp.maximum(share, 1)
    return jnp.where(step < of_longer, step // (share + 1), later)


def _shares(total: Any, ranges: int) -> tuple[Any, Any, Any]:
    """Returns how many ranges have steps, how many each has, and how many have one more.

    Steps are not multiplied by ranges: 16,384 tokens of a prompt after 128K others, on 4 heads,
    are 17 million steps, and that times 264 ranges exceeds 32 bits.
    """
    used = jnp.clip(total, 1, ranges)
    return used, total // used, total % used


def pieces(units: int, ranges: int) -> int:
    """Returns for how many partial results memory is needed.

    A unit's part in a range is stored at the sum of their indices, which grows from part to part.
    If two places for every range are fewer, ranges have two each instead.
    """
    return min(2 * ranges, units + ranges - 1)


def piece_of(range_: Any, unit: Any, *, first: Any, units: int, ranges: int) -> Any:
    """Returns the place of a unit's partial result in a range.

    Args:
      first: whether the unit begins in this range.
      units, ranges: number of units and of ranges.
    """
    if pieces(units, ranges) < 2 * ranges:
        return range_ + unit
    return jnp.where(first, 2 * range_ + 1, 2 * range_)
