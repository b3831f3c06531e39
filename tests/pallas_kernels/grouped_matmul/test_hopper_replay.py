"""The Hopper kernels of grouped products as they ship, weights from registers included, replayed in
NumPy: their results, and that they do not take the order of anything for granted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    grouped_swiglu,
    mosaic_gpu,
    mosaic_gpu_rows_first,
    mosaic_gpu_weights_first,
)
from pallas_kernels.quantize import quantize_weight
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.grouped_matmul.test_mosaic_gpu import rows_come_first
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay

D_MODEL, D_FF = 256, 128


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """One block of threads, which has two stages for all tiles."""
    monkeypatch.setattr(mosaic_gpu, "processors", lambda target: 1)
    pick = mosaic_gpu.pick_tiles
    monkeypatch.setattr(
        mosaic_gpu,
        "pick_tiles",
        lambda *arguments, **options: pick(*arguments, **options)._replace(stages=2),
    )


def call(format, row_format=None):
    """Two groups, of 8 and 13 rows, and three rows of none."""
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.normal(size=(2, *shape)) / 16, jnp.bfloat16)
        for shape in ((D_FF, D_MODEL), (D_FF, D_MODEL), (D_MODEL, D_FF))
    ]
    if format != "bf16":
        weights = [quantize_weight(array, format) for array in weights]
    rows = jnp.asarray(rng.normal(size=(24, D_MODEL)), jnp.bfloat16)
    sizes = jnp.asarray([8, 13], jnp.int32)

    def product(rows, *weights):
        return grouped_swiglu(rows, *weights, sizes, row_format=row_format)

    return product, (rows, *weights)


@pytest.mark.parametrize(
    ("format", "row_format", "first"),
    [
        ("bf16", None, "weights"),
        ("fp8", None, "weights"),
        ("int8", None, "weights"),
        ("fp8_block", "fp8", "weights"),
        ("fp8_block", "fp8", "rows"),
    ],
)
def test_what_ships_gives_what_it_should(format, row_format, first, monkeypatch):
    if first == "rows":
        rows_come_first(monkeypatch)
    product, arguments = call(format, row_format)
    found = replay(product, *arguments)
    with use_target(Target("reference", "cpu")):
        expected = jax.jit(product)(*arguments)
    found, expected = (np.asarray(array, np.float32) for array in (found, expected))
    np.testing.assert_allclose(found, expected, 5e-2, 5e-2)
    assert np.abs(expected).max() > 1


RELEASE = "release(context, stage)"
COMMIT, WAIT = "plgpu.commit_smem()", "plgpu.wait_smem_to_gmem(0, wait_read_only=True)"
EARLY = (
    ("pl.when(index >= late)(lambda: release(context, context.stage_of(step - late)))", RELEASE),
    ("if late:", "if False:"),
)


@pytest.mark.parametrize(
    ("function", "changes", "format", "said"),
    [
        # No other test notices these three.
        ("_products", EARLY, "bf16", "a copy into it while wgmma may still read"),
        ("_compute_tile", [(COMMIT, "pass")], "bf16", "a copy from it without a fence"),
        ("store_quantised", [(COMMIT + "\n    for", "for")], "fp8_block", "a copy from it without"),
        # The interpreter notices some of these, too.
        ("_products", [("wgmma_wait(late", "wgmma_wait(2 + late")], "bf16", "while wgmma may"),
        ("_compute_tile", [(WAIT, "pass")], "bf16", "a store while a copy from it may"),
        ("store_quantised", [("    meet(buffers)\n\n", "")], "fp8_block", "warpgroup 1 may still"),
    ],
)
def test_an_order_that_is_taken_for_granted(function, changes, format, said, monkeypatch):
    module = mosaic_gpu_weights_first
    monkeypatch.setattr(module, function, mutated(getattr(module, function), *changes))
    product, arguments = call(format, None if format == "bf16" else "fp8")
    with pytest.raises(Unordered, match=said):
        replay(product, *arguments)


def test_rows_first_release_a_stage_after_their_products(monkeypatch):
    rows_come_first(monkeypatch)
    module, late = mosaic_gpu_rows_first, "        release(context, stage)\n        return added"
    early = "left = scratch"
    changes = [(late, "        return added"), (early, f"{RELEASE}\n        {early}")]
    monkeypatch.setattr(module, "_sums", mutated(module._sums, *changes))
    product, arguments = call("fp8_block", "fp8")
    with pytest.raises(Unordered, match="a copy into it while wgmma may still read"):
        replay(product, *arguments)
