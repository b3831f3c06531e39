"""Attention of ragged batches over a paged cache of keys and values, and inside a batch."""

from pallas_kernels.attention.api import chunk_attention, merge, paged_attention, write_rows

__all__ = ["chunk_attention", "merge", "paged_attention", "write_rows"]
