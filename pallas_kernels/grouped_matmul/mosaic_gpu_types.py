"""Types shared by the parts of the Hopper kernel of grouped products: sizes, references, a tile.

Called by `mosaic_gpu.py`, which fills `Tiles` and `Operands`, and by the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS, TileList

MOST_STORED_ROWS = 128  # stored at once: a buffer for more would cost a stage
ROW_PARTS = 2  # parts of a tile's rows whose sums fit into registers
NARROWED_ROWS = 16  # quantised at once if rows are summed up in parts: more would cost a stage
MOST_STORED_COLUMNS = 64  # stored at once if rows are first: more would cost a stage

PART_COLUMNS = 128
"""Output columns of one sum if rows are first: one block of the weights at most."""

ROWS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
"""Layout of 8 rows in a warpgroup's registers: 2 rows a warp, 4 of 64 columns a thread."""

SPARE_SCALES = 256
"""Padding at the end of a row of scales: the last tile reads as many scales as it has rows."""

CLUSTER = 2
"""Thread blocks of a cluster, if a kernel uses clusters."""

CLUSTER_AXIS = "block"
"""Name of the grid axis that counts the blocks of a cluster."""

Shared = Literal["", "rows", "weights"]

Ref = Any
Epilogue = Callable[..., jax.Array]


