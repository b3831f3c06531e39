"""`chunk_attention` against NumPy; `test_mla.py` merges it with what a cache held before."""

import numpy as np
import pytest

from pallas_kernels.attention import reference
from pallas_kernels.target import Target
from tests.pallas_kernels.attention.chunks import ChunkSuite, attending, batch

pytestmark = pytest.mark.unoptimised


class TestReference(ChunkSuite):
    attend = attending(Target("reference", "cpu"))

    @pytest.mark.parametrize("tokens", [reference.CHUNK_ROWS, reference.CHUNK_ROWS + 1, 300])
    def test_more_tokens_than_a_block(self, tokens):
        self.check(batch(np.random.default_rng(1), [90, 1, tokens - 95], [0, 7, 200], tokens))
