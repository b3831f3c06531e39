"""Decode steps of real models, to be compiled ahead of time: called by `pallas_kernels/aot.py`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.aot import GENERATIONS, Case, Loop
from pallas_kernels.attention.api import write_rows
from pallas_kernels.attention.model_batch import attend, page_shapes
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.attention.tiles import tpu_tiles

SEQUENCES, KV_LENGTH, PAGE_SIZE = 64, 8192, 128
PAGES = SEQUENCES * KV_LENGTH // PAGE_SIZE

WHERE = (
    jax.ShapeDtypeStruct((SEQUENCES, KV_LENGTH // PAGE_SIZE), jnp.int32),
    jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32),
    jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32),
)
"""Page table, sequences and positions."""

FORMATS = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.uint8}
"""Of keys and values; FP8 as its bits, as the cache has them."""


def cases(generation: str) -> list[Case]:
    """The named shapes in BF16 and in the generation's format of 8 bits."""
    formats = ("bf16", "fp8" if generation == "v7x" else "int8")
    return [
        case(name, kv_format, generation)
        for name in SHAPES
        for kv_format in formats
        for case in (_decode, _write)
    ]


def _decode(name: str, kv_format: str, generation: str) -> Case:
    """One decode step: `SEQUENCES` sequences of `KV_LENGTH` tokens, a query each."""
    shape, dtype = SHAPES[name], jnp.dtype(FORMATS[kv_format])
    pages, scales = page_shapes(shape, dtype, PAGES, PAGE_SIZE)
    queries = jax.ShapeDtypeStruct((SEQUENCES, shape.q_heads, shape.head_dim), jnp.bfloat16)
    units = tpu_tiles(GENERATIONS[generation].device_kind).block_tokens
    return Case(
        name=f"{name} {kv_format}",
        function=functools.partial(attend, shape),
        arguments=(queries, pages, scales, WHERE),
        loop=Loop(
            kernel="paged_attention",
            unit="KV token",
            units=units,
            copies=units // PAGE_SIZE * (len(pages) + len(scales)),
            bytes_per_unit=shape.kv_elements() * dtype.itemsize + 4 * shape.kv_heads * len(scales),
        ),
    )


def _write(name: str, kv_format: str, generation: str) -> Case:
    """Writing the keys and values of that step."""
    pages, scales = page_shapes(SHAPES[name], jnp.dtype(FORMATS[kv_format]), PAGES, PAGE_SIZE)
    arrays = (*pages, *scales)
    rows = tuple(
        jax.ShapeDtypeStruct((SEQUENCES, array.shape[1], *array.shape[3:]), array.dtype)
        for array in arrays
    )
    return Case(f"{name} {kv_format} write", write_rows, (arrays, rows, *WHERE), donated=(0,))
