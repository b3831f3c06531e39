"""The Hopper kernel, interpreted on the CPU with a race detector, and what it covers."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.rotate_and_write import mosaic_gpu
from pallas_kernels.target import Target
from tests.pallas_kernels.rotate_and_write.suite import RotateAndWriteSuite, make_case

pytestmark = pytest.mark.unoptimised


class TestMosaicGpu(RotateAndWriteSuite):
    target = Target("mosaic_gpu", "NVIDIA H200", interpret=True)


def test_queries_come_as_attention_multiplies_them():
    for cache, dtype in (("int8", jnp.bfloat16), ("fp8", jnp.float16)):
        case = make_case(cache)
        queries, written = jax.eval_shape(lambda case=case: TestMosaicGpu().run(case))
        assert queries.dtype == dtype
        assert [array.dtype for array in written] == [array.dtype for array in case.pages]


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "v_width", "dtype", "said"),
    [
        (8, 64, 256, 256, jnp.bfloat16, ""),
        (2, 32, 128, 256, jnp.uint8, ""),
        (1, 32, 128, 128, jnp.int8, "1 tokens of 32 query heads"),
        (8, 48, 128, 128, jnp.int8, "48 query heads"),
        (8, 64, 80, 128, jnp.int8, "head_dim 80"),
        (8, 64, 128, 512, jnp.int8, "values of 512"),
        (8, 64, 128, 128, jnp.float32, "a cache in float32"),
    ],
)
def test_what_the_kernel_covers(tokens, heads, width, v_width, dtype, said):
    pages = (jnp.zeros((2, 1, 8, width), dtype),)
    query = jnp.zeros((tokens, heads, width), jnp.bfloat16)
    value = jnp.zeros((tokens, 1, v_width), jnp.bfloat16)
    gap = mosaic_gpu.gap(pages, query, value)
    assert gap.startswith(said)
    assert bool(gap) == bool(said)
