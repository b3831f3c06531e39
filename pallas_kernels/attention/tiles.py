"""How the attention kernels cut their work, by kind of device: found by static counts or measured.

Called by the kernels. A kind that has no row takes the default of its backend.
"""

from typing import NamedTuple

from pallas_kernels.target import Target


class TpuTiles(NamedTuple):
    """Of the Mosaic TPU kernel.

    Attributes:
      block_tokens: KV tokens that are fetched and attended to at a time, of all heads.
      tile_rows: query rows (tokens × query heads of a KV head) that are multiplied at a time.
      item_rows: query rows of all KV heads that read a sequence's keys and values together.
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
"""By static bundle counts (`python -m pallas_kernels.bundles`)."""


def tpu_tiles(device_kind: str) -> TpuTiles:
    """The tiles for a kind of device, as JAX names it."""
    return TPU.get(device_kind, TPU_DEFAULT)


GPU_MULTIPROCESSORS = {"H20": 78, "H100 PCIe": 114}
"""By a part of the device kind; what the others (H100 SXM, H200, H800, GH200) have is 132."""
INTERPRETED_BLOCKS = 2


def gpu_blocks(target: Target) -> int:
    """Blocks of threads among which the pages of a batch are divided: one a multiprocessor."""
    if target.interpret:
        return INTERPRETED_BLOCKS
    for part, count in GPU_MULTIPROCESSORS.items():
        if part in target.device_kind and "H200" not in target.device_kind:
            return count
    return 132
