"""The errors that users see: what does not fit is named, with what is needed.

`unwrap` removes the check of annotations, which only tests run with.
"""

import inspect

import jax.numpy as jnp
import pytest

from pallas_kernels.attention import chunk_attention, merge, paged_attention, write_rows
from pallas_kernels.attention.work_items import work_items
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.routed import routed_choices
from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.quantize import (
    QuantArray,
    dequantize_rows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
    scales_shape,
)
from tests import golden


def ints(*shape, dtype=jnp.int32):
    return jnp.zeros(shape, dtype)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def int8(*shape):
    return jnp.zeros(shape, jnp.int8)


WHERE = {"page_table": ints(1, 2), "sequence_of_token": ints(3), "position": ints(3)}
TOKENS = {"sequence_of_token": ints(3), "position": ints(3)}
FP8 = jnp.float8_e4m3fn
GOOD = {
    write_rows: {"pages": (zeros(2, 1, 4),), "rows": (zeros(3, 1),), **WHERE},
    paged_attention: {
        "queries": zeros(3, 4, 8),
        "k_pages": zeros(2, 2, 4, 8),
        "v_pages": zeros(2, 2, 4, 6),
        "scale": 1.0,
        **WHERE,
    },
    chunk_attention: {
        "queries": zeros(3, 2, 6),
        "keys": zeros(3, 2, 6),
        "values": zeros(3, 2, 4),
        "scale": 1.0,
        **TOKENS,
    },
    merge: {"outputs": [zeros(2, 3, 4)], "lses": [zeros(2, 3)]},
    work_items: {**TOKENS, "sequences": 1, "largest": 1},
    grouped_matmul: {"rows": zeros(3, 256), "weights": zeros(2, 8, 256), "group_sizes": ints(2)},
    grouped_swiglu: {
        "rows": zeros(4, 3),
        "gate_weights": zeros(2, 5, 3),
        "up_weights": zeros(2, 5, 3),
        "down_weights": zeros(2, 3, 5),
        "group_sizes": ints(2),
    },
    routed_choices: {
        "x": zeros(9, 3),
        "choices": ints(9, 3),
        "gates": zeros(9, 3),
        "gate_weights": zeros(2, 5, 3),
        "up_weights": zeros(2, 5, 3),
        "down_weights": zeros(2, 3, 5),
    },
    quantize_rows: {"x": zeros(2, 3), "format": "fp8"},
    dequantize_rows: {
        "values": ints(2, 3, dtype=jnp.int8),
        "scales": zeros(2),
        "dtype": jnp.float32,
    },
    quantize_weight: {"w": zeros(3, 4), "format": "fp8"},
    dequantize_weight: {
        "w": QuantArray(int8(2, 5, 3), zeros(2, 2, 2), (4, 2)),
        "dtype": jnp.float32,
    },
    rms_norm_quantize: {"x": zeros(2, 3), "weight": zeros(3), "epsilon": 1e-5, "format": "int8"},
}
"""Calls that fit."""


def weight(values, scales, block=(4, 2)):
    return QuantArray(values, scales, block)


def made(dtype, block):
    """Weights of `grouped_matmul`."""
    values = jnp.zeros((2, 8, 256), dtype)
    return weight(values, jnp.ones(scales_shape(values.shape, block)), block)


def test_what_does_not_fit_is_named():
    """`golden/pallas_kernels/bad_calls.txt` lists the arguments that differ from those that fit."""

    def call(text):
        name, _, change = text.partition("(")
        function = globals()[name]
        inspect.unwrap(function)(**(GOOD[function] | eval(f"dict({change}", globals())))

    golden.check_refused("pallas_kernels/bad_calls.txt", ValueError, call)


@pytest.mark.parametrize("function", GOOD)
def test_what_fits(function):
    inspect.unwrap(function)(**GOOD[function])
