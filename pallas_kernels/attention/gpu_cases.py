"""Batches of real models to be compiled for Hopper: called by `pallas_kernels/gpu_resources.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention.api import paged_attention
from pallas_kernels.attention.shapes import SHAPES, AttentionShape
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
    place = (SEQUENCES * pages_per_sequence, shape.kv_heads, PAGE_SIZE)
    widths = [shape.head_dim] if shape.shared else [shape.head_dim, shape.v_width]
    pages = [jax.ShapeDtypeStruct((*place, width), dtype) for width in widths]
    scales = [jax.ShapeDtypeStruct(place, jnp.float32)] * (len(pages) * (dtype.itemsize == 1))
    rows = SEQUENCES * tokens
    queries = jax.ShapeDtypeStruct((rows, shape.q_heads, shape.head_dim), jnp.bfloat16)
    where = tuple(
        jax.ShapeDtypeStruct(size, jnp.int32)
        for size in ((SEQUENCES, pages_per_sequence), (rows,), (rows,))
    )
    kind = "decode" if tokens == 1 else f"{tokens} tokens"
    function = functools.partial(_attend, shape)
    return Case(f"{name} {kv_format} {kind}", function, (queries, pages, scales, where))


def _attend(
    shape: AttentionShape, queries: Array, pages: list[Array], scales: list[Array], where: Any
) -> Array:
    return paged_attention(
        queries,
        pages[0],
        None if shape.shared else pages[1],
        *where,
        scale=shape.head_dim**-0.5,
        v_width=shape.v_width if shape.shared else 0,
        k_scales=scales[0] if scales else None,
        v_scales=scales[1] if len(scales) > 1 else None,
    )
