"""Picks the tiles for a call of the Hopper kernel, and whether its blocks form clusters.

Called by `mosaic_gpu.py`. Everything follows from sizes that are known when a call is traced.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    CLUSTER,
    PART_COLUMNS,
    ROW_PARTS,
    SPARE_SCALES,
    Shared,
    Tiles,
    shared_memory,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS
from pallas_kernels.grouped_matmul.tiles import OP, HopperTiles, Kind, hopper_tiles
from pallas_kernels.mosaic_gpu import processors
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

SPLIT: tuple[Kind, ...] = ("int8 blocks", "converted blocks", "rows in blocks")
"""Kinds of operands for which a long d_in may be split: their sums are added up in FP32 anyway."""

PRODUCTS = 32  # products of a row and a column (128 values of 8 bits each) in a cycle
SCALED = 50  # such products scaled in a cycle, by a warpgroup that has nothing else to do
L2_BYTES = 27  # a cycle, for every multiprocessor, by `pallas_kernels/estimate/assumptions.py`
MEMORY_BYTES = 18.6  # likewise
FEW_COLUMNS = 33  # columns of tiles: a quarter of an H200's multiprocessors
MOST_SPLITS = 4  # each is written to memory and read again
LEAST_STEPS = 16  # steps of d_in that make splitting worthwhile

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
    """Returns the tiles for a call: a row tile holds a group of average size, if it may be that
    large.

    Two blocks form a cluster where an average group fills the largest row tile: by chance, half of
    such groups have more rows. For smaller groups the time goes into weights from memory, not into
    blocks that read them again from the L2 cache; sharing would not help.

    For rows in blocks, all tiles are tried (see `_quickest`) if an average group exceeds the
    largest tile for few rows and fits into two blocks, or if all rows are one group.

    Args:
      average: expected rows of a group, if not all rows over all groups.
      one_group: all rows are known to belong to a single group.

    Raises:
      ValueError: tiles that a caller gave do not fit.
    """
    given = given or {}
    first = weights[0]
    d_out, d_in = first.shape[1:]
    average = rows // groups if average is None else average
    # Groups begin anywhere in a block of rows, and no group is of average size.
    wanted = min(rows, average * 5 // 4 + BLOCK_ROWS)
    find = functools.partial(
        hopper_tiles, target.device_kind, products=len(weights), widths=(d_in, d_out)
    )
    entry = find(kind, given=given)
    many = wanted > entry.rows[-1] and "rows" not in given
    row_bytes = 1 if kind in BYTES else 2
    forms: list[Tiles] = []
    at_once = rows if one_group else average + 2 * math.isqrt(average) + BLOCK_ROWS // 2
    is_split = one_group and kind in SPLIT and not quantises
    is_split = is_split and _splits(-(-d_out // entry.out), d_in // inner_of(first)) > 1
    in_blocks = kind == "rows in blocks" and not is_split
    if in_blocks and (many or one_group) and not {"rows", "out"} & given.keys():
        _check_given(given, entry, find(kind), quantises)
        found = _forms(find, weights, quantises, given, one_group=one_group)
        forms = [tiles for tiles in found if one_group or tiles.listed_rows >= at_once]
    if forms:
        filled = min(groups, max(1, rows // average))
        tiles = _quickest(forms, weights, at_once, filled, processors(target))
    else:
        rows_first = in_blocks and many and _has_whole_parts(first)
        if rows_first:
            kind = "many rows in blocks"
            entry = find(kind, given=given)
        _check_given(given, entry, find(kind), quantises)
        row_tile = next((size for size in entry.rows if size >= wanted), entry.rows[-1])
        if groups == 1:  # with all rows: the smallest tile that needs no more tiles
            count = -(-rows // row_tile)
            row_tile = next(size for size in entry.rows if -(-rows // size) == count)
        inner = inner_of(first)
        out = ROW_BLOCK if quantises else entry.out
        tiles = Tiles(row_tile, out, inner, 1, entry.consumers, entry.band, rows_first)
        if is_split:
            tiles = tiles._replace(splits=_splits(-(-d_out // out), d_in // inner))
        elif entry.cluster > 1:
            of_weights = out * len(weights) * first.dtype.itemsize
            most: Shared = "rows" if row_tile * row_bytes >= of_weights else "weights"
            fills = row_tile if groups > 1 else CLUSTER * row_tile  # one group: its size is known
            enough = "cluster" in given or average >= fills
            tiles = tiles._replace(shared=_shared(tiles, d_out, most) if enough else "")
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
    """Refuses a caller's tiles that are no multiples, or need more registers than exist.

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
    """Whether each part of columns that is summed up at once lies in one block of scales."""
    assert isinstance(weights, QuantArray)
    return is_per_channel(weights) or weights.block[0] % PART_COLUMNS == 0


