"""Converts KV entries that arrive in the format of another worker's cache, for hand-offs."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from jaxserve.config.formats import FormatName
from jaxserve.model.attention.kv_cache import Entry
from jaxserve.model.quant.rows import has_scales, storage
from pallas_kernels.quantize import as_bits, from_bits
from pallas_kernels.quantize.api import quantize_rows


def in_own_format(
    entries: Sequence[Entry], stacks: list[Array], theirs: FormatName, own: FormatName
) -> list[Array]:
    """Returns arrays `[heads, layers, rows, …]`, values and then scales of 8-bit formats, in the
    cache's own format."""
    values, scales = [], []
    arrived = iter(stacks[len(entries) :])
    for entry, row in zip(entries, stacks, strict=False):
        if entry.plain:
            values.append(row)
            continue
        if has_scales(theirs):
            row = from_bits(row).astype(jnp.float32) * next(arrived)[..., None]
        if not has_scales(own):
            values.append(row.astype(storage(own)))
            continue
        quantised, scale = quantize_rows(row.reshape(-1, row.shape[-1]), own)
        values.append(as_bits(quantised).reshape(row.shape))
        scales.append(scale.reshape(row.shape[:-1]))
    return [*values, *scales]
