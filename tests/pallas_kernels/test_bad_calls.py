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


BAD = {
    write_rows: [
        ({"pages": (), "rows": ()}, "0 arrays of pages and 0 of rows"),
        ({"rows": ()}, "1 arrays of pages and 0 of rows"),
        ({"rows": (zeros(3, 2),)}, r"rows\[0\] has shape \(3, 2\)"),
        ({"pages": (zeros(2, 4),)}, r"pages of rows\[0\] are float32\(2, 4\)"),
        (
            {"pages": (zeros(2, 1, 4), zeros(3, 1, 4)), "rows": (zeros(3, 1),) * 2},
            r"pages\[1\] has .* \(3, 1, 4\)",
        ),
        ({"pages": (int8(2, 1, 4),)}, r"rows\[0\] is float32, its pages are int8"),
    ],
    paged_attention: [
        ({"window": -1}, "window is -1"),
        ({"v_width": 2}, "v_width is 2, which is for v_pages None"),
        ({"v_pages": None}, "v_width is 0, needs 1 to 8"),
        ({"v_pages": None, "v_width": 9}, "v_width is 9, needs 1 to 8"),
        ({"v_pages": None, "v_width": 4, "v_scales": zeros(2, 2, 4)}, "no v_pages"),
        ({"k_scales": zeros(2, 2, 4)}, "k_pages is float32, which has no scales"),
        ({"k_pages": int8(2, 2, 4, 8)}, "k_pages is int8, k_scales is None"),
        (
            {"v_pages": zeros(2, 2, 4, 6, dtype=FP8), "v_scales": zeros(2, 2, 4, 1)},
            r"needs float32\(2, 2, 4\)",
        ),
        ({"k_pages": ints(2, 2, 4, 8)}, r"k_pages is int32\(2, 2, 4, 8\)"),
        ({"queries": zeros(3, 3, 8)}, "3 query heads are not a multiple of 2"),
        ({"queries": zeros(3, 4, 7)}, "head_dim 7, k_pages has 8"),
        ({"queries": ints(3, 4, 8)}, r"int32\(3, 4, 8\)"),
        ({"v_pages": zeros(3, 2, 4, 6)}, r"\(2, 2, 4\), v_pages has \(3, 2, 4\)"),
        ({"page_table": ints(1, 2, dtype=jnp.uint32)}, r"page_table is uint32\(1, 2\)"),
        ({"page_table": ints(1, 0)}, r"page_table is empty: \(1, 0\)"),
        ({"rope_pages": zeros(2, 2, 4, 3)}, "there are rope_pages and v_pages"),
        ({"position": ints(4)}, "position has 4 entries for 3 tokens"),
    ],
    chunk_attention: [
        ({"queries": zeros(3, 12)}, r"queries is float32\(3, 12\), needs floats"),
        ({"values": int8(3, 2, 4)}, r"values is int8\(3, 2, 4\), needs floats"),
        ({"keys": zeros(3, 1, 6)}, r"keys \(3, 1, 6\) .* agree in tokens and heads"),
        ({"keys": zeros(3, 2, 4)}, "queries and keys in head_dim"),
        ({"values": zeros(4, 2, 4)}, r"values \(4, 2, 4\) must agree"),
        ({"position": ints(4)}, "position has 4 entries for 3 tokens"),
        ({"position": zeros(3)}, r"position is float32\(3,\), needs int32 of rank 1"),
        ({"sequence_of_token": ints(3, 1)}, r"is int32\(3, 1\), needs int32 of rank 1"),
    ],
    merge: [
        ({"outputs": [], "lses": []}, "0 outputs and 0 lses"),
        ({"lses": []}, "1 outputs and 0 lses"),
        ({"lses": [zeros(2, 4)]}, r"lses\[0\] \(2, 4\)"),
        (
            {"outputs": [zeros(2, 3, 4), zeros(2, 3, 5)], "lses": [zeros(2, 3)] * 2},
            r"outputs\[1\] has shape \(2, 3, 5\)",
        ),
    ],
    work_items: [
        ({"sequences": 0}, "at most 1 tokens of 0 sequences"),
        ({"largest": 0}, "at most 0 tokens of 1 sequences"),
    ],
    grouped_matmul: [
        ({"row_format": "fp4", "weights": made(FP8, (1, 0))}, "row_format is 'fp4'"),
        ({"row_format": "int8", "weights": made(FP8, (1, 0))}, "is float8_e4m3fn"),
        ({"row_format": "fp8", "weights": made(jnp.int8, (1, 0))}, "weights is int8"),
        ({"row_format": "fp8", "weights": made(FP8, (1, 96))}, "of 96 of d_in"),
        ({"row_format": "fp8", "weights": made(jnp.int4, (1, 128))}, "weights is int4"),
        ({"row_format": "int8", "weights": made(jnp.int4, (1, 96))}, "96 .* multiple of 128"),
        ({"row_format": "fp8"}, "not in 8 or 4 bits"),
        ({"row_format": "float"}, "weights is float32, not in 8 or 4 bits"),
        (
            {"row_format": "bfloat16", "weights": made(jnp.int8, (1, 0))},
            "'bfloat16', needs None or .*'float'",
        ),
    ],
    grouped_swiglu: [
        ({"rows": zeros(4, 2, 3)}, r"rows is float32\(4, 2, 3\)"),
        ({"rows": zeros(4, 7)}, r"gate_weights .*\(2, 5, 3\), needs \(2, 'any', 7\)"),
        ({"up_weights": zeros(2, 6, 3)}, r"up_weights .* needs \(2, 5, 3\)"),
        ({"down_weights": zeros(3, 3, 5)}, r"down_weights .* needs \(2, 'any', 5\)"),
        ({"rows": zeros(4, 3, dtype=jnp.bfloat16)}, "gate_weights is float32, rows is bfloat16"),
        ({"group_sizes": zeros(2)}, r"group_sizes is float32\(2,\)"),
        ({"up_weights": weight(int8(2, 5, 3), zeros(2, 5), (1, 0))}, r"need float32\(2, 5, 1\)"),
        ({"up_weights": weight(int8(5, 3), zeros(5, 1), (1, 0))}, r"up_weights has shape \(5, 3\)"),
    ],
    routed_choices: [
        ({"gates": zeros(9, 2)}, r"\(9, 3\) and gates \(9, 2\) .* \[tokens, top_k\]"),
        ({"choices": ints(8, 3), "gates": zeros(8, 3)}, r"choices \(8, 3\) .* for x \(9, 3\)"),
        ({"choices": ints(9), "gates": zeros(9)}, r"choices \(9,\)"),
    ],
    quantize_rows: [
        ({"x": zeros(3)}, r"x is float32\(3,\)"),
        ({"x": zeros(2, 0)}, r"x is float32\(2, 0\)"),
        ({"x": ints(2, 3)}, r"x is int32\(2, 3\)"),
        ({"format": "int4"}, "'int4', needs one of .*'fp8', 'int8'"),
    ],
    dequantize_rows: [
        ({"values": zeros(2, 3)}, r"values is float32\(2, 3\)"),
        ({"scales": zeros(3)}, r"scales is float32\(3,\)"),
        ({"dtype": jnp.int32}, "needs a float type"),
    ],
    quantize_weight: [
        ({"w": zeros(3)}, r"w is float32\(3,\)"),
        ({"w": zeros(3, 0)}, r"w is float32\(3, 0\)"),
        ({"w": int8(3, 4)}, r"w is int8\(3, 4\)"),
        ({"format": "fp4"}, "'fp4', needs one of .*'fp8_block'"),
        ({"block": (2, -1)}, r"block is \(2, -1\)"),
    ],
    dequantize_weight: [
        ({"w": weight(zeros(2, 5, 3), zeros(2, 2, 2))}, r"w.values is float32"),
        ({"w": weight(int8(5), zeros(2, 2, 2))}, r"w.values is int8\(5,\)"),
        (
            {"w": weight(int8(2, 5, 3), zeros(2, 2, 3))},
            r"w.scales is float32\(2, 2, 3\), .*\(2, 2, 2\)",
        ),
        ({"w": weight(int8(2, 5, 3), zeros(2, 2, 2, dtype=jnp.bfloat16))}, "w.scales is bfloat16"),
        ({"w": weight(int8(2, 5, 3), zeros(2, 2, 2), (2, -1))}, r"is \(2, -1\)"),
    ],
    rms_norm_quantize: [
        ({"x": zeros(3)}, r"x is float32\(3,\)"),
        ({"x": zeros(2, 0), "weight": zeros(0)}, r"x is float32\(2, 0\)"),
        ({"x": ints(2, 3)}, r"x is int32\(2, 3\)"),
        ({"weight": zeros(4)}, r"weight is float32\(4,\), needs float32\(3,\)"),
        ({"weight": zeros(3, dtype=jnp.bfloat16)}, r"weight is bfloat16\(3,\)"),
        ({"format": "int4"}, "'int4', needs one of .*'fp8', 'int8'"),
    ],
}


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [(function, *row) for function, rows in BAD.items() for row in rows],
)
def test_what_does_not_fit_is_named(function, change, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(function)(**(GOOD[function] | change))


@pytest.mark.parametrize("function", GOOD)
def test_what_fits(function):
    inspect.unwrap(function)(**GOOD[function])
