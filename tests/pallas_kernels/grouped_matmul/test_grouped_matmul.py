"""`grouped_matmul` and `grouped_swiglu` against literal expectations and a NumPy definition."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.quantize import QuantArray
from tests.pallas_kernels.grouped_matmul.suite import Weight, assert_near, swiglu_numpy

# Blocks of 4 x 4 leave a partial block in d_in and in d_out.
BLOCKS = ("fp8", (4, 4))
FORMATS = ["float", "fp8", BLOCKS, "int8"]


def int32(*values):
    return jnp.asarray(values, jnp.int32)


class TestLiteral:
    def test_bfloat16_accumulates_in_float32(self):
        """In BF16, 256 + 1 is 256: adding ones one by one would stay there."""
        weights = jnp.ones((1, 3, 1024), jnp.bfloat16)
        output = grouped_matmul(jnp.ones((2, 1024), jnp.bfloat16), weights, int32(2))
        assert output.dtype == jnp.bfloat16
        np.testing.assert_array_equal(output.astype(jnp.float32), np.full((2, 3), 1024))


def part_of(weight, *where):
    """Some groups and a part of the matrices of a weight, for NumPy alone."""
    part = copy.copy(weight)
    part.numpy = weight.numpy[where]
    return part


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_inside_shard_map(format):
    """Experts on two devices, their inner dimension on two more; scales go where values go."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    rng, sizes = np.random.default_rng(0), np.asarray([3, 9, 5, 1], np.int32)
    shapes = [(4, 16, 8), (4, 16, 8), (4, 8, 16)]
    weights = [Weight(rng, shape, format, jnp.float32, sizes) for shape in shapes]
    rows = rng.normal(size=(24, 8)).astype(np.float32)
    experts, d_out, d_in = (
        PartitionSpec(*names) for names in (("ep",), ("ep", "tp"), ("ep", None, "tp"))
    )

    def specs(weight, values, scales):
        if weight.format is None:
            return values
        return QuantArray(values, scales, weight.format[1])

    gate, up, down = weights
    of_down = d_in if format == BLOCKS else experts
    sharded = jax.shard_map(
        lambda *arguments: jax.lax.psum(grouped_swiglu(*arguments), "tp"),
        mesh=mesh,
        in_specs=(
            PartitionSpec(),
            *(specs(weight, d_out, d_out) for weight in (gate, up)),
            specs(down, d_in, of_down),
            experts,
        ),
        out_specs=experts,
    )
    output = jax.jit(sharded)(rows, *(weight.jax for weight in weights), sizes)
    for ep in (0, 1):
        groups, expected = slice(2 * ep, 2 * ep + 2), 0
        for half in (slice(0, 8), slice(8, 16)):  # hidden rows are quantised by each device
            expected = expected + swiglu_numpy(
                rows,
                sizes[groups],
                [
                    part_of(gate, groups, half, slice(None)),
                    part_of(up, groups, half, slice(None)),
                    part_of(down, groups, slice(None), half),
                ],
                np.float32,
            )
        assert_near(output[24 * ep : 24 * ep + 24], expected, 0.1 if format == "int8" else 1e-4)


def int8_weight(values, scale):
    """Weights of a single group, with one scale for all channels."""
    values = jnp.asarray([values], jnp.int8)
    return QuantArray(values, jnp.full((1, values.shape[1], 1), scale), (1, 0))


class TestRowFormat:
    """Meaning of `row_format`; 127 and 448 are the largest values, where scales are to be 1."""

    def test_literal_int8(self):
        """Two blocks of 128 columns, the second one of two: scales 1 and 2."""
        row = np.zeros((1, 130), np.float32)
        row[0, :2], row[0, 128:] = [127, 0.4], [254, 3.2]
        weights = np.zeros((1, 1, 130), np.int8)
        weights[0, 0, :2], weights[0, 0, 128:] = [2, 100], [1, 10]
        weights = QuantArray(jnp.asarray(weights), jnp.full((1, 1, 1), 0.5), (1, 0))
        sizes = int32(1)
        output = grouped_matmul(jnp.asarray(row), weights, sizes, row_format="int8")
        # 0.5 * (127 * 2 + 0 * 100) + 0.5 * 2 * (127 * 1 + 2 * 10)
        np.testing.assert_array_equal(output, [[127 + 147]])

    def test_literal_fp8(self):
        """448 and 3.3 (between 3.25 and 3.5, nearer to 3.25), then 896 and 3.3 in a scale of 2."""
        row = np.zeros((1, 256), np.float32)
        row[0, :2], row[0, 128:130] = [448, 3.3], [896, 3.3]
        weights = np.zeros((1, 1, 256), np.float32)
        weights[0, 0, :2], weights[0, 0, 128:130] = [1, 2], [0.5, 4]
        values = jnp.asarray(weights).astype(jnp.float8_e4m3fn)
        weights = QuantArray(values, jnp.asarray([[[1.0, 0.25]]]), (128, 128))
        sizes = int32(1)
        output = grouped_matmul(jnp.asarray(row), weights, sizes, row_format="fp8")
        # 448 + 2 * 3.25, and 0.25 * 2 * (448 * 0.5 + 4 * 1.625): 1.65 is nearest to 1.625
        np.testing.assert_array_equal(output, [[454.5 + 0.5 * (224 + 6.5)]])

    def test_hidden_rows_are_not_rounded_before(self):
        """126 / 207 of 127 is 77.3; rounded to BF16, the two hidden values would give 77.8."""
        rows = jnp.asarray([[127.0, 127.0]], jnp.bfloat16)

        gate, up = int8_weight([[127, 0], [127, 0]], 1e-2), int8_weight([[127, 80], [126, 0]], 1.0)
        sizes = int32(1)
        output = grouped_swiglu(
            rows, gate, up, int8_weight([[0, 1]], 1.0), sizes, row_format="int8"
        )
        largest = 127 * 127 * 1e-2 * 127 * 207  # where silu is the number itself
        np.testing.assert_allclose(output.astype(jnp.float32), [[77 * largest / 127]], rtol=4e-3)
