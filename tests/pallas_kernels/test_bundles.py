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
@pytest.mark.parametrize(
    ("case", "size", "most"),
    [
        *(("step3 fp8", 520, 1.1), ("deepseek-v4 bf16 128 rows", 256 * 1024, 1.3)),
        ("deepseek-v4 bf16 256 rows", 256 * 1024, 1.1),
    ],
)
def test_attention_is_near_the_memory(case, size, most):
    """A change that breaks the interleaving of stages shows here. A window touches two pages."""
    pytest.importorskip("libtpu")
    (floor,) = floors(["attention"], ["v7x"], [case])
    assert floor.memory == pytest.approx(size / (3690 / 2.2))
    assert floor.ratio() <= most
