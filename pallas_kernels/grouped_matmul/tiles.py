"""Tile sizes of the grouped product kernels, by device kind; the kernels document their meaning.

Called by the kernels. Tuned tiles of a call (`tuned.json`) take precedence over these tables; a
device in neither gets the `DEFAULT` of its backend.
"""

from typing import Any, Literal, NamedTuple

from pallas_kernels import tuned
from pallas_kernels.tuned import Fields

MIB = 2**20

OP = "grouped products"
"""Name of both ops in errors about given tiles."""


class TpuTiles(NamedTuple):
    """How the TPU kernel cuts its work.

    Attributes:
      tile_rows: most rows of a tile, which lie in VMEM together and share one read of the weights.
      steps: rows of one product, from large to small; a group's rows are cut into these.
      fp8_steps: the same for FP8 weights.
      block_steps: the same where a product is of one block of d_in, and scaled before it is added.
      step_columns: columns of one product, a multiple of 128.
      rows_bytes: VMEM for one tile of rows, of which two are held.
      weights_bytes: VMEM for one tile of weights (gate and up together) and of the output, of
        each of which two are held.
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


TPU_STEPS = {"blocks": "block_steps", "fp8": "fp8_steps"}
"""Field with the steps for a format; other formats use `steps`."""

TPU_CHOICES: dict[str, tuple[Any, ...]] = {
    "steps": ((64,), (128,), (256,), (512,), (256, 64), (256, 128), (512, 128)),
    "step_columns": (128, 256, 512),
    "tile_rows": (256, 512, 1024),
    "weights_bytes": (8 * MIB, 16 * MIB, 26 * MIB),
}
"""Values of each field that a search tries on TPUs."""

TPU_SETTABLE = ("tile_rows", "steps", *TPU_STEPS.values(), "step_columns", "weights_bytes")
"""Fields that callers of the ops may set; a product uses the steps of its own format."""


def tpu_tiles(
    device_kind: str,
    products: int,
    widths: tuple[int, int],
    format: str,
    given: Fields | None = None,
) -> tuple[TpuTiles, tuple[int, ...]]:
    """Returns the tiles for a call on a kind of device, as JAX names it, and the call's steps.

    Args:
      products: number of weights in one pass; 2: gate and up.
      widths: widths of a row of the input and of the output.
      format: format of the weights: a dtype, "fp8" (also for INT8 that is converted), or one of
        these and "blocks".
      given: fields that a caller of the op sets.
    """
    kernel = "grouped_swiglu" if products == 2 else "grouped_matmul"
    call = f"{kernel} {widths[0]}->{widths[1]} {format}"
    steps = next((field for part, field in TPU_STEPS.items() if part in format), "steps")
    choices = {steps if field == "steps" else field: some for field, some in TPU_CHOICES.items()}
    tiles = tuned.in_force(
        "grouped_matmul",
        device_kind,
        call,
        TPU.get(device_kind, TPU_DEFAULT),
        choices,
        given,
        TPU_SETTABLE,
    )
    return tiles, getattr(tiles, steps)


class HopperTiles(NamedTuple):
    """How the Hopper kernel cuts the work of one kind of weights.

    Attributes:
      rows: sizes of a row tile, ascending, to choose from by the average rows of a group; the
        largest is what the registers of a consumer hold without spilling.
      out: output columns of a tile, of each of the weights; 64 for each consumer, or a multiple.
      consumers: warpgroups that multiply, beside the one that loads.
      band: row tiles that are worked on together, so that their weights are read once from memory.
      most_stages: most buffers of the ring, if shared memory has room for them.
      cluster: blocks that load shared operands together, 2 or 1, if groups have enough rows.
    """

    rows: tuple[int, ...]
    out: int = 128
    consumers: int = 2
    band: int = 8
    most_stages: int = 8
    cluster: int = 2


RowFormat = Literal["fp8", "int8", "float"]
"""Format of rows that a caller asks for."""
Kind = Literal[
    "16 bits",
    "int8",
    "int8 blocks",
    "converted",
    "converted blocks",
    "rows in blocks",
    "some rows in blocks",
    "many rows in blocks",
]
"""Kinds of operands. "int8" and "converted" are weights in 8 bits with scales for channels or for
blocks; "converted" are FP8 weights, and INT8 weights if rows are not in 8 bits. "rows in blocks"
means that rows are in 8 bits too, with scales for blocks: "some" if groups have more rows than the
largest tile for few, "many" if more than the largest tile for some."""

HOPPER_DEFAULT: dict[tuple[Kind, int], HopperTiles] = {
    # (kind of operands, how many weights in one pass)
    ("16 bits", 1): HopperTiles((16, 32, 64, 128, 256)),
    ("16 bits", 2): HopperTiles((16, 32, 64, 128)),
    ("int8", 1): HopperTiles((16, 32, 64, 128, 256)),
    ("int8", 2): HopperTiles((16, 32, 64, 128)),
    ("converted", 1): HopperTiles((16, 32, 64, 128)),
    ("converted", 2): HopperTiles((16, 32, 64)),
    ("int8 blocks", 1): HopperTiles((16, 32, 64, 96)),
    ("int8 blocks", 2): HopperTiles((16, 32, 64)),
    ("converted blocks", 1): HopperTiles((16, 32, 64, 96)),
    ("converted blocks", 2): HopperTiles((16, 32, 64)),
    ("rows in blocks", 1): HopperTiles((16, 32, 64, 112)),
    ("rows in blocks", 2): HopperTiles((16, 32, 64)),
    ("some rows in blocks", 1): HopperTiles((96, 112, 128, 160), out=192, consumers=3),
    ("some rows in blocks", 2): HopperTiles((96, 128, 160)),
    ("many rows in blocks", 1): HopperTiles((128,), out=256),
    ("many rows in blocks", 2): HopperTiles((128,), out=128),
}
"""Tiles of every Hopper GPU: all have the same registers and shared memory."""

HOPPER_CHOICES: dict[str, tuple[Any, ...]] = {
    "rows": ((16, 32, 64), (16, 32, 64, 96), (16, 32, 64, 128), (16, 32, 64, 128, 256)),
    "out": (128, 256),
    "band": (2, 4, 8, 16),
    "most_stages": (3, 4, 6, 8),
    "cluster": (1, 2),
}
"""Values of each field that a search tries on Hopper GPUs."""


def hopper_tiles(
    device_kind: str,
    kind: Kind,
    products: int,
    widths: tuple[int, int],
    given: Fields | None = None,
) -> HopperTiles:
    """Returns the tiles for a call on a kind of device, as JAX names it.

    Args:
      kind: kind of the operands.
      products: number of weights in one pass; 2: gate and up.
      widths: widths of a row of the input and of the output.
      given: fields that a caller of the op sets.
    """
    kernel = "grouped_swiglu" if products == 2 else "grouped_matmul"
    call = f"{kernel} {widths[0]}->{widths[1]} {kind}"
    default = HOPPER_DEFAULT[kind, products]
    choices = dict(HOPPER_CHOICES)
    if kind in ("some rows in blocks", "many rows in blocks"):
        del choices["rows"]
    return tuned.in_force("grouped_matmul", device_kind, call, default, choices, given)
