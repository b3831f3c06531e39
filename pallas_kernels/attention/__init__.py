"""Attention of ragged batches over a paged cache of keys and values, and inside a batch."""

from pallas_kernels.attention.api import (
    attention_places,
    chunk_attention,
    merge,
    paged_attention,
    write_rows,
)

__all__ = ["attention_places", "chunk_attention", "merge", "paged_attention", "write_rows"]
