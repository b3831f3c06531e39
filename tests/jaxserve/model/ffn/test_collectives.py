"""Sums and all-to-alls on simulated devices, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.model.ffn.collectives import padded_all_to_all, summed, summed_int8_rows, summed_rows
from pallas_kernels.grouped_matmul.packed_sums import Unsummed

pytestmark = pytest.mark.unoptimised

AXES = ("ep", "tp")
RANKS, TENSOR, ROWS, D_MODEL = 4, 2, 3, 16
DEVICES = RANKS * TENSOR


@functools.cache
def sum_of(dtype):
    """From the shares of all devices, [devices, all rows, d_model], to the sums, row after row."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(RANKS, TENSOR), AXES)
    here = PartitionSpec(AXES)

    def body(shares):
        if dtype == "int8":
            return summed_int8_rows(Unsummed(shares[0]), AXES).total()
        return summed_rows(shares[0], AXES, jnp.dtype(dtype))

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=here, out_specs=here, check_vma=False))
    return lambda shares: np.asarray(mapped(jax.device_put(shares, NamedSharding(mesh, here))))


def shares(seed=0):
    size = (DEVICES, DEVICES * ROWS, D_MODEL)
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def int8(x):
    """Rounded to 255 steps, the largest magnitude of a row being the last one."""
    step = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    return np.rint(x * (np.float32(1) / step)) * step


def test_fp32_is_not_rounded():
    np.testing.assert_allclose(sum_of("float32")(shares()), shares().sum(axis=0), atol=1e-5)


def test_bf16_travels_and_is_summed_in_fp32():
    """Over a rank's devices in their order, then over ranks."""
    parts = bf16(shares()).reshape(RANKS, TENSOR, -1, D_MODEL)
    of_ranks = bf16(parts[:, 0] + parts[:, 1])
    expected = ((of_ranks[0] + of_ranks[1]) + of_ranks[2]) + of_ranks[3]
    found = sum_of("bfloat16")(shares())
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_int8_travels_and_is_summed_in_fp32():
    """Each row's part with a scale of its own; the sums over a rank's devices once more."""
    parts = int8(shares()).reshape(RANKS, TENSOR, -1, D_MODEL)
    of_ranks = int8(parts[:, 0] + parts[:, 1])
    found, exact = sum_of("int8")(shares()), shares().sum(axis=0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, of_ranks.sum(axis=0), atol=1e-5)
    assert 0.001 < np.sqrt(np.mean((found - exact) ** 2)) / np.std(exact) < 0.01


def test_what_bf16_costs():
    """The error is that of one more rounding to BF16: 0.17 % of the root mean square."""
    exact = shares().sum(axis=0)
    error = sum_of("bfloat16")(shares()) - exact
    rounding = bf16(exact) - exact
    assert np.sqrt(np.mean(error**2)) <= 1.6 * np.sqrt(np.mean(rounding**2))


def test_a_row_has_the_same_bits_wherever_it_is():
    order = np.random.default_rng(1).permutation(DEVICES * ROWS)
    run = sum_of("bfloat16")
    np.testing.assert_array_equal(run(shares()[:, order]), run(shares())[order])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_sums_where_all_devices_have_the_same_rows(dtype, tolerance):
    mesh = Mesh(np.array(jax.devices()[:TENSOR]), ("tp",))

    def body(share):
        return summed(share, "tp", jnp.dtype(dtype))

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec("tp"), out_specs=PartitionSpec(), check_vma=False
    )
    parts = shares()[:TENSOR, :ROWS].reshape(-1, D_MODEL)
    found = jax.jit(mapped)(jax.device_put(parts, NamedSharding(mesh, PartitionSpec("tp"))))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, parts[:ROWS] + parts[ROWS:], atol=tolerance)


def test_literal_padded_all_to_all():
    """Two devices: the first sends rows 1 and 2 to itself and row 0 to the other, which sends its
    last row to the first and keeps nothing."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    here = PartitionSpec("ep")
    arrays = {
        "operand": np.array([[10], [11], [12], [20], [21], [22]], np.float32),
        "input_offsets": np.array([1, 0, 2, 0], np.int32),
        "send_sizes": np.array([2, 1, 1, 0], np.int32),
        "output_offsets": np.array([0, 3, 2, 0], np.int32),
        "recv_sizes": np.array([2, 1, 1, 0], np.int32),
    }

    def body(operand, *sizes):
        output = jnp.full((4, 1), -1, operand.dtype)
        return padded_all_to_all(operand, output, *sizes, axes=("ep",), rows=3)

    placed = [jax.device_put(array, NamedSharding(mesh, here)) for array in arrays.values()]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(here,) * 5, out_specs=here, check_vma=False)
    out = np.asarray(jax.jit(mapped)(*placed))[:, 0]
    assert out.tolist() == [11, 12, 22, -1, -1, -1, -1, 10]
