"""Steps of DeepSeek-V3.2 and V4 with sparse attention, to be compiled ahead of time.

Called by `pallas_kernels/aot.py` for TPUs, and by `pallas_kernels/gpu_resources.py` for Hopper,
which multiplies chosen rows by the kernels of attention, with the shapes of `deepseek-v3` there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Case, Loop
from pallas_kernels.attention.cases import FORMATS, GPU_PAGE_SIZE, formats
from pallas_kernels.sparse_attention.api import attend_chosen, choose_positions
from pallas_kernels.sparse_attention.mosaic_tpu import PART_TOKENS, PARTS

SEQUENCES, CONTEXT, PAGE_SIZE = 64, 32768, 128
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
Q_HEADS, LATENT, ROW = 128, 512, 640
BATCHES = {"": (SEQUENCES, 1), " chunk": (4, 256)}
"""Sequences and tokens per sequence, of a decode step and of prefill chunks."""


def cases(generation: str) -> list[Case]:
    """Returns a choice and an attention of both batches in the formats of a TPU generation."""
    return [
        _case(name, form, kind)
        for name in ("choose", "attend")
        for form in formats(generation)
        for kind in BATCHES
    ]


def gpu_cases() -> list[Case]:
    """Returns the choices of decode steps: DeepSeek-V3.2, and V4 Flash with a row for 4 tokens."""
    models = {"deepseek-v3.2": (CONTEXT, TOP_K), "deepseek-v4": (CONTEXT // 4, TOP_K // 4)}
    integers = functools.partial(_shape, dtype=jnp.int32)
    found = []
    for name, (context, top_k) in models.items():
        table = integers(SEQUENCES, context // GPU_PAGE_SIZE), integers(SEQUENCES)
        looks = (
            _shape(SEQUENCES, INDEX_HEADS, INDEX_DIM),
            _shape(SEQUENCES, INDEX_HEADS, dtype=jnp.float32),
        )
        keys = _shape(SEQUENCES * context // GPU_PAGE_SIZE, 1, GPU_PAGE_SIZE, INDEX_DIM)
        choose = functools.partial(choose_positions, top_k=top_k)
        found.append(Case(f"{name} choose bf16", choose, (*looks, (keys,), *table, table[1])))
    return found


def _case(name: str, form: str, kind: str) -> Case:
    """Returns one case; of a choice in a decode step, the loop over keys is analysed."""
    sequences, each = BATCHES[kind]
    tokens, dtype = sequences * each, jnp.dtype(FORMATS[form])
    places = (SEQUENCES * CONTEXT // PAGE_SIZE, 1, PAGE_SIZE)
    scales = (_shape(*places, dtype=jnp.float32),) if dtype.itemsize == 1 else ()
    integers = functools.partial(_shape, dtype=jnp.int32)
    where = integers(sequences, CONTEXT // PAGE_SIZE), integers(tokens)
    if name == "attend":
        pages = _shape(*places, ROW, dtype=dtype), *scales
        queries, chosen = _shape(tokens, Q_HEADS, ROW), integers(tokens, TOP_K)
        attend = functools.partial(attend_chosen, scale=0.1, v_width=LATENT)
        return Case(f"{name} {form}{kind}", attend, (queries, pages, chosen, *where))
    pages = _shape(*places, INDEX_DIM, dtype=dtype), *scales
    looks = _shape(tokens, INDEX_HEADS, INDEX_DIM), _shape(tokens, INDEX_HEADS, dtype=jnp.float32)
    loop = None
    if not kind:
        loop = Loop(
            kernel="index_scores",
            unit="KV token",
            units=PARTS * PART_TOKENS,
            copies=PARTS * PART_TOKENS // PAGE_SIZE,  # of keys
            bytes_per_unit=INDEX_DIM * dtype.itemsize + 4 * len(scales) + 4,
        )
    function = functools.partial(choose_positions, top_k=TOP_K)
    return Case(f"{name} {form}{kind}", function, (*looks, pages, *where, where[1]), loop=loop)


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)
