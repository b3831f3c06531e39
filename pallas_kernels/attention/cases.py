"""Batches of real models, to be compiled ahead of time.

Called by `pallas_kernels/aot.py` for TPUs, and by `pallas_kernels/gpu_resources.py` for GPUs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.aot import GENERATIONS, Case, Loop
from pallas_kernels.attention.api import chunk_attention, paged_attention, write_rows
from pallas_kernels.attention.model_batch import attend, page_shapes
from pallas_kernels.attention.mosaic_tpu_memory import call_of
from pallas_kernels.attention.reference import Cache, PagedCall, Where
from pallas_kernels.attention.shapes import MANY_KV_HEADS, NAIVE, SHAPES, AttentionShape
from pallas_kernels.target import Target, kernels

SEQUENCES, KV_LENGTH, PAGE_SIZE = 64, 8192, 128
PAGES = SEQUENCES * KV_LENGTH // PAGE_SIZE
GPU_PAGE_SIZE = 64

BATCHES = {
    "": (SEQUENCES, 1),
    " 2 tokens": (SEQUENCES, 2),
    " 4 tokens": (SEQUENCES, 4),
    " 8 tokens": (SEQUENCES, 8),
    " chunk": (4, 512),
}
"""Sequences and tokens per sequence of a decode step, of verified drafts, and of prefill chunks."""

WINDOW, FEW_ROWS, CHOSEN = 128, 256, 512
"""Rows that a token of DeepSeek-V4 reads: of the last tokens; those that stand for 128 tokens each,
in a sequence of 32,768; and chosen ones."""

CHUNK_TOKENS = 2048
"""Tokens of a prefill that attend to each other."""

FORMATS = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.uint8}
"""Dtypes of keys and values in the cache, which holds FP8 as its bits."""
GPU_FORMATS = FORMATS | {"fp8": jnp.float8_e4m3fn}
WHOLE_MODELS = ("step3", "deepseek-v3", "qwen3-235b")


def formats(generation: str) -> tuple[str, ...]:
    """Formats of keys and values that a generation multiplies."""
    return ("bf16", "int8", "fp8") if generation == "v7x" else ("bf16", "int8")


def cases(generation: str) -> list[Case]:
    """Returns cases of the named shapes, in all formats of a TPU generation."""
    return (
        [_inside(name) for name in NAIVE]
        + [_apart("deepseek-v3-tp8"), few_rows(256), few_rows(128)]
        + [one_block(rows, generation) for rows in (WINDOW, FEW_ROWS, CHOSEN)]
        + [
            _layer(name, each)
            for name in ("step3", "qwen3-235b")
            for each in formats(generation)
            if each != "bf16"
        ]
        + [
            case
            for name in SHAPES
            for kv_format in formats(generation)
            for case in (
                *(_attend(name, kv_format, generation, kind) for kind in BATCHES),
                *_in_int8(name, kv_format, generation),
                _write(name, kv_format),
            )
        ]
        + [
            case
            for name in MANY_KV_HEADS
            for kv_format in formats(generation)
            for case in (
                *(_attend(name, kv_format, generation, kind) for kind in ("", " chunk")),
                *_in_int8(name, kv_format, generation),
            )
        ]
    )


def gpu_cases() -> list[Case]:
    """Returns decode steps of all named shapes, and draft and prefill batches of whole models."""
    decode = [(name, SEQUENCES, 1) for name in SHAPES]
    drafts = [(name, SEQUENCES, tokens) for name in WHOLE_MODELS for tokens in (2, 4, 8)]
    prefill = [(name, *BATCHES[" chunk"]) for name in WHOLE_MODELS]
    batches = (*decode, *drafts, *prefill)
    others = few_rows(256), _expanded("deepseek-v3")
    return [*others, *(_gpu(form, *batch) for batch in batches for form in GPU_FORMATS)]


def before_hopper() -> list[Case]:
    """Returns batches that are compiled for GPUs before Hopper."""
    return [
        _gpu(form, name, *BATCHES[kind])
        for name in ("step3", "deepseek-v3", "qwen3-235b-tp4")
        for form in GPU_FORMATS
        for kind in ("", " chunk")
    ]


def _gpu(form: str, name: str, sequences: int, tokens: int) -> Case:
    """Returns a case of sequences of `KV_LENGTH` tokens, `tokens` queries each."""
    shape, dtype = SHAPES[name], jnp.dtype(GPU_FORMATS[form])
    pool = sequences * KV_LENGTH // GPU_PAGE_SIZE
    pages, scales = page_shapes(shape, dtype, pool, GPU_PAGE_SIZE)
    where = _where(sequences, tokens, GPU_PAGE_SIZE)
    arguments = (_queries(shape, sequences * tokens), pages, scales, where)
    kind = "decode" if tokens == 1 else f"{tokens} tokens"
    return Case(f"{name} {form} {kind}", functools.partial(attend, shape), arguments)


def _where(
    sequences: int, tokens: int, page_size: int = PAGE_SIZE
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns page table, sequences and positions."""
    table = jax.ShapeDtypeStruct((sequences, KV_LENGTH // page_size), jnp.int32)
    return table, *(jax.ShapeDtypeStruct((sequences * tokens,), jnp.int32),) * 2


def _queries(shape: AttentionShape, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, shape.q_heads, shape.head_dim), jnp.bfloat16)


def _in_int8(name: str, kv_format: str, generation: str) -> list[Case]:
    """A decode step, and chunks, with products in INT8, which v7x does not have."""
    if kv_format != "int8" or generation == "v7x":
        return []
    return [_attend(name, kv_format, generation, kind, True) for kind in ("", " chunk")]


def _attend(
    name: str, kv_format: str, generation: str, kind: str, int8_products: bool = False
) -> Case:
    """Returns a case of sequences of `KV_LENGTH` tokens; of a decode step, the loop is analysed."""
    shape = (SHAPES | MANY_KV_HEADS)[name]
    dtype = jnp.dtype(FORMATS[kv_format])
    sequences, tokens = BATCHES[kind]
    pages, scales = page_shapes(shape, dtype, PAGES, PAGE_SIZE)
    queries = _queries(shape, sequences * tokens)
    loop = None
    if tokens == 1:
        stored: list[Any] = [*pages, None]
        cache = Cache(stored[0], stored[1], None, None, shape.v_width)
        call = call_of(queries, cache, _where(sequences, tokens)[0])
        units = call.tiles(GENERATIONS[generation].device_kind).block_tokens
        loop = Loop(
            kernel="paged_attention",
            unit="KV token",
            units=units,
            copies=units // PAGE_SIZE * (len(pages) + len(scales)),
            bytes_per_unit=shape.kv_elements() * dtype.itemsize + 4 * shape.kv_heads * len(scales),
        )
    return Case(
        name=f"{name} {kv_format}{kind}{' products' if int8_products else ''}",
        function=functools.partial(attend, shape, int8_products=int8_products),
        arguments=(queries, pages, scales, _where(sequences, tokens)),
        loop=loop,
    )


def _apart(name: str) -> Case:
    """Returns a decode step over latents in INT8 whose rotated part is in BF16."""
    shape, place = SHAPES[name], (PAGES, 1, PAGE_SIZE)
    arrays = (
        _queries(shape, SEQUENCES),
        jax.ShapeDtypeStruct((*place, shape.v_width), jnp.int8),
        jax.ShapeDtypeStruct((*place, shape.head_dim - shape.v_width), jnp.bfloat16),
        jax.ShapeDtypeStruct(place, jnp.float32),
    )

    def attend(queries: Array, latents: Array, rotated: Array, scales: Array, where: Any) -> Array:
        return paged_attention(
            queries,
            latents,
            None,
            *where,
            scale=shape.head_dim**-0.5,
            v_width=shape.v_width,
            k_scales=scales,
            rope_pages=rotated,
        )[0]

    return Case(f"{name} int8 and bf16", attend, (*arrays, _where(SEQUENCES, 1)))


def few_rows(page_size: int) -> Case:
    """Returns a decode step of DeepSeek-V4 Flash over rows that stand for 128 tokens: `FEW_ROWS`
    a sequence, in a pool with four times the pages. Some rows are written first."""
    pages = SEQUENCES * FEW_ROWS * 128 // page_size
    pool = jax.ShapeDtypeStruct((4 * pages, 1, page_size // 128, 512), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((SEQUENCES, 64, 512), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((16, 1, 512), jnp.bfloat16)
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    where = integers((SEQUENCES, pages // SEQUENCES)), *(integers((SEQUENCES,)),) * 2

    def step(pool: Array, rows: Array, at: Any, queries: Array, where: Any) -> tuple[Any, Any]:
        (pool,) = write_rows((pool,), (rows,), where[0], *at)
        options: dict[str, Any] = {"scale": 512**-0.5, "v_width": 512, "with_lse": True}
        return paged_attention(queries, pool, None, *where, **options), pool

    at = (integers((16,)),) * 2
    name = f"deepseek-v4 bf16 rows, pages of {page_size}"
    return Case(name, step, (pool, rows, at, queries, where), donated=(0,))


def one_block(rows: int, generation: str) -> Case:
    """Returns a decode step of DeepSeek-V4 Flash over this number of rows; the loop over tokens is
    analysed. Rows are in pages of the ring, or as `joined.py` and `gathered.py` make them."""
    window = rows if rows == WINDOW else 0
    page, columns = (PAGE_SIZE, KV_LENGTH // PAGE_SIZE) if window else (rows, 1)
    pool: Any = jax.ShapeDtypeStruct((SEQUENCES * columns, 1, page, 512), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((SEQUENCES, 64, 512), jnp.bfloat16)
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    where = integers((SEQUENCES, columns)), *(integers((SEQUENCES,)),) * 2
    call = call_of(queries, Cache(pool, None, None, None, 512), where[0], window)
    cut = call.cut(call.tiles(GENERATIONS[generation].device_kind))
    loop = Loop(
        kernel="paged_attention",
        unit="sequence",
        units=cut.together,
        copies=1 + (cut.together * cut.pages_per_block if window else 1),  # and one of queries
        bytes_per_unit=cut.pages_per_block * page * 1024,
    )
    options: dict[str, Any] = {"scale": 512**-0.5, "with_lse": True, "neighbours": not window}

    def attend(queries: Array, pool: Array, where: Any) -> Any:
        cache = Cache(pool, None, None, None, 512)
        call = PagedCall(queries, cache, Where(*where), window, **options)
        target = Target("mosaic_tpu", GENERATIONS[generation].device_kind)
        return kernels("attention", target).paged_attention(call, target)

    return Case(f"deepseek-v4 bf16 {rows} rows", attend, (queries, pool, where), loop=loop)


def _inside(name: str) -> Case:
    """Returns a prefill's attention inside the batch, with keys and values of every head."""
    heads, width, v_width = NAIVE[name]
    widths = (width, width, v_width)
    arrays = (jax.ShapeDtypeStruct((CHUNK_TOKENS, heads, w), jnp.bfloat16) for w in widths)
    where = (jax.ShapeDtypeStruct((CHUNK_TOKENS,), jnp.int32),) * 2
    function = functools.partial(chunk_attention, scale=width**-0.5)
    return Case(f"{name} bf16 inside", function, (*arrays, *where))


def _expanded(name: str) -> Case:
    """Returns a prefill's attention to keys and values of every head, in pages, on a GPU."""
    heads, width, v_width = NAIVE[name]
    pages = CHUNK_TOKENS // PAGE_SIZE
    sizes = (CHUNK_TOKENS, heads, width), *((pages, heads, PAGE_SIZE, w) for w in (width, v_width))
    arrays = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)
    places = (1, pages), (CHUNK_TOKENS,), (CHUNK_TOKENS,)
    where = (jax.ShapeDtypeStruct(place, jnp.int32) for place in places)
    attend = functools.partial(paged_attention, scale=width**-0.5, with_lse=True, runs=2)
    return Case(f"{name} bf16 expanded", attend, (*arrays, *where))


def _write(name: str, kv_format: str, page_size: int = PAGE_SIZE) -> Case:
    """Returns the writing of the keys and values of a decode step."""
    pool, dtype = SEQUENCES * KV_LENGTH // page_size, jnp.dtype(FORMATS[kv_format])
    pages, scales = page_shapes(SHAPES[name], dtype, pool, page_size)
    arrays = (*pages, *scales)
    rows = tuple(
        jax.ShapeDtypeStruct((SEQUENCES, array.shape[1], *array.shape[3:]), array.dtype)
        for array in arrays
    )
    where = _where(SEQUENCES, 1)
    return Case(f"{name} {kv_format} write", write_rows, (arrays, rows, *where), donated=(0,))


def _layer(name: str, kv_format: str) -> Case:
    """A decode step in 8 bits, pages of 256 tokens: writing, then the attention, which says how
    pages lie in memory."""
    shape, write = SHAPES[name], _write(name, kv_format, 256)
    queries = _queries(shape, SEQUENCES)

    def step(cache: Any, rows: Any, where: Any, queries: Array) -> tuple[Array, Any]:
        cache = write_rows(cache, rows, *where)
        return attend(shape, queries, cache[:-2], cache[-2:], where), cache

    arrays, rows, *where = write.arguments
    return Case(f"{name} {kv_format} layer", step, (arrays, rows, where, queries), donated=(0,))
