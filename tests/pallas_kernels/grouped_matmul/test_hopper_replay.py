"""The Hopper kernels of grouped products as they ship, weights from registers included, replayed in
NumPy: their results, and that they do not take the order of anything for granted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    grouped_matmul,
    grouped_swiglu,
    mosaic_gpu,
    mosaic_gpu_kernel,
    mosaic_gpu_scaled,
    mosaic_gpu_walk,
    mosaic_gpu_weights_first,
)
from pallas_kernels.quantize import quantize_weight
from pallas_kernels.quantize.product import quant_product
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.grouped_matmul.test_mosaic_gpu import FORMS, few_blocks, rows_come_first
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay
from tests.pallas_kernels.nightly import nightly

D_MODEL, D_FF = 256, 128

RELEASE = "release(context, stage)"
EARLY = (
    ("pl.when(index >= late)(lambda: release(context, context.stage_of(step - late)))", RELEASE),
    ("if late:", "if False:"),
)


ONE_BLOCK = [("if tiles.shared:", "if False:")]
NO_MEETING = [("for stage in range(context.tiles.stages)", "for stage in ()")]
READ = "a copy into it while wgmma may still read"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """One block of threads, which has two stages for all tiles."""
    few_blocks(monkeypatch, 1)


def call(format, row_format=None, tiles=None, *, sizes=(8, 13), zero_padding=True):
    """Two groups, of 8 and 13 rows, and three rows of none."""
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.normal(size=(2, *shape)) / 16, jnp.bfloat16)
        for shape in ((D_FF, D_MODEL), (D_FF, D_MODEL), (D_MODEL, D_FF))
    ]
    if format != "bf16":
        weights = [quantize_weight(array, format) for array in weights]
    rows = jnp.asarray(rng.normal(size=(24, D_MODEL)), jnp.bfloat16)
    sizes = jnp.asarray(sizes, jnp.int32)
    options = {"row_format": row_format, "tiles": tiles, "zero_padding": zero_padding}

    def product(rows, *weights):
        return grouped_swiglu(rows, *weights, sizes, **options)

    return product, (rows, *weights)


ALONE = {"cluster": 1}
"""Tiles for one block of threads."""


def replayed(format, row_format=None, tiles=ALONE):
    product, arguments = call(format, row_format, tiles)
    return np.asarray(replay(product, *arguments), np.float32)


def reference(format, row_format=None):
    product, arguments = call(format, row_format)
    with use_target(Target("reference", "cpu")):
        return np.asarray(jax.jit(product)(*arguments), np.float32)


def test_where_no_group_has_rows_no_tile_is_read_but_the_first(monkeypatch):
    """The list of tiles is empty; who loads ahead looks at it before the first step."""
    rows_come_first(monkeypatch)
    product, arguments = call("fp8_block", "fp8", sizes=(0, 0), zero_padding=False)
    replay(product, *arguments)
    clamped = "jnp.minimum(row_tile, total - 1)"
    changed = mutated(mosaic_gpu_walk._tile_at, (f"jnp.maximum({clamped}, 0)", clamped))
    monkeypatch.setattr(mosaic_gpu_walk, "_tile_at", changed)
    with pytest.raises(AssertionError, match="index -1 of"):
        replay(product, *arguments)


@pytest.fixture
def clusters(monkeypatch):
    """Blocks of which two form a cluster."""
    monkeypatch.setattr(mosaic_gpu, "processors", lambda target: 2)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("form", "format", "row_format", "tiles"),
    [
        # The first product shares weights, the second rows.
        ("weights", "bf16", None, {"rows": (128,)}),
        ("parts", "fp8_block", "fp8", {}),  # the second block has none of the rows
        ("rows", "fp8_block", "fp8", {}),  # likewise
    ],
)
def test_clusters_change_no_bit(form, format, row_format, tiles, monkeypatch):
    """A token's sums do not depend on the number of other tokens."""
    FORMS[form](monkeypatch)
    alone, together = (
        replayed(format, row_format, tiles | {"cluster": blocks}) for blocks in (1, 2)
    )
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together, reference(format, row_format), 5e-2, 5e-2)


