"""Decode steps of real models to be compiled for Hopper: called by `gpu_resources.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.gpu_resources import Case
from pallas_kernels.rotate_and_write.api import rotate_and_write

TOKENS, PAGES, PAGE_SIZE, PAGES_PER_SEQUENCE = 128, 8192, 64, 64
MODELS = {"step3": False, "qwen3-235b": True}
"""And whether it norms its heads."""
FORMATS = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.uint8}
"""Of keys and values."""


def cases() -> list[Case]:
    """All formats of every model."""
    return [_case(model, form) for model in MODELS for form in FORMATS]


def _case(model: str, form: str) -> Case:
    shape, dtype = SHAPES[model], jnp.dtype(FORMATS[form])
    places = (PAGES, shape.kv_heads, PAGE_SIZE)
    pages = [jax.ShapeDtypeStruct((*places, shape.head_dim), dtype)] * 2
    if dtype.itemsize == 1:
        pages += [jax.ShapeDtypeStruct(places, jnp.float32)] * 2
    heads = tuple(
        jax.ShapeDtypeStruct((TOKENS, count, shape.head_dim), jnp.bfloat16)
        for count in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    )
    angles = (jax.ShapeDtypeStruct((TOKENS, shape.head_dim // 2), jnp.float32),) * 2
    where = tuple(
        jax.ShapeDtypeStruct(size, jnp.int32)
        for size in ((TOKENS, PAGES_PER_SEQUENCE), (TOKENS,), (TOKENS,))
    )
    norm = jax.ShapeDtypeStruct((shape.head_dim,), jnp.bfloat16)
    norms = {"query_norm": norm, "key_norm": norm} if MODELS[model] else {}
    arguments = (tuple(pages), *heads, *angles, *where, norms)
    return Case(f"{model} {form}", _call, arguments)


def _call(*arguments: Any) -> Any:
    *plain, norms = arguments
    return rotate_and_write(*plain, **norms, epsilon=1e-6)
