"""Decode steps of real models to be compiled for Hopper: called by `gpu_resources.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Case
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.rotate_and_write.api import rotate_and_write
from pallas_kernels.rotate_and_write.latents import norm_and_write

TOKENS, PAGES, PAGE_SIZE, PAGES_PER_SEQUENCE = 128, 8192, 64, 64
MODELS = {"step3": False, "qwen3-235b": True}
"""Models, and whether each norms its heads."""
FORMATS = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.uint8}
"""Number formats of the cached keys and values, by name."""
Q_LATENT, LATENT, ROPE = 1536, 512, 64
"""Widths of the query latent, cached latent and rotated key of DeepSeek-V3 and Kimi K2."""


def gpu_cases() -> list[Case]:
    """Returns all formats of every model and of latents; 8-bit latents also beside BF16 keys."""
    latents = [_latents(form, split=False) for form in FORMATS]
    latents += [_latents(form, split=True) for form in ("int8", "fp8")]
    return [*(_case(model, form) for model in MODELS for form in FORMATS), *latents]


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
    norm = jax.ShapeDtypeStruct((shape.head_dim,), jnp.bfloat16)
    norms = {"query_norm": norm, "key_norm": norm} if MODELS[model] else {}
    arguments = (tuple(pages), *heads, *angles, *_where(), norms)
    return Case(f"{model} {form}", _call, arguments)


def _latents(form: str, *, split: bool) -> Case:
    dtype, places = jnp.dtype(FORMATS[form]), (PAGES, 1, PAGE_SIZE)
    pages = [jax.ShapeDtypeStruct((*places, LATENT + ROPE), dtype)]
    if split:
        pages = [
            jax.ShapeDtypeStruct((*places, LATENT), dtype),
            jax.ShapeDtypeStruct((*places, ROPE), jnp.bfloat16),
        ]
    if dtype.itemsize == 1:
        pages.append(jax.ShapeDtypeStruct(places, jnp.float32))
    down = jax.ShapeDtypeStruct((TOKENS, Q_LATENT + LATENT + ROPE), jnp.bfloat16)
    angles = (jax.ShapeDtypeStruct((TOKENS, ROPE // 2), jnp.float32),) * 2
    norms = {
        name: jax.ShapeDtypeStruct((width,), jnp.bfloat16)
        for name, width in (("query_norm", Q_LATENT), ("latent_norm", LATENT))
    }
    name = f"deepseek-v3 {form}{', keys bf16' if split else ''}"
    return Case(name, _call_latents, (tuple(pages), down, *angles, *_where(), norms))


def _where() -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns page table, sequences and positions."""
    return tuple(
        jax.ShapeDtypeStruct(size, jnp.int32)
        for size in ((TOKENS, PAGES_PER_SEQUENCE), (TOKENS,), (TOKENS,))
    )


def _call_latents(*arguments: Any) -> Any:
    *plain, norms = arguments
    return norm_and_write(*plain, **norms, epsilon=1e-6, interleaved=True, stored=True)


def _call(*arguments: Any) -> Any:
    *plain, norms = arguments
    return rotate_and_write(*plain, **norms, epsilon=1e-6)
