"""`chunk_attention` against NumPy, alone and merged with what a cache held before."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import (
    chunk_attention,
    merge,
    paged_attention,
    reference,
    write_rows,
)
from tests.pallas_kernels.attention.chunks import (
    DIM,
    HEADS,
    SCALE,
    V_DIM,
    attend_numpy,
    batch,
)

pytestmark = pytest.mark.unoptimised


def run(arrays, dtype=jnp.float32):
    queries, keys, values = (jnp.asarray(array, dtype) for array in arrays[:3])
    where = (jnp.asarray(array, jnp.int32) for array in arrays[3:])
    return jax.jit(chunk_attention, static_argnames="scale")(
        queries, keys, values, *where, scale=SCALE
    )


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


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=3),
    st.lists(st.integers(0, 50), min_size=3, max_size=3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_against_numpy(lengths, starts, seed):
    arrays = batch(np.random.default_rng(seed), lengths, starts[: len(lengths)])
    output, lse = run(arrays)
    expected, sums = attend_numpy(*arrays)
    np.testing.assert_allclose(np.asarray(output), expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), sums, atol=1e-5)
    assert (output.dtype, lse.dtype) == (jnp.float32, jnp.float32)


def test_padding_sees_nothing_and_is_seen_by_none():
    arrays = batch(np.random.default_rng(0), [3], [0])
    output, lse = run(arrays)
    assert np.isfinite(np.asarray(output)).all()
    assert not np.asarray(output)[3:].any()
    assert np.isneginf(np.asarray(lse)[3:]).all()


@pytest.mark.parametrize("tokens", [reference.CHUNK_ROWS, reference.CHUNK_ROWS + 1, 300])
def test_more_tokens_than_a_block(tokens):
    arrays = batch(np.random.default_rng(1), [90, 1, tokens - 95], [0, 7, 200], tokens)
    output, lse = run(arrays)
    expected, sums = attend_numpy(*arrays)
    np.testing.assert_allclose(np.asarray(output), expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), sums, atol=1e-5)


def test_bfloat16_is_rounded_at_the_end_alone():
    arrays = batch(np.random.default_rng(2), [9, 8], [0, 4])
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in arrays[:3]]
    output, lse = run(arrays, jnp.bfloat16)
    expected, sums = attend_numpy(*rounded, *arrays[3:])
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(np.asarray(lse), sums, atol=1e-5)


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


def call(**changes):
    arrays = {
        "queries": jnp.zeros((3, 2, 6)),
        "keys": jnp.zeros((3, 2, 6)),
        "values": jnp.zeros((3, 2, 4)),
        "sequence_of_token": jnp.zeros(3, jnp.int32),
        "position": jnp.zeros(3, jnp.int32),
    }
    # What the annotations would catch in tests, callers without the import hook run into.
    return inspect.unwrap(chunk_attention)(**(arrays | changes), scale=SCALE)


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
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_a_call_that_fits():
    output, lse = call()
    assert (output.shape, lse.shape) == ((3, 2, 4), (3, 2))
