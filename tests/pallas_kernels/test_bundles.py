"""The table of floors, and one kernel measured."""

import pytest

from pallas_kernels import aot
from pallas_kernels.bundles import HEADER, OPS, Floor, floors, line


def test_table():
    found = [
        Floor("attention", "step3 bf16", "v5e", "KV token", 0.5, 2.0),
        Floor("attention", "step3 fp8", "v7x", "KV token", 0.45, 0.3),
    ]
    assert [HEADER, *map(line, found)] == [
        "op              case                   TPU   bundles  DMA floor  ratio",
        "attention       step3 bf16             v5e     0.500      2.000   0.25  a KV token",
        "attention       step3 fp8              v7x     0.450      0.300   1.50  a KV token",
    ]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_every_op_has_cases(op, generation):
    assert any(case.loop for case in aot.cases(op, generation))


@pytest.mark.tpu_aot
def test_fp8_attention_of_step3_is_near_the_memory():
    """A change that breaks the interleaving of the two stages shows here.

    The same kernel takes 1.69 times its DMA time with libtpu 0.0.50 and 1.56 with 0.0.52.
    """
    pytest.importorskip("libtpu")
    (floor,) = floors(["attention"], ["v7x"], ["step3 fp8"])
    # Keys, values and a scale of each: 520 bytes.
    assert floor.memory == pytest.approx(520 / (3690 / 2.2))
    assert floor.ratio() <= 1.7
