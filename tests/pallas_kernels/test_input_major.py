"""Products with matrices that lie input by input, against NumPy in FP64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.dense import dense_matmul, dense_swiglu
from pallas_kernels.input_major import InputMajor, in_tiles, product, width_of
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.nightly import nightly

DRAW = np.random.default_rng(7)


def drawn(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype(np.float32)


def tiled(weights, entry: Any = None) -> InputMajor:
    """Weights [..., d_out, d_in] in tiles."""
    return InputMajor(in_tiles(jnp.asarray(weights), width_of(weights.shape[-2])), entry)


def test_tiles():
    assert [width_of(size) for size in (1, 24, 128, 129, 200, 254, 257, 384)] == (
        [1, 24, 128, 129, 100, 127, 257, 128]
    )
    matrix = jnp.arange(12).reshape(4, 3)  # [d_out, d_in]
    expected = [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]]
    np.testing.assert_array_equal(in_tiles(matrix, 2), expected)
    assert InputMajor(in_tiles(matrix, 2)).shape == (4, 3)


# A tile and several, and one that is wider than most; d_in of fewer inputs than are added at a
# time, and no multiple of them; one block of rows and several, the last one whole or not.
@pytest.mark.parametrize("d_out", [1, 24, 128, 200, 257, 384])
@pytest.mark.parametrize(
    ("count", "d_in"),
    [
        *((1, 130), (33, 130), (70, 3), (70, 8)),
        *nightly(*((count, d_in) for count in (1, 2, 32, 33) for d_in in (3, 8)), (70, 130)),
    ],
)
def test_product(count, d_in, d_out):
    rows, weights = drawn(count, d_in), drawn(d_out, d_in)
    expected = rows.astype(np.float64) @ weights.T.astype(np.float64)
    made = jax.jit(product)(rows, tiled(weights))
    assert made.shape == (count, d_out)
    np.testing.assert_allclose(made, expected, rtol=0, atol=2e-6 * d_in)


def test_an_entry_of_a_stack_and_bfloat16():
    """Products in BF16 are those of floats."""
    rows, stack = (jnp.asarray(drawn(*shape), jnp.bfloat16) for shape in ((5, 16), (3, 40, 16)))
    exact = np.asarray(rows, np.float64) @ np.asarray(stack[2], np.float64).T
    made = jax.jit(product)(rows, tiled(stack, jnp.int32(2)))
    np.testing.assert_allclose(made, exact, atol=1e-5)


@pytest.mark.parametrize("count", [2, 31, 100])
def test_a_row_is_the_same_in_any_company(count):
    rows, weights = drawn(count, 136), tiled(drawn(300, 136))
    together = np.asarray(jax.jit(product)(rows, weights))
    for row in (0, count // 2, count - 1):
        alone = np.asarray(jax.jit(product)(rows[row : row + 1], weights))
        np.testing.assert_array_equal(together[row], alone[0])


def test_no_rows():
    assert product(jnp.zeros((0, 8)), tiled(jnp.ones((4, 8)))).shape == (0, 4)


def test_dense_ops_take_it():
    rows = jnp.asarray(drawn(6, 32))
    gate, up, down = drawn(48, 32), drawn(48, 32), drawn(24, 48)
    kept = [tiled(matrix) for matrix in (gate, up, down)]
    np.testing.assert_allclose(
        dense_matmul(rows, kept[0]), dense_matmul(rows, jnp.asarray(gate)), atol=1e-5
    )
    plain = dense_swiglu(rows, tuple(map(jnp.asarray, (gate, up, down))))
    np.testing.assert_allclose(dense_swiglu(rows, tuple(kept)), plain, rtol=1e-4, atol=1e-3)


# Of 0: two rows a block; 5: eight; 20: thirty-two.
@pytest.mark.parametrize("average", [None, 0, 5, 20])
@pytest.mark.parametrize("sizes", [[0, 3, 0, 40, 1], [50, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
def test_grouped_swiglu(sizes, average):
    rows = jnp.asarray(drawn(60, 24))
    gate, up, down = drawn(5, 40, 24), drawn(5, 40, 24), drawn(5, 24, 40)
    kept = [tiled(stack) for stack in (gate, up, down)]
    sizes = jnp.asarray(sizes, jnp.int32)
    plain = grouped_swiglu(rows, *map(jnp.asarray, (gate, up, down)), sizes)
    made = grouped_swiglu(rows, *kept, sizes, average=average)
    assert made.shape == (60, 24)
    np.testing.assert_allclose(made, plain, rtol=1e-4, atol=1e-2)
    other = grouped_swiglu(rows, *kept, sizes, average=5, zero_padding=False)
    np.testing.assert_array_equal(made[: sum(sizes)], other[: sum(sizes)])  # whatever the blocks


def test_a_stack_is_no_matrix():
    with pytest.raises(ValueError, match=r"rows \(2, 8\) times \(3, 4, 8\): needs one matrix"):
        product(jnp.ones((2, 8)), tiled(jnp.ones((3, 4, 8))))
    with pytest.raises(ValueError, match=r"rows \(2, 7\) times \(4, 8\)"):
        product(jnp.ones((2, 7)), tiled(jnp.ones((4, 8))))


def test_kernels_do_not_take_it():
    weights = tiled(jnp.ones((2, 64, 64)))
    sizes = jnp.asarray([4, 4], jnp.int32)
    with (
        use_target(Target("mosaic_tpu", "TPU v6 lite")),
        pytest.raises(ValueError, match="gate_weights lies input by input, which TPU v6 lite"),
    ):
        grouped_swiglu(jnp.ones((8, 64)), weights, weights, weights, sizes)
