"""`paged_attention` with its options, and `merge`, against the suite's definition in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import merge, paged_attention
from tests.pallas_kernels.attention.suite import PADDING, SCALE, Sizes, make_case

PAGE, PAGES_PER_SEQUENCE, TOKENS = 4, 5, 24
SEEDS = st.integers(0, 2**32 - 1)
SIZES = Sizes(kv_heads=2, head_dim=8, v_width=6)
LATENT = SIZES._replace(kv_heads=1, shared=True)


@functools.cache
def compiled(sizes):
    """The call with the options of cases of these sizes, their scales as the last arguments."""

    def attend(*arguments):
        *arguments, scales = arguments
        fixed = {"window": sizes.window, "v_width": sizes.v_width if sizes.shared else 0}
        return paged_attention(*arguments, scale=SCALE, with_lse=True, **fixed, **scales)

    return jax.jit(attend)


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        *(SIZES._replace(window=window) for window in (1, PAGE, PAGE + 1, 100)),
        LATENT,
        *(SIZES._replace(cache=cache) for cache in ("e4m3", "fp8", "int8")),
        SIZES._replace(cache="e4m3", values="float32", window=3),
        SIZES._replace(cache="float32", values="int8"),
        LATENT._replace(cache="int8", window=6),
        LATENT._replace(kv_heads=2, cache="e4m3", v_width=8),
    ],
)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, PAGE * PAGES_PER_SEQUENCE), min_size=3, max_size=3),
    new=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    seed=SEEDS,
)
def test_ragged_batches(sizes, lengths, new, seed):
    """Always three sequences and 24 tokens with padding, so that few programs are compiled."""
    chunks = [(length, min(length, most)) for length, most in zip(lengths, new, strict=True)]
    padding = TOKENS - sum(count for _, count in chunks)
    pages = {"page_size": PAGE, "pages_per_sequence": PAGES_PER_SEQUENCE}
    case = make_case(sizes, [*chunks, *[PADDING] * padding], seed=seed, **pages)
    scales = {name: case.options[name] for name in ("k_scales", "v_scales")}
    output, lse = compiled(sizes)(*case.arguments, scales)
    np.testing.assert_allclose(output, case.output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, case.lse, rtol=1e-4, atol=1e-5)


class TestMerge:
    def test_parts_that_saw_nothing(self):
        outputs = [jnp.full((2, 1, 1), jnp.nan), jnp.asarray([[[7.0]], [[jnp.nan]]])]
        lses = [jnp.full((2, 1), -jnp.inf), jnp.asarray([[500.0], [-jnp.inf]])]
        np.testing.assert_array_equal(merge(outputs, lses), [[[7.0]], [[0.0]]])
