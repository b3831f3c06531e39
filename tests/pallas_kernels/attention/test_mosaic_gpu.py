"""The Hopper kernel as it ships, products from registers included, replayed in NumPy: its results,
that it does not take the order of anything for granted, and who does what."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import mosaic_gpu, mosaic_gpu_plan, paged_attention, reference, tiles
from pallas_kernels.attention.api import _call_gap
from pallas_kernels.attention.mosaic_gpu_kernel import _Warpgroup
from pallas_kernels.attention.two_terms import in_two_terms
from pallas_kernels.mosaic_gpu import processors
from pallas_kernels.target import Target, current_target
from tests import golden
from tests.pallas_kernels.attention.suite import PADDING, PagedAttentionSuite, Sizes
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import TARGET, mutated, replay
from tests.pallas_kernels.nightly import nightly

PLAIN = Sizes()
WIDE = Sizes(q_heads=8, head_dim=320, v_width=384, shared=True)
"""Two warpgroups that share their rows, as for MLA."""
EIGHT_BITS = Sizes(cache="int8")
"""Two warpgroups, each with a range of its own."""
EIGHT_BITS_WIDE = Sizes(head_dim=256, v_width=256, cache="int8")
"""Likewise, with room for one slot each, and for either keys or values that are converted."""
FP8_WIDE = EIGHT_BITS_WIDE._replace(cache="fp8")
"""Likewise, and keys are multiplied where they are."""
MANY_ROWS = Sizes(q_heads=72)
"""Two warpgroups, each with rows of its own."""


@pytest.fixture
def small(monkeypatch):
    """One block of threads, which is soon at the end of its two stages."""
    monkeypatch.setattr(mosaic_gpu, "gpu_blocks", lambda target: 1)
    monkeypatch.setattr(mosaic_gpu_plan, "MOST_STAGES", 2)


def fitting(sizes):
    """The same case at sizes that the kernels cover: they would leave the others to XLA."""
    return sizes._replace(
        head_dim=-(-sizes.head_dim // 64) * 64 + 64 * sizes.shared,
        v_width=-(-sizes.v_width // 64) * 64,
        cache="bfloat16" if sizes.cache == "float32" else sizes.cache,
    )


@pytest.mark.usefixtures("small")
class TestMosaicGpu(PagedAttentionSuite):
    block, item_tokens = 64, 32
    edge_tolerance = 1e-2

    def compiled(self, case):
        def attend(*arguments):
            return paged_attention(*arguments, **case.options)

        return lambda *arguments: replay(attend, *arguments)

    def case(self, sizes, chunks, **options):
        return super().case(fitting(sizes), chunks, **options | {"dtype": jnp.bfloat16})

    def check(self, case, tolerance=4e-2):
        queries, k_pages, v_pages, table, *_ = case.arguments
        width = case.options["v_width"] if v_pages is None else v_pages.shape[3]
        cache = reference.Cache(k_pages, v_pages, None, None, width)
        assert not _call_gap(TARGET, queries, cache, table)
        super().check(case, tolerance)

    @pytest.mark.parametrize(
        ("sizes", "chunks"),
        [
            (PLAIN._replace(kv_heads=2, cache="fp8"), [(260, 1), (70, 1)]),
            (WIDE, [(200, 1), (70, 1)]), (WIDE._replace(cache="int8"), [(70, 1)]),
            (EIGHT_BITS_WIDE, [(140, 1)]), (FP8_WIDE, [(140, 1)]),
            (EIGHT_BITS._replace(head_dim=128, v_width=64, shared=True), [(200, 1)]),
            (MANY_ROWS, [(70, 1)]), (PLAIN, [(70, 20), PADDING, (40, 36)]),
        ],
    )  # fmt: skip
    def test_sizes(self, sizes, chunks):
        """Several warpgroups share rows, or have ranges of their own; pages are blocks."""
        self.page_size = 64
        case = self.case(sizes, chunks)
        self.check(case._replace(options=case.options | {"runs": len(chunks)}))

    @pytest.mark.parametrize("ranges", [8, *nightly(3, 11)])
    def test_partial_results(self, ranges, monkeypatch):
        """Cases: one range a unit, all steps in one range, and more ranges than steps.

        Memory that no block wrote is NaN here; on a GPU it holds its last contents.
        """
        monkeypatch.setattr(mosaic_gpu, "gpu_blocks", lambda target: ranges)
        self.page_size = 64
        self.check(self.case(PLAIN, [(260, 1), PADDING, (70, 1)]))

    def test_scores_of_keys_in_fp8(self):
        """Queries are the sums of two FP8 numbers. Errors are 0.005; 0.26 with the first one alone,
        where scores have a standard deviation of 5."""
        case = self.case(FP8_WIDE._replace(kv_heads=2), [(140, 1), (70, 1)])
        queries = in_two_terms(case.arguments[0])
        _, lse = self.compiled(case)(queries, *case.arguments[1:])
        np.testing.assert_allclose(lse, case.lse, 0, 0.01)
        np.testing.assert_allclose(queries.whole(), case.arguments[0], 2**-8, 1e-5)

    def test_pages_of_two_blocks(self):
        self.page_size = 128
        self.check(self.case(Sizes(window=70), [(129 + 64, 1), (127, 1)]))


@pytest.mark.usefixtures("small")
@golden.table("pallas_kernels/attention_orders.yaml", "nightly")
def test_an_order_that_is_taken_for_granted(method, old, new, sizes, said, monkeypatch):
    monkeypatch.setattr(_Warpgroup, method, mutated(getattr(_Warpgroup, method), (old, new)))
    suite = TestMosaicGpu()
    suite.page_size = 64
    case = suite.case(globals()[sizes], [(260, 1), (70, 1)])
    with pytest.raises(Unordered, match=said):
        suite.compiled(case)(*case.arguments)


def test_who_does_what():
    def call(heads, head_dim, v_width, dtype):
        pages = [jnp.zeros((1, 1, 64, width or 0), dtype) for width in (head_dim, v_width)]
        cache = reference.Cache(pages[0], pages[1] if v_width else None, None, None, v_width or 512)
        queries = jnp.zeros((4, heads, head_dim), jnp.bfloat16)
        plan = mosaic_gpu._plan(queries, cache, decode=True)
        return plan.warpgroups, plan.own_ranges, plan.one_buffer, mosaic_gpu.stages(cache, plan)

    golden.check_values("pallas_kernels/attention_hopper.txt", call, globals())


@golden.table("pallas_kernels/hopper_blocks.yaml")
def test_one_block_a_multiprocessor(device_kind, blocks):
    """Collectives have some for themselves, where there are any."""
    target = Target("mosaic_gpu", device_kind)
    assert tiles.gpu_blocks(target._replace(left=0)) == blocks
    assert (tiles.gpu_blocks(target), processors(target)) == (blocks - 12, blocks - 8)


@pytest.mark.parametrize(("devices", "blocks"), [(1, 132), (2, 120)])
def test_a_gpu_that_is_alone_has_no_collectives(devices, blocks, monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * devices)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert tiles.gpu_blocks(current_target()) == blocks
