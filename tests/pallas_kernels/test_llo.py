"""The way round a loop, in a program written by hand."""

import pytest

from pallas_kernels.llo import Round, parse, shortest_round

PROGRAM = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %v1 = vld [vmem:[%s1]] } /* Start region 7 */
   0x2   : > { %9 = sbr.rel (%p1) target = $region3 }
   0x3   :  {}
   0x4   : > { %8 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1 } /* Start region 2 */
   0x5   : > { %8 = dma.general [thread:$0] ;; %7 = dma.hbm_to_vmem [thread:$0] } /* End region 2 */
   0x6 PF: > { %p3 = scmp.gt.s32 %s1, 0 } /* Start/End empty region 3 :: Start region 4 */
   0x7   : > { %9 = sbr.rel (%p2) target = $region5 }
   0x8   :  {}
   0x9   : > { %v2 = vmatmul.bf16.mxu0 %v1 ;; %v3 = vmatmul.bf16.mxu1 %v1 }
   0xa   : > { %v2 = vmatmul.bf16.mxu0 %v1 } /* End region 4 */
   0xb PF: > { %v4 = vadd.f32 %v2, %v3 } /* Start/End empty region 5 */
   0xc   : > { %9 = sbr.rel (!%p3) target = $region7 }
   0xd   :  {}
   0xe   :  { %10 = dma.done.wait [#allocation1], 592 }
"""


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


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        (0, 11),  # leaps over the copies, 0x4 and 0x5
        (3, 13),  # all from 0x1 to 0xd
    ],
)
def test_the_shortest_way_that_does_the_work(copies, expected):
    assert shortest_round(parse(PROGRAM), copies, delay=1) == Round(expected, 3, copies)


def test_no_way_does_enough():
    with pytest.raises(ValueError, match="of 1 loops none multiplies and starts 4 copies"):
        shortest_round(parse(PROGRAM), 4, delay=1)


def test_another_text():
    with pytest.raises(ValueError, match="bundle 0x5 follows bundle 0x0"):
        parse("     0   :  { %s1 = smov.u32 0 }\n   0x5   :  {}\n")
