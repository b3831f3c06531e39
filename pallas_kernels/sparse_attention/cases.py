"""Steps of DeepSeek-V3.2 with sparse attention, to be compiled ahead of time.

Called by `pallas_kernels/aot.py` for TPUs, and by `pallas_kernels/gpu_resources.py` for GPUs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Case, Loop
from pallas_kernels.attention.cases import FORMATS, GPU_FORMATS, formats
from pallas_kernels.sparse_attention.api import attend_chosen, choose_positions
from pallas_kernels.sparse_attention.mosaic_tpu import BLOCK_TOKENS

SEQUENCES, CONTEXT, PAGE_SIZE, GPU_PAGE_SIZE = 64, 32768, 128, 64
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
Q_HEADS, LATENT, ROW = 128, 512, {PAGE_SIZE: 640, GPU_PAGE_SIZE: 576}
"""Columns of a row: on TPUs a multiple of 128."""
BATCHES = {"": (SEQUENCES, 1), " chunk": (4, 256)}
"""Sequences and tokens per sequence, of a decode step and of prefill chunks."""


def cases(generation: str) -> list[Case]:
    """Returns a choice and an attention of both batches in the formats of a TPU generation."""
    return [
        case(name, form, kind, PAGE_SIZE)
        for name in ("choose", "attend")
        for form in formats(generation)
        for kind in BATCHES
    ]


def gpu_cases() -> list[Case]:
    """Returns the same for Hopper."""
    return [
        case(name, form, kind, GPU_PAGE_SIZE, GPU_FORMATS)
        for name in ("choose", "attend")
        for form in GPU_FORMATS
        for kind in BATCHES
    ]


def case(name: str, form: str, kind: str, page_size: int, dtypes: dict[str, Any] = FORMATS) -> Case:
    """Returns one case; of a choice in a decode step, the loop over keys is analysed."""
    sequences, each = BATCHES[kind]
    tokens, dtype = sequences * each, jnp.dtype(dtypes[form])
    places = (SEQUENCES * CONTEXT // page_size, 1, page_size)
    scales = (_shape(*places, dtype=jnp.float32),) if dtype.itemsize == 1 else ()
    integers = functools.partial(_shape, dtype=jnp.int32)
    where = integers(sequences, CONTEXT // page_size), integers(tokens)
    if name == "attend":
        pages = _shape(*places, ROW[page_size], dtype=dtype), *scales
        queries, chosen = _shape(tokens, Q_HEADS, ROW[page_size]), integers(tokens, TOP_K)
        function = functools.partial(attend_chosen, scale=0.1, v_width=LATENT)
        return Case(f"{name} {form}{kind}", function, (queries, pages, chosen, *where))
    pages = _shape(*places, INDEX_DIM, dtype=dtype), *scales
    looks = _shape(tokens, INDEX_HEADS, INDEX_DIM), _shape(tokens, INDEX_HEADS, dtype=jnp.float32)
    loop = None
    if not kind:
        loop = Loop(
            kernel="index_scores",
            unit="KV token",
            units=BLOCK_TOKENS,
            copies=BLOCK_TOKENS // page_size,  # of keys; XLA brings all scales to VMEM before
            bytes_per_unit=INDEX_DIM * dtype.itemsize + 4 * len(scales) + 4,
        )
    function = functools.partial(choose_positions, top_k=TOP_K)
    return Case(f"{name} {form}{kind}", function, (*looks, pages, *where, where[1]), loop=loop)


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)