class Tiles(NamedTuple):
    """Sizes of one call of the kernel.

    Attributes:
      rows: rows of a tile: a multiple of 8, at most 256; with rows first, of 64 for every consumer.
      out: output columns of a tile for each weight: a multiple of 64 for every consumer; with rows
        first, of `PART_COLUMNS`.
      inner: values of d_in a step; a row of a step has at most 128 bytes, or a multiple.
      stages: steps that fit into the ring.
      consumers: warpgroups that multiply.
      band: row tiles that are worked on together.
      rows_first: whether rows are wgmma's left operand (its M), and not the weights.
      shared: operand that the two blocks of a cluster load together; empty: no clusters.
      splits: parts of d_in, each of which a CTA of its own sums up separately.
      in_parts: whether a consumer sums up one part of the rows after the other; then no warpgroup
        only loads, as with rows first.
    """

    rows: int
    out: int
    inner: int
    stages: int
    consumers: int
    band: int
    rows_first: bool = False
    shared: Shared = ""
    splits: int = 1
    in_parts: bool = False

    @property
    def loader(self) -> bool:
        """Whether one warpgroup only loads."""
        return not (self.rows_first or self.in_parts)

    @property
    def narrowed_rows(self) -> int:
        """Rows of a tile that are quantised at once."""
        return NARROWED_ROWS if self.in_parts else self.rows

    @property
    def listed_rows(self) -> int:
        """Rows of one entry of the tile list: of both blocks, if they share weights."""
        return self.rows * (CLUSTER if self.shared == "weights" else 1)

    @property
    def listed_out(self) -> int:
        """Output columns of one place in the order: of both blocks, if they share rows."""
        return self.out * (CLUSTER if self.shared == "rows" else 1)

    @property
    def scale_rows(self) -> int:
        """Scales of rows that are copied at once, in the unit of TMA's barriers, 128 bytes."""
        return -(-self.rows // 32) * 32

    @property
    def consumer_out(self) -> int:
        """Output columns of one consumer, if weights are wgmma's M."""
        return self.out // self.consumers

    @property
    def consumer_rows(self) -> int:
        """Rows of one consumer, if rows are wgmma's M."""
        return self.rows // self.consumers

    @property
    def store_rows(self) -> int:
        """Rows that a consumer stores at once: with `in_parts`, those of a part."""
        if self.in_parts:
            return self.rows // ROW_PARTS
        return self.consumer_rows if self.rows_first else min(self.rows, MOST_STORED_ROWS)

    @property
    def store_columns(self) -> int:
        """Output columns of a consumer that are stored at once."""
        return MOST_STORED_COLUMNS if self.rows_first else self.consumer_out


def quantises(out_dtype: DTypeLike) -> bool:
    """Whether results of this dtype are quantised."""
    return jnp.dtype(out_dtype).itemsize == 1


def shared_memory(
    tiles: Tiles, weights: int, weight_bytes: int, row_bytes: int, *, quantises: bool, scales: bool
) -> tuple[int, int]:
    """Returns the bytes of the buffers besides the ring, and of one stage of the ring."""
    fixed = (tiles.store_rows + BLOCK_ROWS) * tiles.consumers * tiles.store_columns * 2
    if quantises:
        fixed = tiles.narrowed_rows * (tiles.out * (1 if tiles.rows_first else 5) + 4)
    stage = (weights * tiles.out * weight_bytes + tiles.rows * row_bytes) * tiles.inner
    return fixed, stage + (tiles.scale_rows * 4 if scales else 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """The operands of one call: a pytree whose leaves the kernel gets as references.

    Attributes:
      rows: [rows, d_in], sorted by group.
      weights: one array [groups, d_out, d_in], or two (gate and up).
      row_scales: FP32 [rows + tiles.listed_rows], or [rows] where tiles end with these, or None:
        every result is multiplied by its row's.
      row_block_scales: FP32 [d_in / tiles.inner, rows + SPARE_SCALES] or None: the sum of one step
        is multiplied by its row's.
      channel_scales: for each of the weights FP32 [groups, d_out rounded up to a whole number of
        tiles, but where rows are summed up in parts], or empty: every result is multiplied by its
        channel's.
      block_scales: for each of the weights FP32 [groups, blocks of d_out, blocks of d_in], or
        empty: the sum over one block is multiplied by its block's.
      block: sizes of the blocks of `block_scales`, (of d_out, of d_in).
    """

    rows: Any
    weights: tuple[Any, ...]
    row_scales: Any = None
    row_block_scales: Any = None
    channel_scales: tuple[Any, ...] = ()
    block_scales: tuple[Any, ...] = ()
    block: tuple[int, int] = field(default=(0, 0), metadata={"static": True})


class Tile(NamedTuple):
    """One row tile of the `TileList`, and the part of d_in to sum up if the call has `splits`."""

    group: jax.Array
    block: jax.Array
    begin: jax.Array
    end: jax.Array
    split: jax.Array

    def part(self, first_block: int | jax.Array, rows: int) -> "Tile":
        """Returns `rows` rows of this tile, from its `first_block`-th block of `BLOCK_ROWS` on."""
        first = first_block * BLOCK_ROWS
        begin, end = (jnp.clip(edge - first, 0, rows) for edge in (self.begin, self.end))
        return self._replace(block=self.block + first_block, begin=begin, end=end)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Narrowing:
    """Shared memory of a CTA that quantises its results; not swizzled.

    Attributes:
      values: [tiles.rows, tiles.out], 8 bits.
      scales: FP32 [tiles.rows].
      wide: FP32 [tiles.rows, tiles.out]; None if rows are first.
      met: a barrier at which all consumers meet; None if rows are first.
    """

    values: Ref
    scales: Ref
    wide: Ref | None = None
    met: Ref | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scratch:
    """Shared memory of a CTA.

    Attributes:
      weights: for each of the weights [stages, tiles.out, tiles.inner].
      rows: [stages, tiles.rows, tiles.inner].
      scales: of rows, FP32 [stages, tiles.scale_rows], if they have one for every step.
      output: [consumers, tiles.store_rows, tiles.store_columns].
      edge: [consumers, BLOCK_ROWS, tiles.store_columns], not swizzled.
      narrowing: replaces `output` and `edge` if results are quantised.
      converted: [consumers, tiles.consumer_out, tiles.inner]; only if interpreted.
      full: barriers [stages]: a stage is loaded.
      empty: barriers [stages]: every consumer is done with a stage, of both blocks of a cluster.
    """

    weights: tuple[Ref, ...]
    rows: Ref
    scales: Ref | None
    output: Ref | None
    edge: Ref | None
    narrowing: Narrowing | None
    converted: Ref | None
    full: Ref
    empty: Ref


@dataclass(frozen=True)
class Context:
    """The static sizes and references that every part of the kernel uses.

    Attributes:
      out_tiles: columns of the order of tiles, each of `tiles.listed_out` output columns; with
        splits, one set of columns for every split.
      inner_steps: steps of one split.
    """

    tiles: Tiles
    groups: int
    out_tiles: int
    inner_steps: int
    operands: Operands
    tile_list: TileList
    output: Ref
    output_scales: Ref | None  # [d_out / tiles.out, rows + SPARE_SCALES]
    scratch: Scratch

    def steps_of(self, tile: Tile) -> jax.Array:
        """Steps of the ring that a tile takes; padding rows need no products."""
        return jnp.where(tile.group < self.groups, self.inner_steps, 0)

    def inner_of(self, tile: Tile, index: jax.Array) -> jax.Array:
        """Returns the step of d_in that a tile's `index`-th step is."""
        return tile.split * self.inner_steps + index if self.tiles.splits > 1 else index

    @property
    def group_tiles(self) -> jax.Array:
        """Number of row tiles of all groups."""
        return self.tile_list.ends[self.groups - 1]

    @property
    def all_tiles(self) -> jax.Array:
        """Number of row tiles, those of padding included."""
        return self.tile_list.ends[self.tile_list.ends.shape[0] - 1]

    def stage_of(self, step: jax.Array) -> jax.Array:
        """Returns the stage of the ring whose buffers a step uses."""
        return jax.lax.rem(step, self.tiles.stages)
