"""Checks which arguments of attention fit together; a ValueError names those that do not.

Called by the `api.py` of ops that read or write pages.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.quantize import EIGHT_BITS, Words


def check_pages(name: str, pages: Array | Words, scales_name: str, scales: Array | None) -> None:
    """Checks pages of floats, or of 8 bits with their scales."""
    eight_bits = pages.dtype in EIGHT_BITS
    fits = eight_bits or jnp.issubdtype(pages.dtype, jnp.floating)
    if pages.ndim != 4 or 0 in pages.shape or not fits:
        raise ValueError(
            f"{name} is {pages.dtype}{pages.shape}, needs floats, int8 or uint8 "
            "[pages, kv_heads, page_size, head_dim], none of them 0"
        )
    if not eight_bits and scales is not None:
        raise ValueError(
            f"{name} is {pages.dtype}, which has no scales, but there is {scales_name}"
        )
    if eight_bits:
        got: Any = None if scales is None else f"{scales.dtype}{scales.shape}"
        expected = f"float32{pages.shape[:3]}"
        if got != expected:
            raise ValueError(f"{name} is {pages.dtype}, {scales_name} is {got}, needs {expected}")


def check_values(
    k_pages: Array | Words, v_pages: Array | Words | None, v_width: int, v_scales: Array | None
) -> None:
    """Checks the arguments that define the values."""
    if v_pages is not None:
        if v_width:
            raise ValueError(f"v_width is {v_width}, which is for v_pages None")
        if k_pages.shape[:3] != v_pages.shape[:3]:
            raise ValueError(
                f"k_pages has [pages, kv_heads, page_size] {k_pages.shape[:3]}, "
                f"v_pages has {v_pages.shape[:3]}"
            )
        return
    if not 0 < v_width <= k_pages.shape[3]:
        raise ValueError(f"v_width is {v_width}, needs 1 to {k_pages.shape[3]} with v_pages None")
    if v_scales is not None:
        raise ValueError("there is v_scales, but no v_pages; k_scales is for the values too")


def check_rope(rope_pages: Array, k_pages: Array | Words, v_pages: Array | Words | None) -> None:
    """Checks the pages of the last columns of latents' keys."""
    if v_pages is not None:
        raise ValueError("there are rope_pages and v_pages; rope_pages are for v_pages None")
    floats = jnp.issubdtype(rope_pages.dtype, jnp.floating)
    if rope_pages.ndim != 4 or rope_pages.shape[:3] != k_pages.shape[:3] or not floats:
        raise ValueError(
            f"rope_pages is {rope_pages.dtype}{rope_pages.shape}, needs floats of "
            f"[pages, kv_heads, page_size] {k_pages.shape[:3]}"
        )


def check_write(name: str, rows: Array, pages: Array | Words, tokens: tuple[int, ...]) -> None:
    """Checks rows and the pages that they are written to."""
    if pages.ndim < 3 or 0 in pages.shape:
        raise ValueError(
            f"the pages of {name} are {pages.dtype}{pages.shape}, "
            "need [pages, kv_heads, page_size, ...], none of them 0"
        )
    expected = (*tokens, pages.shape[1], *pages.shape[3:])
    if rows.shape != expected:
        raise ValueError(f"{name} has shape {rows.shape}, its pages need {expected}")
    bits = rows.dtype == jnp.float8_e4m3fn and pages.dtype == jnp.uint8
    if rows.dtype != pages.dtype and not bits:
        raise ValueError(f"{name} is {rows.dtype}, its pages are {pages.dtype}")


def check_tokens(tokens: int, page_table: Array, sequence_of_token: Array, position: Array) -> None:
    """Checks a table of pages, and the place of each token."""
    if page_table.dtype != jnp.int32 or page_table.ndim != 2:
        raise ValueError(
            f"page_table is {page_table.dtype}{page_table.shape}, needs int32 of rank 2"
        )
    if 0 in page_table.shape:
        raise ValueError(f"page_table is empty: {page_table.shape}")
    check_places(tokens, sequence_of_token, position)


def check_places(tokens: int, sequence_of_token: Array, position: Array) -> None:
    """Checks the place of each token."""
    for name, array in (("sequence_of_token", sequence_of_token), ("position", position)):
        if array.dtype != jnp.int32 or array.ndim != 1:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, needs int32 of rank 1")
        if array.shape != (tokens,):
            raise ValueError(f"{name} has {array.shape[0]} entries for {tokens} tokens")
