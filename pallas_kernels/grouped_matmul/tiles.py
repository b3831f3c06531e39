"""How the kernels cut their work, by kind of device. Numbers only; the kernels say what they mean.

Called by the kernels. What is not in a table gets `DEFAULT` of its backend.
"""

from typing import NamedTuple

MIB = 2**20


class TpuTiles(NamedTuple):
    """How the TPU kernel cuts its work.

    Attributes:
      tile_rows: most rows of a tile, which lie in VMEM together and share one read of the weights.
      steps: rows of one product, from large to small; a group's rows are cut into these.
      fp8_steps: the same for FP8 weights.
      block_steps: the same where a product is of one block of d_in, and scaled before it is added.
      step_columns: columns of one product, a multiple of 128.
      rows_bytes: VMEM for one tile of rows; there are two.
      weights_bytes: VMEM for one tile of weights (gate and up together) and of the output; there
        are two of each.
      vmem_bytes: what the compiler may use in all.
    """

    tile_rows: int
    steps: tuple[int, ...]
    fp8_steps: tuple[int, ...]
    block_steps: tuple[int, ...]
    step_columns: int
    rows_bytes: int
    weights_bytes: int
    vmem_bytes: int


TPU_DEFAULT = TpuTiles(512, (256, 64), (256, 64), (64,), 128, 8 * MIB, 19 * MIB, 56 * MIB)

# By bundles of compiled loops. An MXU of v5e has 128 columns, and its time follows the rows; one of
# the others has 256, and few rows take it as long as many, since what takes time is its weights.
TPU = {
    "TPU v5 lite": TpuTiles(512, (256, 64), (256, 64), (64,), 128, 16 * MIB, 26 * MIB, 112 * MIB),
    "TPU v6 lite": TpuTiles(512, (256,), (256, 128), (64,), 256, 16 * MIB, 26 * MIB, 112 * MIB),
    "TPU7x": TpuTiles(512, (256,), (256, 128), (64,), 256, 8 * MIB, 19 * MIB, 60 * MIB),
}
