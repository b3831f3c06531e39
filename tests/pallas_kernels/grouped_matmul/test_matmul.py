"""`matmul` of every weight format against literal expectations; several products, and on a mesh.

The numbers of single products are those of `tests/pallas_kernels/grouped_matmul/test_dense.py`.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.quantize import QuantArray, quantize_weight
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.grouped_matmul.suite import Weight


class TestLiteral:
    def test_int8_sums_are_exact(self):
        """2000 * 127 * 127 is more than FP32 counts one by one."""
        d_in = 2001
        w = QuantArray(jnp.full((1, d_in), 127, jnp.int8), jnp.ones((1, 1)), (1, 0))
        x = jnp.full((1, d_in), 127.0).at[0, 0].set(-126.0)
        assert int(matmul(x, w)[0, 0]) == int(np.float32(2000 * 127 * 127 - 126 * 127))

    def test_arrays(self):
        x, w = jnp.asarray([[1.0, 2.0]], jnp.bfloat16), jnp.asarray([[3.0, 0.5]], jnp.bfloat16)
        output = matmul(x, w)
        assert output.dtype == jnp.float32
        np.testing.assert_array_equal(output, [[4.0]])


@pytest.mark.parametrize("format", ["fp8", ("fp8", (4, 4)), "int8"], ids=str)
def test_leading_axes(format):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 2, 4, 10)), jnp.float32)
    weight = Weight(rng, (6, 6, 10), format, jnp.float32, [1] * 6)
    got = matmul(x, jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), weight.jax))
    for group, (place, rows) in enumerate(zip(np.ndindex(3, 2), x.reshape(6, 4, 10), strict=True)):
        expected = [weight.product(row, group) for row in np.asarray(rows)]
        np.testing.assert_allclose(got[place], expected, 1e-5, 1e-4)


@pytest.mark.parametrize("backend", ["mosaic_tpu", "mosaic_gpu"])
def test_kernels_multiply_8_bits(backend):
    """Not several products at once, and not floats; on a GPU those in blocks alone."""
    kind = {"mosaic_tpu": "TPU7x", "mosaic_gpu": "NVIDIA H200"}[backend]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 256)), jnp.bfloat16)
    channels, w = (
        quantize_weight(jnp.asarray(rng.normal(size=(256, 256)), jnp.float32), format)
        for format in ("fp8", "fp8_block")
    )

    def kernels(function, *arguments):
        def fresh(*arguments):  # not traced for another target yet
            return function(*arguments)

        with use_target(Target(backend, kind)):
            traced = jax.make_jaxpr(fresh)(*arguments)
        assert traced.out_avals[0].dtype == jnp.float32
        return str(traced).count("name=grouped")

    assert kernels(matmul, x, w) == 1
    assert kernels(matmul, x, channels) == (1 if backend == "mosaic_tpu" else 0)
    assert kernels(matmul, x, jnp.zeros((256, 256), jnp.bfloat16)) == 0
    assert kernels(matmul, x[None], jax.tree.map(lambda leaf: leaf[None], w)) == 0


def test_bad_calls():
    golden.check_arguments(
        "pallas_kernels/matmul.txt", ValueError, inspect.unwrap(matmul), globals()
    )
