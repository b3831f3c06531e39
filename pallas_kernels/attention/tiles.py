"""Tile sizes of the attention kernels by device kind, found by static counts or by measurement.

Called by the kernels. Tuned tiles of a call (`tuned.json`) take precedence over the device kind's
row; a kind without one uses the default of its backend. On a TPU, calls for which a row takes too
much memory get a smaller one (`mosaic_tpu_memory.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuned
from pallas_kernels.hopper import BEFORE_HOPPER
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields


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


TPU_DEFAULT = TpuTiles()

TPU: dict[str, TpuTiles] = {
    "TPU v5 lite": TpuTiles(),
    "TPU v6 lite": TpuTiles(),
    "TPU7x": TpuTiles(),
}
"""Tiles found by static bundle counts (`python -m pallas_kernels.bundles`)."""

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


def smaller_tiles(device_kind: str, *, decode: bool, compact_heads: int = 0) -> Iterator[TpuTiles]:
    """Yields the default tiles of a kind of device, then smaller ones in the order of preference.

    Blocks shrink first: with many KV heads a short block still keeps the memory busy, while every
    item of fewer rows reads the same keys and values again.

    Args:
      compact_heads: KV heads of a call whose rows are compact (`mosaic_tpu_memory.py`); else 0.
    """
    tiles = TPU.get(device_kind, TPU_DEFAULT)
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


def tpu_tiles(
    device_kind: str,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: DTypeLike,
    *,
    decode: bool,
    default: TpuTiles,
    given: Fields | None = None,
) -> TpuTiles:
    """Returns the tiles for a kind of device, as JAX names it, and for a call.

    Args:
      heads: query heads and KV heads.
      widths: widths of keys and of values.
      dtype: dtype of the pages.
      decode: every sequence has one token.
      default: the tiles if none are tuned (`smaller_tiles`).
      given: fields that a caller of the op sets.
    """
    name = jnp.dtype(dtype).name.replace("float8_e4m3fn", "fp8").replace("uint8", "fp8")
    kind = "decode" if decode else "chunk"
    call = (
        f"paged_attention {kind} heads {heads[0]}/{heads[1]} widths {widths[0]}/{widths[1]} {name}"
    )
    choices = dict(TPU_CHOICES)
    if decode:
        choices = {"block_tokens": choices["block_tokens"]}
    return tuned.in_force("attention", device_kind, call, default, choices, given)


class GpuTiles(NamedTuple):
    """Sizes by which the Hopper kernel cuts its work.

    Attributes:
      blocks: of threads, among which the pages of a batch are divided.
      stages: buffers of the ring of pages, at most.
    """

    blocks: int
    stages: int = 8


INTERPRETED_BLOCKS = 2


def gpu_blocks(target: Target) -> int:
    """Returns how many blocks of threads share the pages of a batch: one for each multiprocessor
    that is not left to collectives."""
    if target.interpret:
        return INTERPRETED_BLOCKS
    from pallas_kernels.mosaic_gpu import multiprocessors_of

    return multiprocessors_of(target.device_kind) - target.left


def multiprocessors(target: Target) -> int:
    """Returns the multiprocessors of a GPU before Hopper that are not left to collectives."""
    if target.interpret:
        return INTERPRETED_BLOCKS // 2
    kinds = BEFORE_HOPPER.items()
    return next(count for part, count in kinds if part in target.device_kind) - target.left
