"""Tile sizes of the attention kernels, found by static counts or by measurement.

Called by the kernels. Tuned tiles of a call (`tuned.json`) take precedence over these. On a TPU,
calls for which the tiles take too much memory get smaller ones (`mosaic_tpu_memory.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pallas_kernels.hopper import multiprocessors_of
from pallas_kernels.target import Target


class TpuTiles(NamedTuple):
    """Tiles of the Mosaic TPU kernel.

    Attributes:
      block_tokens: KV tokens fetched and processed at a time, of all heads.
      tile_rows: query rows (tokens × query heads of a KV head) per product.
      item_rows: query rows of all KV heads that share one read of a sequence's keys and values.
    """

    block_tokens: int = 2048
    tile_rows: int = 256
    item_rows: int = 1024


TPU = TpuTiles()
"""Tiles of every TPU generation, found by static bundle counts (`python -m
pallas_kernels.bundles`)."""

LEAST_BLOCK = 128
"""Tokens of the shortest block that a call gets by itself, or one page where that is longer."""

LEAST_ROWS = 16
"""Rows of the smallest tile that a call gets by itself, or one token's where these are more."""

TPU_CHOICES: dict[str, tuple[Any, ...]] = {
    "block_tokens": (512, 1024, 2048, 4096),
    "tile_rows": (128, 256, 512),
    "item_rows": (512, 1024, 2048),
}
"""Sizes that a search tries. A decode step has the first field only: its items have one token."""


COMPACT_TILES = 2
"""Tiles of an item whose KV heads have few query heads each. By count, items of 512 rows of each KV
head read keys and values for about as long as v6e multiplies them."""


def smaller_tiles(*, decode: bool, compact_heads: int = 0) -> Iterator[TpuTiles]:
    """Yields the default tiles, then smaller ones in the order of preference.

    Blocks shrink first: with many KV heads a short block still keeps the memory busy, while every
    item of fewer rows reads the same keys and values again.

    Args:
      compact_heads: KV heads of a call whose rows are compact (`mosaic_tpu_memory.py`); else 0.
    """
    tiles = TPU
    for count in range(COMPACT_TILES if compact_heads else 0, 0, -1):
        larger = tiles._replace(item_rows=count * tiles.tile_rows * compact_heads)
        block = tiles.block_tokens
        while block >= 2 * LEAST_BLOCK:
            yield larger._replace(block_tokens=block)
            block //= 2
    while True:
        block = tiles.block_tokens
        yield tiles
        while block >= 2 * LEAST_BLOCK:
            block //= 2
            yield tiles._replace(block_tokens=block)
        if decode or tiles.tile_rows < 2 * LEAST_ROWS:
            return
        tiles = tiles._replace(tile_rows=tiles.tile_rows // 2, item_rows=tiles.item_rows // 2)


class GpuTiles(NamedTuple):
    """Sizes by which the Hopper kernel cuts its work.

    Attributes:
      blocks: of threads, among which the pages of a batch are divided.
      stages: buffers of the ring of pages, at most.
    """

    blocks: int
    stages: int = 8


INTERPRETED_BLOCKS = 2


def gpu_blocks(target: Target, interpreted: int = INTERPRETED_BLOCKS) -> int:
    """Returns how many blocks of threads share the pages of a batch: one for each multiprocessor
    that is not left to collectives, or `interpreted`."""
    if target.interpret:
        return interpreted
    return multiprocessors_of(target.device_kind) - target.left
