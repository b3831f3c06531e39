"""The TPU kernel, interpreted on the CPU with a race detector, and its plans."""

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu, mosaic_tpu
from pallas_kernels.grouped_matmul.tiles import TPU, TpuTiles
from pallas_kernels.quantize import QuantArray
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.grouped_matmul.suite import GroupedMatmulSuite
from tests.pallas_kernels.tpu_races import no_race, race_is_reported  # noqa: F401

pytestmark = pytest.mark.unoptimised

TARGET = Target("mosaic_tpu", "TPU7 of this test", interpret=True)
# Several tiles of everything, in the sizes of the suite.
TILES = TpuTiles(
    tile_rows=48,
    steps=(16,),
    fp8_steps=(16,),
    block_steps=(16,),
    step_columns=128,
    rows_bytes=2**20,
    weights_bytes=1,
    vmem_bytes=2**25,
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(TPU, TARGET.device_kind, TILES)


@pytest.mark.usefixtures("no_race")
class TestMosaicTpu(GroupedMatmulSuite):
    target = TARGET

    def test_all_patterns(self, monkeypatch):
        """With products of several sizes."""
        tiles = TILES._replace(steps=(32, 16), step_columns=256, weights_bytes=2**20)
        monkeypatch.setitem(TPU, TARGET.device_kind, tiles)
        super().test_all_patterns()


def test_a_dropped_wait_is_noticed(monkeypatch):
    """The products would read weights that are still on their way."""
    eager = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    monkeypatch.setattr(mosaic_tpu, "INTERPRET", eager)
    arguments = (jnp.ones((8, 128)), jnp.ones((2, 128, 128)), jnp.asarray([3, 4], jnp.int32))

    def run():
        return mosaic_tpu.grouped_matmul(*arguments, TARGET)

    assert not race_is_reported(run)
    monkeypatch.setattr(mosaic_tpu, "wait", lambda copies: None)
    assert race_is_reported(run)


@pytest.mark.parametrize("function", [grouped_matmul, grouped_swiglu])
def test_rows_in_fp8_are_for_v7x(function):
    weights = QuantArray(jnp.zeros((2, 128, 128), jnp.float8_e4m3fn), jnp.ones((2, 128, 1)), (1, 0))
    count = 1 if function is grouped_matmul else 3
    arguments = (jnp.zeros((8, 128)), *[weights] * count, jnp.asarray([3, 4], jnp.int32))
    with use_target(Target("mosaic_tpu", "TPU v6 lite")):
        with pytest.raises(NotImplementedError, match=r"TPU v6 lite .* leave row_format None"):
            function(*arguments, row_format="fp8")
