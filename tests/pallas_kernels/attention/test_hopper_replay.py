"""The Hopper kernel as it ships, products from registers included, replayed in NumPy: its results,
and that it does not take the order of anything for granted."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import mosaic_gpu, mosaic_gpu_plan, paged_attention
from pallas_kernels.attention.mosaic_gpu_kernel import _Warpgroup
from tests.pallas_kernels.attention.suite import PADDING, Sizes, make_case
from tests.pallas_kernels.attention.test_mosaic_gpu import fitting
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay

PLAIN = Sizes()
WIDE = Sizes(q_heads=8, head_dim=320, v_width=384, shared=True)
"""Two warpgroups that share their rows, as for MLA."""
EIGHT_BITS = Sizes(cache="int8")
"""Two warpgroups, each with a range of its own."""
EIGHT_BITS_WIDE = Sizes(head_dim=256, v_width=256, cache="fp8")
"""Likewise, with room for one slot each, and for either keys or values that are converted."""
MANY_ROWS = Sizes(q_heads=72)
"""Two warpgroups, each with rows of its own."""
PAGE_SIZE = 64


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """One block of threads, which is soon at the end of its two stages."""
    monkeypatch.setattr(mosaic_gpu, "gpu_blocks", lambda target: 1)
    monkeypatch.setattr(mosaic_gpu_plan, "MOST_STAGES", 2)


def case(sizes, chunks=((260, 1), (70, 1))):
    return make_case(fitting(sizes), chunks, page_size=PAGE_SIZE, dtype=jnp.bfloat16)


def run(case):
    return replay(lambda *arguments: paged_attention(*arguments, **case.options), *case.arguments)


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        (PLAIN._replace(window=70), [(260, 1), PADDING, (70, 1)]),
        (PLAIN._replace(kv_heads=2, cache="fp8"), [(260, 1), (70, 1)]),
        (WIDE, [(200, 1), (70, 1)]),
        (WIDE._replace(cache="int8"), [(70, 1)]),
        (EIGHT_BITS_WIDE, [(140, 1)]),
        (EIGHT_BITS._replace(head_dim=128, v_width=64, shared=True), [(200, 1)]),
        (MANY_ROWS, [(70, 1)]),
        (PLAIN, [(70, 20)]),
    ],
)
def test_what_ships_gives_what_it_should(sizes, chunks):
    expected = case(sizes, chunks)
    output, lse = run(expected)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected.output, 0.4, 4e-2)
    np.testing.assert_allclose(lse, expected.lse, 1e-2, 4e-2)


@pytest.mark.parametrize("ranges", [3, 8, 11])
def test_partial_results(ranges, monkeypatch):
    """Of as many ranges as there are units and steps in one, of more ranges than there are steps:
    what nobody wrote is NaN here, and memory's last contents on a GPU."""
    monkeypatch.setattr(mosaic_gpu, "gpu_blocks", lambda target: ranges)
    expected = case(PLAIN, [(260, 1), PADDING, (70, 1)])
    output, lse = run(expected)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected.output, 0.4, 4e-2)
    np.testing.assert_allclose(lse, expected.lse, 1e-2, 4e-2)


RELEASE = """\
    if not self.converts:
        plgpu.barrier_arrive(smem.released.at[slot])
"""
PV = "    mixed = self._mix(mixed, weights.astype(smem.q_smem.dtype), slot)\n"
COMMIT = "plgpu.commit_smem()"
MEET = "self._meet()"
LOAD = "    layout = plgpu.Layout.WGMMA_UPCAST_4X\n"
START = '    self.walk.start(cursor, self.leads, (name, name + "_scales"))\n'


@pytest.mark.parametrize(
    ("method", "old", "new", "sizes", "said"),
    [
        # These four no other test notices.
        ("_attend_step", PV + RELEASE, RELEASE + PV, PLAIN, "a copy into it while wgmma may"),
        ("_mix", COMMIT, "pass", WIDE, "wgmma without a fence"),
        ("_convert", COMMIT, "pass", EIGHT_BITS, "wgmma without a fence"),
        ("_attend_unit", MEET + "  # All", "pass  # All", WIDE, "known"),
        # The interpreter notices some of these, too.
        ("_attend_step", "self._wait_until_loaded(slot)", "pass", PLAIN, "while wgmma may"),
        ("_attend_unit", "plgpu.barrier_wait(q_loaded)", "pass", PLAIN, "wgmma before a copy"),
        ("_wait_until_released", "plgpu.barrier_wait(", "id(", WIDE, "wgmma before a copy"),
        ("_mix", MEET, "pass", WIDE, "before a store of another"),
        ("_clear_unseen", COMMIT, "pass", PLAIN, "wgmma without a fence"),
        ("_attend_step", RELEASE, "", PLAIN, "wait for ever"),
        # Of two ranges.
        ("_convert", LOAD, START + LOAD, EIGHT_BITS, "a load before a copy"),
        (
            "_convert_values",
            'self._wait_until_loaded(slot, "v")',
            "pass",
            EIGHT_BITS,
            "a load be",
        ),
        ("_scores", "and not one_buffer", "", EIGHT_BITS_WIDE, "a store while wgmma may"),
        ("_of_step", "self.walker + zero(slot), :", "zero(slot), :", EIGHT_BITS_WIDE, "another"),
        ("_attend_unit", "q_smem.at[self.buffer]", "q_smem.at[0]", EIGHT_BITS, "before a copy"),
    ],
)
def test_an_order_that_is_taken_for_granted(method, old, new, sizes, said, monkeypatch):
    monkeypatch.setattr(_Warpgroup, method, mutated(getattr(_Warpgroup, method), (old, new)))
    with pytest.raises(Unordered, match=said):
        run(case(sizes))
