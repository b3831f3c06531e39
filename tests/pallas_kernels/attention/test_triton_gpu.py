"""The suite for the Triton kernels, interpreted; the bytes that they read; that they compile."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import triton_gpu_kernel
from pallas_kernels.attention.cases import before_hopper
from pallas_kernels.target import Target, target_of
from tests.pallas_kernels import gpu_aot
from tests.pallas_kernels.attention.suite import PADDING, PagedAttentionSuite, Sizes
from tests.pallas_kernels.nightly import nightly

pytestmark = pytest.mark.unoptimised


class TestTritonGpu(PagedAttentionSuite):
    target = Target("triton_gpu", "NVIDIA A100", interpret=True)
    block, item_tokens = 64, 16
    edge_tolerance = 1e-2

    def case(self, sizes, chunks, **options):
        """Rounds sizes up to those that the kernels have."""
        sizes = sizes._replace(
            head_dim=-(-sizes.head_dim // 16) * 16,
            v_width=-(-sizes.v_width // 16) * 16,
            cache="bfloat16" if sizes.cache == "float32" else sizes.cache,
        )
        return super().case(sizes, chunks, **options | {"dtype": jnp.bfloat16})

    def check(self, case, tolerance=4e-2):
        super().check(case, tolerance)

    test_bfloat16 = None  # as all tests here
    test_pages_of_two_rows = None  # nothing is joined

    @pytest.mark.parametrize(
        "sizes",
        [
            Sizes(q_heads=40, head_dim=80, v_width=48, cache="int8"),
            *nightly((Sizes(q_heads=130, head_dim=576, v_width=512, shared=True, cache="e4m3"),)),
        ],
        ids=["widths of several parts", "lanes"],
    )
    def test_sizes(self, sizes):
        """Widths and heads that are no powers of two; pages that do not fit into blocks."""
        self.page_size = 24
        self.check(self.case(sizes, [(200, 1), PADDING, (63, 1)]))

    def test_it_reads_what_is_seen_once(self, monkeypatch):
        """Pages that two sequences share are theirs; a slot without a sequence reads nothing."""
        loads, read = [], triton_gpu_kernel.plgpu.load

        def load(ref, *, mask, other):
            if len(mask.shape) == 2:
                width = ref.transforms[-1].indices[1].shape[1]
                jax.debug.callback(lambda mask: loads.append(int(mask.sum()) * width), mask)
            return read(ref, mask=mask, other=other)

        monkeypatch.setattr(triton_gpu_kernel.plgpu, "load", load)
        case = self.case(Sizes(head_dim=80, v_width=48), [(63, 1), PADDING, (150, 1), (64, 1)])
        jax.block_until_ready(self.compiled(case)(*case.arguments))
        jax.effects_barrier()
        assert sum(loads) == (63 + 150 + 64) * (80 + 48)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("NVIDIA A800-SXM4-80GB", "triton_gpu"), ("NVIDIA L20", "triton_gpu"),
     ("NVIDIA H20", "mosaic_gpu"), ("Tesla V100-SXM2-16GB", "reference")],
)  # fmt: skip
def test_devices(kind, backend):
    assert target_of("gpu", kind).backend == backend


@pytest.mark.gpu_aot
@gpu_aot.NEEDS_CUDA
@pytest.mark.timeout(gpu_aot.SECONDS)
@pytest.mark.parametrize("device", ["a100", "l40"])
def test_models_compile_without_spills(device):
    lines = gpu_aot.lines_of("pallas_kernels.gpu_resources", "--before-hopper", device)
    assert lines == [case.name for case in before_hopper()]
