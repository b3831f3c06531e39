"""Machine code with control codes: a program written by hand, and a loop of a real kernel."""

from pathlib import Path

import pytest

from pallas_kernels.estimate import sass
from pallas_kernels.estimate.assumptions import LATENCIES
from tests import golden

REAL = Path(__file__).with_name("grouped_bf16.sass")
"""A grouped product in BF16, 256 rows a tile (jax 0.12.0.1, ptxas of CUDA 13.5)."""

PROGRAM = golden.text("pallas_kernels/programs/loop.sass")


def test_instructions():
    program = sass.parse(PROGRAM)
    assert [one.stall for one in program] == [1, 2, 4, 5, 9, 1, 2, 5, 5]
    assert [one.op for one in program][1:4] == ["LDS", "FADD", "BRA"]
    assert (program[1].write, program[1].waits, program[2].waits) == (0, (), (0,))
    assert program[5].waits == (1, 0)
    assert (program[5].columns, program[5].depth) == (64, 16)
    assert (program[5].from_registers, program[5].ends_group) == (True, True)
    assert [(one.target, one.conditional) for one in program if one.target is not None] == [
        (5, True),
        (1, True),
        (5, False),
    ]


def test_the_way_round():
    """A jump back without a condition is no loop, and the cheaper branch is taken, unless the
    other one has what is looked for."""
    program = sass.parse(PROGRAM)
    assert sass.loops(program) == [(1, 7)]
    assert sass.way(program, 1, 7, {5}) == [1, 2, 3, 5, 6, 7]
    assert sass.way(program, 1, 7, {4, 5}) == [1, 2, 3, 4, 5, 6, 7]


def test_cycles_of_a_turn():
    """29 for the load, then 4 and 5 stalls, 32 for 64 columns of wgmma, then 2 and 5."""
    program = sass.parse(PROGRAM)
    cost = sass.cost(program, sass.way(program, 1, 7, {5}), LATENCIES)
    assert cost.chain == 29 + 4 + 5 + 32 + 2 + 5
    assert (cost.issued, cost.tensor, cost.columns) == (6, 32, 64)
    assert cost.flops == 2 * 64 * 64 * 16
    assert cost.pipes == {"lsu": 4, "fma": 1, "issue": 4}


def test_a_real_loop_is_as_fast_as_the_tensor_cores():
    """Four products of 256 columns, of which one group is always in flight."""
    program = sass.parse(REAL.read_text())
    ((first, last),) = sass.loops(program)
    over = {at for at, one in enumerate(program) if one.columns}
    cost = sass.cost(program, sass.way(program, first, last, over), LATENCIES)
    assert len(over) == 4
    assert (cost.chain, cost.tensor) == (512, 512)
    assert cost.flops == 4 * 2 * 64 * 256 * 16


@golden.table("pallas_kernels/no_sass.yaml")
def test_another_text(text, said):
    with pytest.raises(ValueError, match=said):
        sass.parse(text)
