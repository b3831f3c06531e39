"""The way round a loop, in a program written by hand."""

import pytest

from pallas_kernels.bundles import Round, parse, shortest_round
from tests import golden

PROGRAM = golden.text("pallas_kernels/programs/loop.llo")


def test_bundles():
    bundles = parse(PROGRAM)
    assert len(bundles) == 15
    assert [bundle.copies for bundle in bundles] == [0] * 4 + [1, 2] + [0] * 9
    assert [bundle.matmuls for bundle in bundles] == [0] * 9 + [2, 1] + [0] * 4
    assert {at: bundle.target for at, bundle in enumerate(bundles) if bundle.target} == {
        2: 3,
        7: 5,
        12: 7,
    }
    assert [at for at, bundle in enumerate(bundles) if bundle.header] == [1]


@golden.table("pallas_kernels/rounds.yaml")
def test_the_shortest_way_that_does_the_work(copies, expected):
    assert shortest_round(parse(PROGRAM), copies, delay=1) == Round(expected, 3, copies)


def test_no_way_does_enough():
    with pytest.raises(ValueError, match="of 1 loops none multiplies and starts 4 copies"):
        shortest_round(parse(PROGRAM), 4, delay=1)


def test_another_text():
    with pytest.raises(ValueError, match="bundle 0x5 follows bundle 0x0"):
        parse("     0   :  { %s1 = smov.u32 0 }\n   0x5   :  {}\n")
