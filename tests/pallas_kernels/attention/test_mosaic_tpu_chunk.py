"""The TPU kernel of `chunk_attention`, interpreted, against NumPy; its pairs of tiles."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.mosaic_tpu_chunk import tile_pairs
from pallas_kernels.target import Target
from tests.pallas_kernels.attention.chunks import ChunkSuite, attend_numpy, attending, batch

TARGET = Target("mosaic_tpu", "TPU of this test", interpret=True)


class TestMosaicTpu(ChunkSuite):
    attend = attending(TARGET)
    rounding = 0.02

    def test_operands_of_different_dtypes(self):
        arrays = batch(np.random.default_rng(6), [6], [0], 8)
        where = [jnp.asarray(array, jnp.int32) for array in arrays[3:]]
        keys, values = (jnp.asarray(array) for array in arrays[1:3])
        queries = jnp.asarray(arrays[0], jnp.bfloat16)
        output, _ = type(self).attend(queries, keys, values, *where)
        expected, _ = attend_numpy(np.asarray(queries, np.float32), *arrays[1:])
        assert output.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(output, np.float32), expected, rtol=2**-8, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 5)), min_size=12, max_size=12))
@settings(max_examples=100)
def test_pairs_of_tiles(tokens):
    """No pair is left out that has something to see, and none is unmasked that has not all."""
    sequence, position = (np.asarray(column, np.int32) for column in zip(*tokens, strict=True))
    pairs = tile_pairs(jnp.asarray(sequence), jnp.asarray(position), 4)
    seen = (sequence[:, None] == sequence) & (position <= position[:, None]) & (position >= 0)
    seen = seen.reshape(3, 4, 3, 4).swapaxes(1, 2)
    some, every = np.asarray(pairs.some), np.asarray(pairs.every)
    assert (some >= seen.any((2, 3))).all()
    real = (position >= 0).reshape(3, 4).all(1)
    assert (every <= (seen.all((2, 3)) & real[:, None])).all()
    for query, row in enumerate(some):
        there = np.flatnonzero(row)
        expected = (there[0], there[-1]) if there.size else (0, 0)
        assert (pairs.first[query], pairs.last[query]) == expected


def test_a_prefill_of_one_sequence_masks_the_diagonal_alone():
    pairs = tile_pairs(jnp.zeros(12, jnp.int32), jnp.arange(12, dtype=jnp.int32), 4)
    assert pairs.some.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert pairs.every.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
