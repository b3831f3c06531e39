"""Attention of ragged batches over a paged cache of keys and values."""

from pallas_kernels.attention.api import merge, paged_attention, write_rows

__all__ = ["merge", "paged_attention", "write_rows"]
