"""`grouped_matmul` and `grouped_swiglu` against literal expectations and a NumPy definition."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu


def grouped_numpy(rows, group_sizes, d_out, function):
    """Apply `function(rows of a group, group)`; rows of no group give zeros."""
    rows = np.asarray(rows, np.float64)
    output, start = np.zeros((rows.shape[0], d_out)), 0
    for group, size in enumerate(group_sizes):
        output[start : start + size] = function(rows[start : start + size], group)
        start += size
    return output


def matmul_numpy(weights):
    return lambda rows, group: rows @ np.asarray(weights, np.float64)[group].T


def swiglu_numpy(gate, up, down):
    gate, up, down = (np.asarray(weights, np.float64) for weights in (gate, up, down))

    def apply(rows, group):
        gated = rows @ gate[group].T
        return (gated / (1 + np.exp(-gated)) * (rows @ up[group].T)) @ down[group].T

    return apply


def random_case(rng, rows, groups, d_model=6, d_ff=5):
    shapes = [(rows, d_model), *[(groups, d_ff, d_model)] * 2, (groups, d_model, d_ff)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


class TestGroupedMatmul:
    def test_literal(self):
        rows = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
        weights = jnp.asarray([[[1.0, 0.0]], [[9.0, 9.0]], [[1.0, 10.0]]])
        output = grouped_matmul(rows, weights, jnp.asarray([1, 0, 2], jnp.int32))
        np.testing.assert_array_equal(output, [[1], [43], [65], [0]])

    @pytest.mark.parametrize(
        "group_sizes",
        [[0, 0, 0], [1, 0, 0], [0, 0, 1], [7, 8, 9], [40, 0, 0], [0, 40, 0], [17, 1, 22]],
    )
    def test_around_a_block(self, group_sizes):
        rows, weights, _, _ = random_case(np.random.default_rng(0), 40, 3)
        output = grouped_matmul(rows, weights, jnp.asarray(group_sizes, jnp.int32))
        expected = grouped_numpy(rows, group_sizes, 5, matmul_numpy(weights))
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)

    @settings(max_examples=25, deadline=None)
    @given(
        group_sizes=st.lists(st.integers(0, 20), min_size=4, max_size=4),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_ragged(self, group_sizes, seed):
        rows, weights, _, _ = random_case(np.random.default_rng(seed), 80, 4)
        output = jax.jit(grouped_matmul)(rows, weights, jnp.asarray(group_sizes, jnp.int32))
        expected = grouped_numpy(rows, group_sizes, 5, matmul_numpy(weights))
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)

    def test_padding_rows_are_not_looked_at(self):
        rows, weights, _, _ = random_case(np.random.default_rng(0), 9, 2)
        rows = rows.at[5:].set(jnp.nan)
        output = grouped_matmul(rows, weights, jnp.asarray([2, 3], jnp.int32))
        assert np.isfinite(output).all()
        np.testing.assert_array_equal(output[5:], np.zeros((4, 5)))

    def test_no_rows(self):
        output = grouped_matmul(jnp.zeros((0, 3)), jnp.zeros((2, 4, 3)), jnp.zeros(2, jnp.int32))
        assert output.shape == (0, 4)

    def test_bfloat16_accumulates_in_float32(self):
        """In BF16, 256 + 1 is 256: adding ones one by one would stay there."""
        rows = jnp.ones((2, 1024), jnp.bfloat16)
        weights = jnp.ones((1, 3, 1024), jnp.bfloat16)
        output = grouped_matmul(rows, weights, jnp.asarray([2], jnp.int32))
        assert output.dtype == jnp.bfloat16
        np.testing.assert_array_equal(output.astype(jnp.float32), np.full((2, 3), 1024))

    def test_a_row_does_not_depend_on_the_batch(self):
        rows, weights, _, _ = random_case(np.random.default_rng(0), 32, 2, d_model=256, d_ff=64)
        alone = grouped_matmul(rows[:1], weights, jnp.asarray([1, 0], jnp.int32))
        together = grouped_matmul(rows, weights, jnp.asarray([20, 12], jnp.int32))
        np.testing.assert_array_equal(alone[0], together[0])


class TestGroupedSwiglu:
    def test_literal(self):
        # silu(0) is 0, and silu of a large number is that number.
        gate = jnp.asarray([[[100.0]], [[0.0]]])
        up, down = jnp.asarray([[[2.0]], [[2.0]]]), jnp.asarray([[[3.0]], [[3.0]]])
        output = grouped_swiglu(jnp.ones((3, 1)), gate, up, down, jnp.asarray([1, 1], jnp.int32))
        np.testing.assert_array_equal(output, [[600], [0], [0]])

    @settings(max_examples=25, deadline=None)
    @given(
        group_sizes=st.lists(st.integers(0, 20), min_size=4, max_size=4),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_ragged(self, group_sizes, seed):
        rows, gate, up, down = random_case(np.random.default_rng(seed), 80, 4)
        sizes = jnp.asarray(group_sizes, jnp.int32)
        output = jax.jit(grouped_swiglu)(rows, gate, up, down, sizes)
        expected = grouped_numpy(rows, group_sizes, 6, swiglu_numpy(gate, up, down))
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)

    def test_inside_shard_map(self):
        """Experts on two devices, their inner dimension on two more."""
        if len(jax.devices()) < 4:
            pytest.skip("needs 4 devices")
        mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
        rows, gate, up, down = random_case(np.random.default_rng(0), 24, 4, d_ff=8)
        sizes = np.asarray([3, 9, 5, 1], np.int32)

        def local(rows, gate, up, down, sizes):
            return jax.lax.psum(grouped_swiglu(rows, gate, up, down, sizes), "tp")

        experts, columns = PartitionSpec("ep"), PartitionSpec("ep", None, "tp")
        rows_of = PartitionSpec("ep", "tp")
        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), rows_of, rows_of, columns, experts),
            out_specs=PartitionSpec("ep"),
        )
        output = jax.jit(sharded)(rows, gate, up, down, sizes)
        halves = [
            grouped_numpy(rows, sizes[half], 6, swiglu_numpy(gate[half], up[half], down[half]))
            for half in (slice(0, 2), slice(2, 4))
        ]
        np.testing.assert_allclose(output, np.concatenate(halves), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": jnp.zeros((4, 2, 3))}, r"rows is float32\(4, 2, 3\)"),
        ({"rows": jnp.zeros((4, 7))}, r"gate_weights has shape \(2, 5, 3\), needs \(2, 'any', 7\)"),
        ({"up_weights": jnp.zeros((2, 6, 3))}, r"up_weights .* needs \(2, 5, 3\)"),
        ({"down_weights": jnp.zeros((3, 3, 5))}, r"down_weights .* needs \(2, 'any', 5\)"),
        ({"rows": jnp.zeros((4, 3), jnp.bfloat16)}, "gate_weights is float32, rows is bfloat16"),
        ({"group_sizes": jnp.zeros(2)}, r"group_sizes is float32\(2,\)"),
    ],
)
def test_bad_calls(change, message):
    """What users see, who do not run with the annotations checked: `unwrap` removes that check."""
    good = {
        "rows": jnp.zeros((4, 3)),
        "gate_weights": jnp.zeros((2, 5, 3)),
        "up_weights": jnp.zeros((2, 5, 3)),
        "down_weights": jnp.zeros((2, 3, 5)),
        "group_sizes": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(grouped_swiglu)(**(good | change))
