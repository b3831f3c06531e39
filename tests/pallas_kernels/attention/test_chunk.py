"""`chunk_attention` against NumPy, alone and merged with what a cache held before."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import (
    chunk_attention,
    merge,
    paged_attention,
    reference,
    write_rows,
)
from pallas_kernels.target import Target
from tests.pallas_kernels.attention.chunks import (
    DIM,
    HEADS,
    SCALE,
    V_DIM,
    ChunkSuite,
    attend_numpy,
    attending,
    batch,
)

pytestmark = pytest.mark.unoptimised


class TestReference(ChunkSuite):
    attend = attending(Target("reference", "cpu"))

    @pytest.mark.parametrize("tokens", [reference.CHUNK_ROWS, reference.CHUNK_ROWS + 1, 300])
    def test_more_tokens_than_a_block(self, tokens):
        self.check(batch(np.random.default_rng(1), [90, 1, tokens - 95], [0, 7, 200], tokens))


def test_literal():
    """Keys all alike, so that every token sees the mean of the values up to its own."""
    ones = jnp.ones((4, 1, 2))
    values = jnp.asarray([[[2.0]], [[4.0]], [[100.0]], [[6.0]]])
    sequence = jnp.asarray([0, 0, 1, 0], jnp.int32)
    position = jnp.asarray([5, 6, 0, 7], jnp.int32)
    output, lse = chunk_attention(ones, ones, values, sequence, position, scale=0.5)
    assert np.asarray(output).ravel().tolist() == [2, 3, 100, 4]
    # Each score is 0.5 · 2 = 1.
    np.testing.assert_allclose(np.asarray(lse)[:, 0], 1 + np.log([1, 2, 1, 3]), rtol=1e-6)


def test_merged_with_the_cache_it_is_attention_to_everything():
    """Five tokens are in the cache, four follow."""
    rng = np.random.default_rng(3)
    shapes = ((HEADS, DIM), (HEADS, DIM), (HEADS, V_DIM))
    arrays = [rng.normal(size=(9, *shape)).astype(np.float32) for shape in shapes]
    sequence, position = np.zeros(9, np.int32), np.arange(9, dtype=np.int32)
    expected, _ = attend_numpy(*arrays, sequence, position)
    queries, keys, values = map(jnp.asarray, arrays)
    table = jnp.asarray([[2, 0, 1]], jnp.int32)
    pages = tuple(jnp.full((3, shape[0], 3, shape[1]), jnp.nan) for shape in shapes[1:])
    pages = write_rows(
        pages, (keys[:5], values[:5]), table, jnp.asarray(sequence[:5]), jnp.asarray(position[:5])
    )
    new = slice(5, 9)
    where = jnp.asarray(sequence[new])
    before = paged_attention(
        queries[new], *pages, table, where, jnp.full(4, 4, jnp.int32), scale=SCALE, with_lse=True
    )
    inside = chunk_attention(
        queries[new], keys[new], values[new], where, jnp.asarray(position[new]), scale=SCALE
    )
    merged = merge(*zip(before, inside, strict=True))
    np.testing.assert_allclose(np.asarray(merged), expected[new], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": jnp.zeros((3, 12))}, r"queries is float32\(3, 12\), needs floats"),
        ({"values": jnp.zeros((3, 2, 4), jnp.int8)}, r"values is int8\(3, 2, 4\), needs floats"),
        ({"keys": jnp.zeros((3, 1, 6))}, r"keys \(3, 1, 6\) .* must agree in tokens and heads"),
        ({"keys": jnp.zeros((3, 2, 4))}, "queries and keys in head_dim"),
        ({"values": jnp.zeros((4, 2, 4))}, r"values \(4, 2, 4\) must agree"),
        ({"position": jnp.zeros(4, jnp.int32)}, "position has 4 entries for 3 tokens"),
        ({"position": jnp.zeros(3)}, r"position is float32\(3,\), needs int32 of rank 1"),
        (
            {"sequence_of_token": jnp.zeros((3, 1), jnp.int32)},
            r"sequence_of_token is int32\(3, 1\), needs int32 of rank 1",
        ),
    ],
)
def test_errors(changes, message):
    """The errors that users see: `unwrap` removes the check of annotations."""
    arrays = {
        "queries": jnp.zeros((3, 2, 6)),
        "keys": jnp.zeros((3, 2, 6)),
        "values": jnp.zeros((3, 2, 4)),
        "sequence_of_token": jnp.zeros(3, jnp.int32),
        "position": jnp.zeros(3, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(chunk_attention)(**(arrays | changes), scale=SCALE)
