"""Decode attention at real sizes: inputs, counts, and what else a user would call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.shapes import AttentionShape

FORMATS = ("bf16", "int8", "fp8")


class Step(NamedTuple):
    """One decode step: so many sequences of one length, a query each."""

    shape: AttentionShape
    format: str
    sequences: int
    context: int
    page_size: int

    def bytes(self) -> int:
        """Read and written: keys, values and scales, queries, outputs."""
        shape, scaled = self.shape, self.format != "bf16"
        scales = (1 if shape.shared else 2) * shape.kv_heads * 4 if scaled else 0
        cache = shape.kv_elements() * (1 if scaled else 2) + scales
        ends = 2 * shape.q_heads * (shape.head_dim + shape.v_width)
        return self.sequences * (self.context * cache + ends)

    def flops(self) -> int:
        """Of scores and mixing."""
        return self.shape.flops() * self.sequences * self.context


def values(key: Any, shape: tuple[int, ...], format: str) -> jax.Array:
    """Random numbers in a format; FP8 as its bits."""
    if format == "int8":
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    normal = jax.random.normal(key, shape, jnp.bfloat16)
    if format == "bf16":
        return normal
    return jax.lax.bitcast_convert_type(normal.astype(jnp.float8_e4m3fn), jnp.uint8)


def inputs(step: Step) -> tuple[Any, ...]:
    """Queries, and the arguments of `attend` after them; pages lie in a random order."""
    shape, each = step.shape, step.context // step.page_size
    keys = jax.random.split(jax.random.key(0), 4)
    place = (step.sequences * each, shape.kv_heads, step.page_size)
    widths = [shape.head_dim] if shape.shared else [shape.head_dim, shape.v_width]
    pages = tuple(
        values(key, (*place, width), step.format) for key, width in zip(keys, widths, strict=False)
    )
    scale = 1 / 64 if step.format == "int8" else 1.0
    scales = () if step.format == "bf16" else (jnp.full(place, scale, jnp.float32),) * len(pages)
    order = jax.random.permutation(keys[2], place[0]).astype(jnp.int32)
    sequences = jnp.arange(step.sequences, dtype=jnp.int32)
    queries = jax.random.normal(
        keys[3], (step.sequences, shape.q_heads, shape.head_dim), jnp.bfloat16
    )
    where = (order.reshape(step.sequences, each), sequences)
    return queries, pages, scales, (*where, jnp.full_like(sequences, step.context - 1))


def theirs(shape: AttentionShape, queries: Any, pages: Any, scales: Any, where: Any) -> Any:
    """JAX's own kernel for this platform; pages come in its order, [kv_heads, pages, ...].

    Raises:
      NotImplementedError: it has none for this.
    """
    if shape.shared or scales:
        raise NotImplementedError("JAX's paged_attention: only BF16 with K and V is compared")
    queries = queries * jnp.asarray(shape.head_dim**-0.5, queries.dtype)
    table, _, position = where
    platform = jax.default_backend()
    if platform == "tpu":
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as tpu

        return tpu(queries, *pages, position + 1, table, pages_per_compute_block=4)
    if platform in ("gpu", "cuda"):
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as gpu

        return gpu(queries, *pages, table, position + 1)
    raise NotImplementedError(f"JAX has no paged_attention for {platform}")
