"""`quantize_weight` and `dequantize_weight` against a NumPy definition."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.quantize import (
    QuantArray,
    as_bits,
    dequantize_weight,
    from_bits,
    quantize_weight,
    sliceable,
)
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.quantize.definition import quantize_numpy

compiled_quantize_weight = jax.jit(quantize_weight, static_argnums=(1, 2))
compiled_dequantize_weight = jax.jit(dequantize_weight, static_argnums=1)


def scales_and_values_numpy(w, format, block):
    """The definition, in NumPy: every block by itself. Values and scales, both float32."""
    *batch, d_out, d_in = w.shape
    sizes = [axis if size == 0 else size for axis, size in zip((d_out, d_in), block, strict=True)]
    counts = [-(-d_out // sizes[0]), -(-d_in // sizes[1])]
    values = np.empty(w.shape, np.float32)
    scales = np.empty((*batch, *counts), np.float32)
    for place in np.ndindex(*scales.shape):
        *stack, row, column = place
        part = (
            *stack,
            slice(row * sizes[0], (row + 1) * sizes[0]),
            slice(column * sizes[1], (column + 1) * sizes[1]),
        )
        found, scales[place] = quantize_numpy(
            w[part].ravel(), "int8" if format == "int8" else "fp8"
        )
        values[part] = found.astype(np.float32).reshape(w[part].shape)
    return values, scales


def finite_weights(draw, shape, dtype):
    """Any finite bit patterns, or numbers near each other."""
    if draw(st.booleans()):
        bits = np.uint16 if dtype == jnp.bfloat16 else np.uint32
        w = draw(arrays(bits, shape)).view(dtype)
        return np.where(np.isfinite(w), w, np.asarray(0, dtype))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    w = rng.normal(size=shape) * 2.0 ** draw(st.integers(-140, 120))
    w[rng.random(shape) < 0.3] = 0
    return w.astype(dtype)


class TestWeights:
    """Weights: the same as NumPy's, bit for bit, since both multiply by the same reciprocals."""

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @golden.table("pallas_kernels/weight_formats.yaml")
    @settings(max_examples=30)
    @given(data=st.data())
    def test_any_finite_weights(self, format, block, shape, dtype, data):
        block = block and tuple(block)
        w = finite_weights(data.draw, tuple(shape), dtype)
        got = compiled_quantize_weight(jnp.asarray(w), format, block)
        used = {"fp8": (1, 0), "int8": (1, 0)}[format] if block is None else block
        values, scales = scales_and_values_numpy(w, format, used)
        np.testing.assert_array_equal(got.scales, scales)
        np.testing.assert_array_equal(np.asarray(got.values, np.float32), values)
        spread = scales
        for axis, size in zip((-2, -1), used, strict=True):
            spread = np.repeat(spread, size or shape[axis], axis)
            spread = np.take(spread, range(shape[axis]), axis)
        back = compiled_dequantize_weight(got, jnp.float32)
        with np.errstate(over="ignore"):
            expected = np.clip(values * spread, -np.finfo(np.float32).max, np.finfo(np.float32).max)
        np.testing.assert_array_equal(back, expected)

    @pytest.mark.parametrize("format", ["fp8", "fp8_block", "int8"])
    def test_operation_by_operation_and_sharded(self, format):
        """The scale of a block that lies on several devices is that of the whole block."""
        w = np.random.default_rng(0).normal(size=(2, 320, 192)).astype(np.float32)
        block = (128, 128) if format == "fp8_block" else (1, 0)
        values, scales = scales_and_values_numpy(w, format, block)
        mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), ("ep", "out", "in"))
        sharding = NamedSharding(mesh, PartitionSpec("ep", "out", "in"))
        for function, array in (
            (quantize_weight, jnp.asarray(w)),
            (compiled_quantize_weight, jax.device_put(w, sharding)),
        ):
            got = function(array, format)
            np.testing.assert_array_equal(got.scales, scales)
            np.testing.assert_array_equal(np.asarray(got.values, np.float32), values)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_channel_that_is_not_finite_shows_it(self, bad):
        w = jnp.asarray([[1.0, bad], [1.0, 2.0]])
        for format in ("fp8", "int8"):
            output = dequantize_weight(quantize_weight(w, format), jnp.float32)
            assert np.isnan(output[0]).all()
            np.testing.assert_allclose(output[1], [1, 2], rtol=0.04)

    def test_mxfp4_keeps_its_numbers_to_the_bit(self):
        codes, powers = np.tile(np.arange(16, dtype=np.uint8), (200, 2)), np.arange(27, 227)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        numbers = (values * 2.0 ** (powers[:, None] - 127.0)).astype(np.float32)
        made = compiled_quantize_weight(numbers, "mxfp4", (1, 32))
        assert np.asarray(made.scales).view(np.uint8)[:, 0].tolist() == powers.tolist()
        np.testing.assert_array_equal(np.asarray(made.values).view(np.uint8) & 15, codes)
        found = np.asarray(compiled_dequantize_weight(made, jnp.float32))
        np.testing.assert_array_equal(found.view(np.uint32), numbers.view(np.uint32))

    def test_bits(self):
        """The values of FP8 weights may be kept as bits."""
        w = quantize_weight(jnp.asarray([[448.0, -2.0], [1.0, 2.0]]), "fp8", (0, 0))
        bits = dataclasses.replace(w, values=as_bits(w.values))
        assert bits.dtype == jnp.uint8
        np.testing.assert_array_equal(bits.values, [[0x7E, 0xC0], [0x38, 0x40]])
        np.testing.assert_array_equal(
            dequantize_weight(bits, jnp.float32), [[448.0, -2.0], [1.0, 2.0]]
        )
        assert from_bits(bits.values).dtype == jnp.float8_e4m3fn
        for other in (jnp.int8, jnp.float32):
            assert as_bits(jnp.zeros(2, other)).dtype == from_bits(jnp.zeros(2, other)).dtype

    def test_what_is_sliced(self):
        """Bits for plain XLA; a target with kernels slices FP8, and would copy what is cast."""
        values = jnp.zeros((2, 3), jnp.float8_e4m3fn)
        assert sliceable(values).dtype == jnp.uint8
        with use_target(Target("mosaic_tpu", "TPU7x")):
            assert sliceable(values) is values

    def test_is_a_pytree(self):
        """A tree of arrays, shapes or specs; block is part of the structure."""
        w = jnp.ones((3, 4, 6))
        quantised = quantize_weight(w, "fp8_block", (2, 4))
        assert quantised.shape == (3, 4, 6)
        assert quantised.ndim == 3
        specs = jax.tree.map(lambda _: PartitionSpec(), quantised)
        assert specs == QuantArray(PartitionSpec(), PartitionSpec(), (2, 4))
        shapes = jax.eval_shape(lambda: quantised)
        assert shapes.scales.shape == (3, 2, 2)
        assert shapes.dtype == jnp.float8_e4m3fn
        layers = jax.lax.map(lambda layer: dequantize_weight(layer, jnp.float32), quantised)
        np.testing.assert_allclose(layers, w, rtol=1e-6)
        first = jax.tree.map(lambda leaf: leaf[0], quantised)
        assert first.shape == (4, 6)
        assert first.block == (2, 4)
