"""`chunk_attention` against NumPy; `test_mla.py` merges it with what a cache held before."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import chunk_attention, reference
from pallas_kernels.target import Target
from tests.pallas_kernels.attention.chunks import (
    ChunkSuite,
    attending,
    batch,
)

pytestmark = pytest.mark.unoptimised


class TestReference(ChunkSuite):
    attend = attending(Target("reference", "cpu"))

    @pytest.mark.parametrize("tokens", [reference.CHUNK_ROWS, reference.CHUNK_ROWS + 1, 300])
    def test_more_tokens_than_a_block(self, tokens):
        self.check(batch(np.random.default_rng(1), [90, 1, tokens - 95], [0, 7, 200], tokens))


def test_who_sees_nan_gets_nan_and_no_other():
    """Tokens of two sequences in turn; the second token of the first one has a broken value."""
    ones = jnp.ones((4, 1, 2))
    values = jnp.asarray([[[2.0, 2.0]], [[5.0, 5.0]], [[jnp.nan, 1.0]], [[7.0, 7.0]]])
    sequence, position = jnp.asarray([0, 1, 0, 1]), jnp.asarray([0, 0, 1, 1])
    output, _ = chunk_attention(ones, ones, values, sequence, position, scale=1.0)
    assert np.asarray(output)[[0, 1, 3], 0].tolist() == [[2, 2], [5, 5], [6, 6]]
    assert np.isnan(output[2]).all()
