"""Batches of real models to be compiled for Hopper: called by `pallas_kernels/gpu_resources.py`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.model_batch import attend, page_shapes
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.gpu_resources import Case

SEQUENCES, KV_LENGTH, PAGE_SIZE = 64, 8192, 64
DRAFT_TOKENS = 4
"""Of every sequence, in the batches that verify drafts."""
FORMATS = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Of keys and values."""


def cases() -> list[Case]:
    """The named shapes in all formats, one token a sequence and several."""
    return [
        batch(name, kv_format, tokens)
        for tokens in (1, DRAFT_TOKENS)
        for name in SHAPES
        for kv_format in FORMATS
    ]


def batch(name: str, kv_format: str, tokens: int) -> Case:
    """`SEQUENCES` sequences of `KV_LENGTH` tokens, `tokens` queries each."""
    shape, dtype = SHAPES[name], jnp.dtype(FORMATS[kv_format])
    pages_per_sequence = KV_LENGTH // PAGE_SIZE
    pages, scales = page_shapes(shape, dtype, SEQUENCES * pages_per_sequence, PAGE_SIZE)
    rows = SEQUENCES * tokens
    queries = jax.ShapeDtypeStruct((rows, shape.q_heads, shape.head_dim), jnp.bfloat16)
    where = tuple(
        jax.ShapeDtypeStruct(size, jnp.int32)
        for size in ((SEQUENCES, pages_per_sequence), (rows,), (rows,))
    )
    kind = "decode" if tokens == 1 else f"{tokens} tokens"
    function = functools.partial(attend, shape)
    return Case(f"{name} {kv_format} {kind}", function, (queries, pages, scales, where))
