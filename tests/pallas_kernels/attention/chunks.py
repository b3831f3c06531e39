"""Tests of every backend of `chunk_attention`, against NumPy. Backends' tests inherit it."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import chunk_attention
from pallas_kernels.target import Target, use_target
from tests import golden

SCALE, HEADS, DIM, V_DIM, TOKENS = 0.3, 2, 6, 4, 32


def attend_numpy(queries, keys, values, sequence, position):
    """Each token over the batch's tokens of its sequence that do not come after it, float64."""
    tokens, heads, _ = queries.shape
    output = np.zeros((tokens, heads, values.shape[2]))
    lse = np.full((tokens, heads), -np.inf)
    for token in range(tokens):
        if position[token] < 0:
            continue
        seen = (sequence == sequence[token]) & (position >= 0) & (position <= position[token])
        for head in range(heads):
            scores = SCALE * keys[seen, head].astype(np.float64) @ queries[token, head]
            weights = np.exp(scores - scores.max())
            output[token, head] = weights @ values[seen, head] / weights.sum()
            lse[token, head] = scores.max() + np.log(weights.sum())
    return output, lse


def batch(rng, lengths, starts, tokens=TOKENS):
    """Chunks of several sequences, then padding full of NaN that claims the last sequence."""
    count = sum(lengths)
    shapes = ((HEADS, DIM), (HEADS, DIM), (HEADS, V_DIM))
    arrays = [rng.normal(size=(tokens, *shape)).astype(np.float32) for shape in shapes]
    for array in arrays:
        array[count:] = np.nan
    sequence = np.full(tokens, len(lengths) - 1, np.int32)
    sequence[:count] = np.repeat(np.arange(len(lengths)), lengths)
    position = np.full(tokens, -1, np.int32)
    position[:count] = np.concatenate(
        [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
    )
    return *arrays, sequence, position


def attending(target: Target) -> Callable[..., Any]:
    """The call for a target, compiled."""

    @jax.jit
    def attend(*arrays):
        with use_target(target):
            return chunk_attention(*arrays, scale=SCALE)

    return attend


class ChunkSuite:
    """Tiles of 8 tokens, where there are some: batches of 21, with padding.

    Attributes:
      attend: the compiled call.
      rounding: of results in BF16; a backend may round probabilities, too.
    """

    attend: ClassVar[Callable[..., Any]]
    rounding: ClassVar[float] = 2**-8

    def run(self, arrays, dtype=jnp.float32):
        inputs = [jnp.asarray(array, dtype) for array in arrays[:3]]
        return type(self).attend(*inputs, *(jnp.asarray(array, jnp.int32) for array in arrays[3:]))

    def check(self, arrays):
        output, lse = self.run(arrays)
        expected, sums = attend_numpy(*arrays)
        np.testing.assert_allclose(np.asarray(output), expected, atol=1e-5)
        np.testing.assert_allclose(np.asarray(lse), sums, atol=1e-5)
        assert (output.dtype, lse.dtype) == (jnp.float32, jnp.float32)

    @golden.table("pallas_kernels/chunks.yaml")
    def test_against_numpy(self, lengths, starts):
        """Sequences within a tile, over several, to their borders, and padding."""
        self.check(batch(np.random.default_rng(0), lengths, starts, 21))

    def test_tokens_may_come_in_any_order(self):
        rng = np.random.default_rng(4)
        arrays = batch(rng, [10, 7], [0, 3], 21)
        order = rng.permutation(21)
        self.check([array[order] for array in arrays])

    def test_bfloat16(self):
        arrays = batch(np.random.default_rng(2), [9, 8], [0, 4], 21)
        rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in arrays[:3]]
        output, lse = self.run(arrays, jnp.bfloat16)
        expected, sums = attend_numpy(*rounded, *arrays[3:])
        assert (output.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
        output = np.asarray(output, np.float32)
        np.testing.assert_allclose(output, expected, rtol=self.rounding, atol=self.rounding)
        np.testing.assert_allclose(np.asarray(lse), sums, atol=1e-4)

    @pytest.mark.parametrize("wrong", [np.nan, np.inf])
    def test_what_is_not_finite_stays_in_its_sequence(self, wrong):
        """Also where it shares tiles with another one; who comes before it does not see it."""
        arrays = batch(np.random.default_rng(3), [5, 12], [0, 0], 21)
        output = np.asarray(self.run(arrays)[0])  # waits: JAX may read the arrays in place
        arrays[2][9, 0, 1] = wrong  # a value of the second sequence's position 4
        spoiled, _ = self.run(arrays)
        np.testing.assert_array_equal(spoiled[:9], output[:9])
        assert not np.isfinite(np.asarray(spoiled)[9:17, 0]).any()
        np.testing.assert_array_equal(spoiled[17:], 0)
