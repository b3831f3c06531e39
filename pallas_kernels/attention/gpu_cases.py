"""Batches of real models to be compiled for Hopper: called by `pallas_kernels/gpu_resources.py`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.model_batch import attend, page_shapes
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.gpu_resources import Case

SEQUENCES, KV_LENGTH, PAGE_SIZE = 64, 8192, 64
FORMATS = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Number formats of the cached keys and values, by name."""
WHOLE_MODELS = ("step3", "deepseek-v3", "qwen3-235b")

DRAFT_TOKENS = (2, 4, 8)
"""Tokens per sequence in the batches that verify drafts."""
CHUNK_SEQUENCES, CHUNK_TOKENS = 4, 512
"""Sequences of a batch of prefill chunks, and tokens of each chunk."""


def cases() -> list[Case]:
    """Returns decode steps of all named shapes, and draft and prefill batches of whole models."""
    decode = [(name, SEQUENCES, 1) for name in SHAPES]
    verify = [(name, SEQUENCES, tokens) for name in WHOLE_MODELS for tokens in DRAFT_TOKENS]
    prefill = [(name, CHUNK_SEQUENCES, CHUNK_TOKENS) for name in WHOLE_MODELS]
    return [
        batch(name, kv_format, sequences, tokens)
        for name, sequences, tokens in (*decode, *verify, *prefill)
        for kv_format in FORMATS
    ]


def before_hopper() -> list[Case]:
    """Batches that are compiled for GPUs before Hopper."""
    return [
        batch(name, form, sequences, tokens)
        for name in ("step3", "deepseek-v3", "qwen3-235b-tp4")
        for form in FORMATS
        for sequences, tokens in ((SEQUENCES, 1), (4, 512))
    ]


def batch(name: str, kv_format: str, sequences: int, tokens: int) -> Case:
    """Sequences of `KV_LENGTH` tokens, `tokens` queries each."""
    shape, dtype = SHAPES[name], jnp.dtype(FORMATS[kv_format])
    pages_per_sequence = KV_LENGTH // PAGE_SIZE
    pages, scales = page_shapes(shape, dtype, sequences * pages_per_sequence, PAGE_SIZE)
    rows = sequences * tokens
    queries = jax.ShapeDtypeStruct((rows, shape.q_heads, shape.head_dim), jnp.bfloat16)
    where = tuple(
        jax.ShapeDtypeStruct(size, jnp.int32)
        for size in ((sequences, pages_per_sequence), (rows,), (rows,))
    )
    kind = "decode" if tokens == 1 else f"{tokens} tokens"
    function = functools.partial(attend, shape)
    return Case(f"{name} {kv_format} {kind}", function, (queries, pages, scales, where))