def test_a_split_product_of_a_row_is_the_same_among_few():
    """Four parts of d_in; the last tile has rows of padding."""
    rng = np.random.default_rng(0)
    weights = quantize_weight(jnp.asarray(rng.normal(size=(1, 64, 2048))) / 32, "fp8_block")
    rows = jnp.asarray(rng.normal(size=(21, 2048)), jnp.bfloat16)

    def product(rows, weights):
        sizes, tiles = np.asarray([len(rows)], np.int32), {"rows": (16,)}
        return grouped_matmul(rows, weights, sizes, tiles=tiles)

    many, few = (replay(product, rows[:count], weights) for count in (21, 3))
    np.testing.assert_array_equal(few, many[:3])
    with use_target(Target("reference", "cpu")):
        expected = jax.jit(quant_product)(rows, jax.tree.map(lambda array: array[0], weights))
    np.testing.assert_allclose(np.asarray(many, np.float32), expected, 1e-2, 2e-2)


COMMIT, WAIT = "plgpu.commit_smem()", "plgpu.wait_smem_to_gmem(0, wait_read_only=True)"
LATE = "        release(context, stage)\n        return added"
KEPT = "        return added"
FEW_WAITS = [("wgmma_wait(late", "wgmma_wait(2 + late")]
NOT_MET = [("    meet(buffers)\n\n", "")]
GIVEN_BACK = [(LATE, KEPT), ("def add(", f"{RELEASE}\n\n        def add(")]


@pytest.mark.parametrize(
    ("form", "function", "changes", "format", "said"),
    [
        # No other test notices these three.
        ("weights", "_products", EARLY, "bf16", READ),
        ("weights", "_compute_tile", [(COMMIT, "pass")], "bf16", "a copy from it without a fence"),
        ("weights", "store_quantised", [(f"{COMMIT}\n    for", "for")], "fp8_block", "without"),
        ("parts", "_sum_up", GIVEN_BACK, "", READ),
        ("parts", "_store_part", [(COMMIT, "pass")], "", "a copy from it without a fence"),
        ("parts", "_store_part", [(WAIT, "pass")], "", "a store while a copy from it may"),
        ("rows", "_sum_up", GIVEN_BACK, "", READ),
        # The interpreter notices some of these, too.
        *nightly(
            ("weights", "_products", FEW_WAITS, "bf16", "while wgmma may"),
            ("weights", "_compute_tile", [(WAIT, "pass")], "bf16", "a store while a copy from it"),
            ("weights", "store_quantised", NOT_MET, "fp8_block", "warpgroup 1 may"),
        ),
    ],
)
def test_an_order_that_is_taken_for_granted(form, function, changes, format, said, monkeypatch):
    FORMS[form](monkeypatch)
    module = mosaic_gpu_weights_first if form == "weights" else mosaic_gpu_scaled
    monkeypatch.setattr(module, function, mutated(getattr(module, function), *changes))
    with pytest.raises(Unordered, match=said):
        replayed(
            format or "fp8_block",
            None if format == "bf16" else "fp8",
            ALONE if form == "parts" else None,
        )


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("form", "module", "function", "changes", "said"),
    [
        # A stage is given back by the consumers of one block, or by those of both too early.
        ("weights", mosaic_gpu_kernel, "_scratch_types", ONE_BLOCK, "wgmma before a copy into it"),
        ("weights", mosaic_gpu_weights_first, "_products", EARLY, READ),
        # The blocks do not meet at the end.
        ("weights", mosaic_gpu_kernel, "load", NO_MEETING, "ended before others reach its memory"),
        # One thread arrives for those that have loaded scales of rows.
        ("rows", mosaic_gpu_scaled, "release", [(COMMIT, "pass")], "threads may still load"),
    ],
)
def test_an_order_of_blocks_that_is_taken_for_granted(
    form, module, function, changes, said, monkeypatch
):
    FORMS[form](monkeypatch)
    monkeypatch.setattr(module, function, mutated(getattr(module, function), *changes))
    format, row_format = ("bf16", None) if form == "weights" else ("fp8_block", "fp8")
    with pytest.raises(Unordered, match=said):
        replayed(format, row_format, {"cluster": 2})
