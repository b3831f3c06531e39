"""The definition in `jax.numpy` against NumPy, as the kernels are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.grouped_matmul import suite


class TestReference(suite.GroupedMatmulSuite):
    target = Target("reference", "cpu")

    @pytest.mark.parametrize(
        ("test", "format", "dtype"),
        [
            *(("test_matmul", *case) for case in suite.PLAIN_ROWS),
            *(("test_matmul_of_rows_in_blocks", *case) for case in suite.ROWS_IN_BLOCKS),
            *(("test_matmul_of_rows_as_they_are", *case) for case in suite.ROWS_AS_THEY_ARE),
        ],
    )
    def test_what_takes_kernels_too_long(self, test, format, dtype):
        getattr(self, test)(format, dtype)

    def test_biases_and_another_activation(self):
        self.test_swiglu_with_biases_and_another_activation("float")

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize(("d_model", "d_ff"), [(8, 16), (256, 72)])
    def test_a_row_is_the_same_in_any_company(self, d_model, d_ff, dtype):
        """Whatever rows are beside it, of its group and of others: bit for bit."""
        rng = np.random.default_rng(0)
        weights = [
            suite.Weight(rng, (3, *shape), "float", dtype, [1] * 3).jax
            for shape in ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff))
        ]
        rows = jnp.asarray(rng.normal(size=(33, d_model)), dtype)
        found = []
        with use_target(self.target):
            for count, sizes, place in [
                (1, [0, 1, 0], 0),
                (2, [0, 2, 0], 1),
                (9, [0, 9, 0], 3),
                (9, [5, 1, 3], 5),
                (33, [1, 30, 0], 30),
            ]:
                some = jnp.roll(rows, place, axis=0)[:count]
                output = jax.jit(grouped_swiglu)(some, *weights, jnp.asarray(sizes, jnp.int32))
                found.append(np.asarray(output[place], np.float32))
        assert np.abs(found[0]).max() > 0
        np.testing.assert_array_equal(found, found[:1] * 5)
