"""Which tiles a call of the Hopper kernel gets, and whether its blocks form clusters.

Called by `mosaic_gpu.py`. Everything follows from sizes that are known when a call is traced.
"""

import functools
import math

from jaxtyping import Array

from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    CLUSTER,
    PART_COLUMNS,
    Shared,
    Tiles,
    shared_memory,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS
from pallas_kernels.grouped_matmul.tiles import OP, HopperTiles, Kind, hopper_tiles
from pallas_kernels.quantize import QuantArray
from pallas_kernels.quantize.product import ROW_BLOCK
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, require

SHARED_MEMORY = 231_424
"""Bytes of a CTA's 232,448 that buffers may take; the rest is for barriers."""

BYTES: tuple[Kind, ...] = (
    "int8",
    "int8 blocks",
    "rows in blocks",
    "some rows in blocks",
    "many rows in blocks",
)
"""Kinds of operands whose rows are in 8 bits."""

SPLIT: tuple[Kind, ...] = ("int8 blocks", "converted blocks")
"""Kinds of which a long d_in may be split: their sums are added up in FP32 anyway."""

ROW_PARTS = 2  # of "some rows in blocks"
FEW_COLUMNS = 33  # of tiles, a quarter of an H200's multiprocessors
MOST_SPLITS = 4  # all of which are written, and read again
LEAST_STEPS = 16  # worth it

WeightArray = Array | QuantArray


