"""Columns that devices divide: what is sampled of them is what is sampled of all."""

import jax
import numpy as np
import pytest

from jaxserve.model.sampler import sample_and_largest
from tests.jaxserve.model.test_sampler import draw, random_logits, state_of


class TestDividedColumns:
    """What each of several devices finds that has only its columns, the last one fewer."""

    def sampled(self, logits, rows, devices):
        columns = -(-logits.shape[1] // devices)
        padding = devices * columns - logits.shape[1]
        padded = np.pad(logits, ((0, 0), (0, padding)), constant_values=-np.inf)
        parts = np.stack(np.split(padded, devices, axis=1))

        def one(own):
            return sample_and_largest(own, state_of(rows), logits.shape[1])

        return [np.asarray(a) for a in jax.jit(jax.vmap(one, axis_name="tp"))(parts)]

    @pytest.mark.parametrize("devices", [2, 3])
    @pytest.mark.parametrize("random", [0, 1, 6])
    def test_the_tokens_are_those_of_all_columns(self, devices, random):
        logits = np.stack([random_logits(seed) for seed in range(8)])
        logits[1, [5, 30]] = 9.0  # the first of equals, on different devices
        rows = [{"temperature": float(row < random), "seed": row} for row in range(8)]
        tokens, largest = self.sampled(logits, rows, devices)
        assert (tokens == draw(logits, rows)).all()
        assert tokens[0, 1] == 5 or random > 1
        np.testing.assert_array_equal(largest, np.tile(logits.max(axis=1), (devices, 1)))

    def test_a_logit_that_is_no_number_is_found_by_all(self):
        logits = np.stack([random_logits(seed) for seed in range(3)])
        logits[0, 2], logits[1, 39] = np.nan, np.inf
        _, largest = self.sampled(logits, [{"temperature": 0.0}] * 3, 2)
        assert np.isfinite(largest).tolist() == [[False, False, True]] * 2
