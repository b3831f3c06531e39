"""Bytes that a compiled program moves, read from its text; XLA needs no help with small ops."""

import pytest

from pallas_kernels import aot, gpu_resources
from pallas_kernels.small_ops import Traffic, instructions, small_ops, traffic
from tests import golden
from tests.pallas_kernels import gpu_aot


def program(name):
    return golden.text(f"pallas_kernels/programs/{name}.hlo")


@golden.table("pallas_kernels/moved_bytes.yaml")
def test_bytes_that_a_program_moves(name, count, moved):
    assert traffic(program(name)) == Traffic(instructions=count, bytes=sum(moved))


def test_what_starts_counts_once():
    """32 are sent and 64 arrive, and what ends it is nothing."""
    plain = program("collectives")
    started = plain.replace(
        "%all_gather.1 = u8[8,8]{1,0} all-gather(%x.1)",
        "%start = ((u8[4,8]{1,0}), u8[8,8]{1,0}) all-gather-start(%x.1), channel_id=1\n"
        "  %all_gather.1 = u8[8,8]{1,0} all-gather-done(%start)",
    )
    assert traffic(started) == traffic(plain)
    assert [one.op for one in instructions(started)] == [
        *("all-gather-start", "all-gather-done", "fusion", "custom-call")
    ]


def test_least_bytes():
    least = {op.name: op.least for op in small_ops()}
    # 128 x 7168 in BF16 and in INT8, the norm's weight, a scale a row.
    assert least["norm and quantise"] == 1_835_008 + 917_504 + 14_336 + 512
    # x and what is added to it, the norm's weight, the router's; x, and rows with a scale, three
    # ids and gates.
    wire = 3 * 1_835_008 + 14_336 + 688_128 + 128 * (7168 + 4 + 3 * 8)
    assert least["attention to wire"] == least["to wire, with op"] == wire
    # 128 tokens and 48 experts of 7168 in BF16, three ids and gates a token.
    assert least["route step3"] == 1_835_008 + 688_128 + 128 * 3 * 8


def measured(generation):
    """The command's table: instructions and ratio by op."""
    command = "pallas_kernels.small_ops", "--generation", generation
    names = [op.name for op in small_ops()]
    printed = gpu_aot.lines_of(*command, env=aot.environment(), limit=500)
    lines = [line for line in printed if line.startswith(tuple(names))]
    fields = [line.removeprefix(name).split() for name, line in zip(names, lines, strict=True)]
    return {name: (int(each[1]), float(each[-1])) for name, each in zip(names, fields, strict=True)}


@pytest.mark.tpu_aot
def test_xla_moves_hardly_more_than_it_has_to():
    """All but the norm where it stands alone, which reads its rows twice."""
    pytest.importorskip("libtpu")
    ratios = {name: ratio for name, (_, ratio) in measured("v6e").items()}
    assert ratios.pop("norm and quantise") < 1.75
    assert max(ratios.values()) < 1.1, ratios


@pytest.mark.gpu_aot
@gpu_aot.NEEDS_CUDA
def test_the_op_saves_launches_on_a_gpu():
    found = measured("h200")
    (alone, ratio), (with_op, less) = found["attention to wire"], found["to wire, with op"]
    assert with_op <= alone - 2
    assert less < ratio


@pytest.mark.skipif(gpu_resources.plugin() is not None, reason="has JAX's CUDA wheels")
def test_a_gpu_takes_the_cuda_wheels():
    message = r'after : there is no CUDA plugin: pip install "jax\[cuda13\]"$'
    with pytest.raises(AssertionError, match=message):
        gpu_aot.lines_of("pallas_kernels.small_ops", "--generation", "h200", limit=300)