def pick_tiles(
    rows: int,
    weights: tuple[WeightArray, ...],
    groups: int,
    target: Target,
    kind: Kind,
    quantises: bool = False,
    given: Fields | None = None,
    *,
    average: int | None = None,
    one_group: bool = False,
) -> Tiles:
    """The tiles for a call: its row tile holds a group of average size, if it may be that large.

    Of rows in blocks that are some, not many, a tile holds two standard deviations more than the
    average, where tokens choose by chance: one group in 40 takes a second tile, the others read
    their weights once. 128 rows of each of Step-3's whole experts take 80 µs in tiles of 160, and
    118 in pairs of 128, by counts; of eighths of its experts 89 and 106.

    Two blocks form a cluster where an average group fills the largest row tile: half of such groups
    have more rows, by chance. With fewer what takes time is weights, which come from memory, and
    not that blocks read them again from the L2 cache; with more they would: 192 rows of each of
    Step-3's whole experts take 158 µs alone and 118 in pairs, by counts. Of one group tiles for few
    rows form it, and none is for many: nothing else fills multiprocessors. 128 rows of Step-3's
    whole shared expert, in 80 and 112 tiles, take 29 µs by the same counts, as do 256 of half of
    it; in 40 and 28 they took 57.

    Args:
      average: rows of a group, if not all rows over all groups.
      one_group: there is one group, and all rows are known to be its.

    Raises:
      ValueError: tiles that a caller gave do not fit.
    """
    given = given or {}
    first = weights[0]
    d_out, d_in = first.shape[1:]
    # Groups begin anywhere in a block of rows, and no group is of average size.
    average = rows // groups if average is None else average
    wanted = min(rows, average * 5 // 4 + BLOCK_ROWS)
    find = functools.partial(hopper_tiles, target.device_kind, products=len(weights))
    entry = find(kind, widths=(d_in, d_out), given=given)
    many = wanted > entry.rows[-1] and not one_group
    if kind == "rows in blocks" and many and "rows" not in given:
        some: Kind = "some rows in blocks"
        wanted = average + 2 * math.isqrt(average) + BLOCK_ROWS
        if wanted <= find(some, widths=(d_in, d_out), given=given).rows[-1]:
            kind = some
        elif _has_whole_parts(first):
            kind = "many rows in blocks"
        entry = find(kind, widths=(d_in, d_out), given=given)
    rows_first = kind == "many rows in blocks"
    _check_given(given, entry, find(kind, widths=(d_in, d_out)), quantises)
    row_tile = next((size for size in entry.rows if size >= wanted), entry.rows[-1])
    if groups == 1:  # whose rows are all there are: no larger a tile than as many of them need
        count = -(-rows // row_tile)
        if one_group and count > 1 and entry.cluster > 1:  # pairs
            count += count % CLUSTER
        row_tile = next(size for size in entry.rows if -(-rows // size) <= count)
    inner = inner_of(first)
    out = ROW_BLOCK if quantises else entry.out
    tiles = Tiles(row_tile, out, inner, 1, entry.consumers, entry.band, rows_first)
    if kind == "some rows in blocks":
        tiles = tiles._replace(row_parts=ROW_PARTS)
    row_bytes = 1 if kind in BYTES else 2
    splits = _splits(-(-d_out // out), d_in // inner)
    if one_group and kind in SPLIT and splits > 1:
        tiles = tiles._replace(splits=splits)
    elif entry.cluster > 1:
        of_weights = out * len(weights) * first.dtype.itemsize
        most: Shared = "rows" if row_tile * row_bytes >= of_weights else "weights"
        fills = row_tile if groups > 1 else CLUSTER * row_tile  # one has as many rows as there are
        enough = "cluster" in given or average >= fills
        tiles = tiles._replace(shared=_shared(tiles, d_out, most, enough=enough))
    fixed, stage = shared_memory(
        tiles,
        len(weights),
        first.dtype.itemsize,
        row_bytes,
        quantises=quantises,
        scales="rows in blocks" in kind,
    )
    if "most_stages" in given:
        fitting = (SHARED_MEMORY - fixed) // stage
        limits = f"2 to {fitting}, which fill the shared memory"
        require(2 <= entry.most_stages <= fitting, OP, "most_stages", entry.most_stages, limits)
    if target.interpret:  # there, FP8 is converted in SMEM; and races show with few stages
        return tiles._replace(stages=2)
    return tiles._replace(stages=min(entry.most_stages, (SHARED_MEMORY - fixed) // stage))


def _check_given(given: Fields, tiles: HopperTiles, default: HopperTiles, quantises: bool) -> None:
    """Refuses tiles of a caller that are no multiples, or need more registers than there are.

    Raises:
      ValueError: naming the field and its limits.
    """
    if "cluster" in given:
        require(tiles.cluster in (1, CLUSTER), OP, "cluster", tiles.cluster, f"1 or {CLUSTER}")
    if "out" in given:
        unit = 64 * tiles.consumers
        most = default.rows[-1] * default.out // tiles.rows[0]
        fits = tiles.out % unit == 0 and tiles.out <= most
        limits = f"a multiple of {unit} up to {most}, with rows {tiles.rows[0]}"
        if quantises:
            fits, limits = tiles.out == ROW_BLOCK, f"{ROW_BLOCK}, the columns that share a scale"
        require(fits, OP, "out", tiles.out, limits)
    if "rows" in given:
        most = default.rows[-1] * default.out // tiles.out
        fits = tiles.rows == tuple(sorted(set(tiles.rows))) and tiles.rows[-1] <= most
        fits &= all(size % 16 == 0 for size in tiles.rows)
        limits = f"ascending multiples of 16 up to {most}, with out {tiles.out}"
        require(fits, OP, "rows", tiles.rows, limits)


def _has_whole_parts(weights: WeightArray) -> bool:
    """Whether no part of columns that is summed up at once has scales of two blocks."""
    assert isinstance(weights, QuantArray)
    return is_per_channel(weights) or weights.block[0] % PART_COLUMNS == 0


def _splits(columns: int, steps: int) -> int:
    """Parts of d_in that CTAs add up by themselves: more, where columns of tiles are too few for
    the multiprocessors. Rows do not count, so that a row has the same sums among any number."""
    few = steps >= LEAST_STEPS and columns <= FEW_COLUMNS
    return next(part for part in (MOST_SPLITS, 2, 1) if part == 1 or (few and steps % part == 0))


def _shared(tiles: Tiles, d_out: int, most: Shared, *, enough: bool) -> Shared:
    """What the blocks of a cluster load together: that of which a tile has `most` bytes, if rows
    are `enough`. Where a tile has all rows of a group, these, however many they are.

    But the last columns would be nobody's if one of two blocks that share rows had none.
    """
    whole = -(-d_out // tiles.out) % CLUSTER == 0
    if tiles.row_parts:
        return "rows" if whole else ""
    if not enough:
        return ""
    return most if whole else "weights"


def is_per_channel(weights: QuantArray) -> bool:
    """Whether scales can be applied to finished sums."""
    block_in = weights.block[1]
    return block_in == 0 or block_in >= weights.shape[2]


def inner_of(weights: WeightArray) -> int:
    """Values of d_in a step: 128 bytes, what a row of a swizzled operand may span, or 64."""
    is_wide = isinstance(weights, QuantArray) and weights.shape[2] % 128 == 0
    return 128 if is_wide else 64
