"""The suite for the Hopper kernels, interpreted, with their races looked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)

from pallas_kernels.attention import mosaic_gpu, mosaic_gpu_plan, reference, tiles
from pallas_kernels.attention.mosaic_gpu_kernel import _Warpgroup
from pallas_kernels.target import Target
from tests.pallas_kernels.attention.suite import PADDING, PagedAttentionSuite, Sizes
from tests.pallas_kernels.gpu_races import is_missing_wait

pytestmark = [
    pytest.mark.unoptimised,
    # The poison reaches wgmma: what no row sees is left out afterwards.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

INTERPRETED = Target("mosaic_gpu", "NVIDIA H200", interpret=True)


def fitting(sizes):
    """The same case at sizes that the kernels cover: they would leave the others to XLA."""
    return sizes._replace(
        head_dim=-(-sizes.head_dim // 64) * 64 + 64 * sizes.shared,
        v_width=-(-sizes.v_width // 64) * 64,
        cache="bfloat16" if sizes.cache == "float32" else sizes.cache,
    )


class TestMosaicGpu(PagedAttentionSuite):
    target = INTERPRETED

    def case(self, sizes, chunks, **options):
        return super().case(fitting(sizes), chunks, **options | {"dtype": jnp.bfloat16})

    def check(self, case, tolerance=2e-2):
        queries, k_pages, v_pages, *_ = case.arguments
        width = case.options["v_width"] if v_pages is None else v_pages.shape[3]
        cache = reference.Cache(k_pages, v_pages, None, None, width)
        assert not mosaic_gpu.gap(queries, cache)
        super().check(case, tolerance)

    def test_chunk_that_sees_what_was_before_it(self):
        """As in the suite, which asks for the precision of FP32."""
        case = self.case(Sizes(), [(self.page_size + 5, 3)])
        queries, *pages, table, sequence, position = case.arguments
        position = jnp.full_like(position, position[0])
        same = jnp.broadcast_to(queries[:1], queries.shape)
        output, lse = self.compiled(case)(same, *pages, table, sequence, position)
        for token in range(3):
            np.testing.assert_allclose(
                np.asarray(output[token], np.float32), case.output[0], rtol=0.2, atol=2e-2
            )
            np.testing.assert_allclose(lse[token], case.lse[0], rtol=1e-4, atol=1e-4)

    def test_pages_of_two_blocks(self, monkeypatch):
        monkeypatch.setattr(self, "page_size", 128, raising=False)
        self.check(self.case(Sizes(window=70), [(129 + 64, 1), (127, 1)]))

    def test_wide_values(self):
        """Two warpgroups that share their rows; 72 query heads are two lanes."""
        sizes = Sizes(q_heads=72, head_dim=320, v_width=384, shared=True)
        self.check(self.case(sizes, [(4 * self.page_size + 3, 1), PADDING]))

    def test_wide_values_in_eight_bits(self):
        sizes = Sizes(q_heads=8, head_dim=320, v_width=384, shared=True, cache="int8")
        self.check(self.case(sizes, [(5, 1)]))

    def test_one_slot_for_either_keys_or_values_in_eight_bits(self):
        sizes = Sizes(head_dim=256, v_width=256, cache="int8", window=70)
        self.check(self.case(sizes, [(self.page_size + 5, 1)]))

    def test_more_heads_than_rows(self):
        sizes = Sizes(q_heads=72)
        self.check(self.case(sizes, [(4 * self.page_size + 3, 1), (1, 1)]))


def races(run, printed):
    """Whether the interpreter reports one: newer versions raise, older ones print it."""
    try:
        jax.block_until_ready(run())
        found = gpu_callbacks.get_races().races_found
    except Exception as error:
        found = is_missing_wait(error)
    finally:
        reset_gpu_interpret_mode_state()
    return found or "RACE DETECTED" in printed.readouterr().out


@pytest.mark.parametrize(
    ("wait", "sizes"),
    [
        ("_wait_until_released", Sizes()),
        ("_wait_until_loaded", Sizes()),
        ("_meet", Sizes(head_dim=320, v_width=384, shared=True)),
        (None, Sizes()),
    ],
)
def test_a_wait_that_is_left_out_is_a_race(wait, sizes, monkeypatch, capsys):
    monkeypatch.setattr(tiles, "INTERPRETED_BLOCKS", 1)
    monkeypatch.setattr(mosaic_gpu_plan, "MOST_STAGES", 2)
    suite = TestMosaicGpu()
    case = suite.case(sizes, [(10 * suite.page_size, 1), (10 * suite.page_size, 1)])
    if wait is not None:
        monkeypatch.setattr(_Warpgroup, wait, lambda *_: None)
    found = races(lambda: suite.compiled(case)(*case.arguments), capsys)
    assert found == (wait is not None)


@pytest.mark.parametrize(
    ("heads", "head_dim", "v_width", "dtype", "expected"),
    [
        # Warpgroups, ranges of their own, one buffer, stages of each.
        (64, 256, 256, jnp.bfloat16, (1, False, False, 3)),
        (64, 256, 256, jnp.int8, (2, True, True, 1)),
        (16, 128, 128, jnp.float8_e4m3fn, (2, True, False, 3)),
        (128, 128, 128, jnp.bfloat16, (2, False, False, 6)),
        (128, 576, None, jnp.int8, (2, False, False, 2)),
    ],
)
def test_who_does_what(heads, head_dim, v_width, dtype, expected):
    pages = [jnp.zeros((1, 1, 64, width or 0), dtype) for width in (head_dim, v_width)]
    cache = reference.Cache(pages[0], pages[1] if v_width else None, None, None, v_width or 512)
    queries = jnp.zeros((4, heads, head_dim), jnp.bfloat16)
    plan = mosaic_gpu._plan(queries, cache, decode=True, scale=1.0, window=0, target=None)
    found = (plan.warpgroups, plan.own_ranges, plan.one_buffer, mosaic_gpu.stages(cache, plan))
    assert found == expected


@pytest.mark.parametrize(
    ("device_kind", "blocks"),
    [("NVIDIA H200", 132), ("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H100 PCIe", 114),
     ("NVIDIA H20", 78), ("NVIDIA GH200 480GB", 132), ("NVIDIA H800", 132)],
)  # fmt: skip
def test_one_block_a_multiprocessor(device_kind, blocks):
    assert tiles.gpu_blocks(Target("mosaic_gpu", device_kind)) == blocks
