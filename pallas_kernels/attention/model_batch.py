"""The op as a model calls it, by the model's shape, for code that compiles or measures it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention.api import paged_attention
from pallas_kernels.attention.shapes import AttentionShape


def page_shapes(
    shape: AttentionShape, dtype: jnp.dtype, pages: int, page_size: int
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
    """Returns pages of keys and values (or of latents alone), and in 8 bits their scales."""
    place = (pages, shape.kv_heads, page_size)
    widths = [shape.head_dim] if shape.shared else [shape.head_dim, shape.v_width]
    scales = [jax.ShapeDtypeStruct(place, jnp.float32)] * len(widths)
    arrays = [jax.ShapeDtypeStruct((*place, width), dtype) for width in widths]
    return arrays, scales if dtype.itemsize == 1 else []


def attend(
    shape: AttentionShape,
    queries: Array,
    pages: Any,
    scales: Any,
    where: Any,
    *,
    int8_products: bool = False,
) -> Array:
    """Attention of the queries.

    Args:
      where: page table, sequences and positions.
    """
    output, _ = paged_attention(
        queries,
        pages[0],
        None if shape.shared else pages[1],
        *where,
        scale=shape.head_dim**-0.5,
        v_width=shape.v_width if shape.shared else 0,
        k_scales=scales[0] if scales else None,
        v_scales=scales[1] if len(scales) > 1 else None,
        int8_products=int8_products,
    )
    return output
