"""Attention at real sizes: inputs and counts."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.model_batch import attend, page_shapes
from pallas_kernels.attention.shapes import AttentionShape

FORMATS = ("bf16", "int8", "fp8")


class Step(NamedTuple):
    """Sequences of one length; the queries of each are its last tokens."""

    shape: AttentionShape
    format: str
    sequences: int
    context: int
    page_size: int
    queries: int = 1

    def bytes(self) -> int:
        """Least bytes read and written: keys, values, scales once a sequence; queries, outputs."""
        shape, scaled = self.shape, self.format != "bf16"
        scales = (1 if shape.shared else 2) * shape.kv_heads * 4 if scaled else 0
        cache = shape.kv_elements() * (1 if scaled else 2) + scales
        ends = 2 * shape.q_heads * (shape.head_dim + shape.v_width)
        return self.sequences * (self.context * cache + self.queries * ends)

    def flops(self) -> int:
        """FLOPs of scores and mixing, over the positions that each query sees."""
        hidden = self.queries * (self.queries - 1) // 2
        return self.shape.flops() * self.sequences * (self.queries * self.context - hidden)


def values(key: Any, shape: tuple[int, ...], format: str) -> jax.Array:
    """Returns random numbers in a format; FP8 as its bits."""
    if format.startswith("int8"):
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    normal = jax.random.normal(key, shape, jnp.bfloat16)
    if format == "bf16":
        return normal
    return jax.lax.bitcast_convert_type(normal.astype(jnp.float8_e4m3fn), jnp.uint8)


def inputs(step: Step) -> tuple[Any, ...]:
    """Returns queries and the other arguments of `attend`; pages lie in a random order."""
    shape, each = step.shape, step.context // step.page_size
    keys = jax.random.split(jax.random.key(0), 4)
    dtype = jnp.dtype(jnp.bfloat16 if step.format == "bf16" else jnp.int8)
    shapes, of_scales = page_shapes(shape, dtype, step.sequences * each, step.page_size)
    pages = tuple(
        values(key, one.shape, step.format) for key, one in zip(keys, shapes, strict=False)
    )
    scale = 1 / 64 if step.format == "int8" else 1.0
    scales = tuple(jnp.full(one.shape, scale, one.dtype) for one in of_scales)
    order = jax.random.permutation(keys[2], step.sequences * each).astype(jnp.int32)
    token = jnp.arange(step.sequences * step.queries, dtype=jnp.int32)
    queries = jax.random.normal(keys[3], (token.size, shape.q_heads, shape.head_dim), jnp.bfloat16)
    where = (
        order.reshape(step.sequences, each),
        token // step.queries,
        step.context - step.queries + token % step.queries,
    )
    return queries, pages, scales, where


def call(step: Step) -> Callable[..., Any]:
    """Returns the measured function; it takes `inputs`."""
    return functools.partial(attend, step.shape)


CHECKED_TOKENS = 4


def checked(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments for the last tokens alone, which see the most: the reference gathers the
    pages of every token."""
    queries, pages, scales, (table, *where) = arguments
    last = slice(-CHECKED_TOKENS, None)
    return queries[last], pages, scales, (table, *(array[last] for array in where))