def _splits(columns: int, steps: int) -> int:
    """Returns the parts of d_in that CTAs add up separately: several if columns of tiles are too
    few for the multiprocessors. Rows do not count, so that a row always has the same sums."""
    few = steps >= LEAST_STEPS and columns <= FEW_COLUMNS
    return next(part for part in (MOST_SPLITS, 2, 1) if part == 1 or (few and steps % part == 0))


def _shared(tiles: Tiles, d_out: int, most: Shared) -> Shared:
    """Returns which operand the blocks of a cluster load together: `most`, the one with most bytes.

    With an odd number of column tiles they share weights: if they shared rows, one of the last two
    blocks would have no columns.
    """
    return "weights" if -(-d_out // tiles.out) % CLUSTER else most


def _forms(
    find: Callable[..., HopperTiles],
    weights: tuple[WeightArray, ...],
    quantises: bool,
    given: Fields,
    *,
    one_group: bool,
) -> Iterator[Tiles]:
    """Yields all tiles for rows in blocks, without clusters and with every kind of cluster; tiles
    for few rows only if all rows are one group."""
    d_out = weights[0].shape[1]
    kinds: list[Kind] = ["some rows in blocks"]
    kinds += ["many rows in blocks"] if _has_whole_parts(weights[0]) else []
    kinds += ["rows in blocks"] if one_group else []
    for kind in kinds:
        entry = find(kind, given=given)
        out = ROW_BLOCK if quantises else entry.out
        of_kind = Tiles(0, out, inner_of(weights[0]), 1, entry.consumers, entry.band)
        of_kind = of_kind._replace(
            rows_first=kind == "many rows in blocks",
            in_parts=kind == "some rows in blocks",
        )
        clusters: list[Shared] = ["rows"] if -(-d_out // out) % CLUSTER == 0 else []
        for rows in entry.rows:
            # From 40 rows on, wgmma multiplies integers only by multiples of 16 rows.
            if of_kind.in_parts and weights[0].dtype == jnp.int8 and rows // ROW_PARTS % 16:
                continue
            # The second block begins at most a tile after the last row.
            some: list[Shared] = ["weights"] if CLUSTER * rows <= SPARE_SCALES else []
            some += clusters
            shared: list[Shared] = [] if "cluster" in given and entry.cluster > 1 and some else [""]
            shared += some if entry.cluster > 1 else []
            yield from (of_kind._replace(rows=rows, shared=one) for one in shared)


def _quickest(
    forms: Sequence[Tiles],
    weights: tuple[WeightArray, ...],
    rows: int,
    groups: int,
    processors: int,
) -> Tiles:
    """Returns the tiles that take the fewest cycles, by what `pallas_kernels/estimate` counts in
    machine code: turns of the busiest multiprocessor, reads from the L2 cache, or reads from
    memory.

    128 rows of each of Step-3's whole experts take 80 µs in tiles of 160, which read weights once,
    and 118 in pairs of 128 that share them. 192 rows took 158 in single tiles of 128 and 118 in
    such pairs; they take 110 with pairs of 112 for down.

    Args:
      rows: rows that most groups do not exceed: where tokens choose by chance, two standard
        deviations more than the average.
      groups: number of groups with rows.
    """
    d_out = weights[0].shape[1]

    def cycles(tiles: Tiles) -> tuple[float, float]:
        columns = tiles.out * len(weights)
        places = groups * -(-rows // tiles.listed_rows) * -(-d_out // tiles.listed_out)
        blocks = places * (CLUSTER if tiles.shared else 1)
        products = tiles.rows * columns
        beside = 330 if tiles.in_parts else 200 if tiles.rows_first else 240
        alone = beside + (1 / PRODUCTS + 1 / SCALED) * products / tiles.consumers
        turns = -(-blocks // processors) * max(products / PRODUCTS, alone)
        of_rows = tiles.rows / (CLUSTER if tiles.shared == "rows" else 1)
        of_columns = columns / (CLUSTER if tiles.shared == "weights" else 1)
        of_all = tiles.inner / processors  # bytes of a row or column, on a multiprocessor
        read = blocks * (of_rows + of_columns) * of_all / L2_BYTES
        once = groups * len(weights) * d_out * of_all / MEMORY_BYTES
        return max(turns, read, once), turns

    return min(forms, key=cycles)


def is_per_channel(weights: QuantArray) -> bool:
    """Whether scales can be applied to finished sums."""
    block_in = weights.block[1]
    return block_in == 0 or block_in >= weights.shape[2]


def inner_of(weights: WeightArray) -> int:
    """Returns the values of d_in a step: 128 bytes, the most of a swizzled operand's row, or 64."""
    is_wide = isinstance(weights, QuantArray) and weights.shape[2] % 128 == 0
    return 128 if is_wide else 64
