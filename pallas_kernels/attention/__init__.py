"""Attention of ragged batches over a paged cache of keys and values."""

from pallas_kernels.attention.api import paged_attention, write_pages

__all__ = ["paged_attention", "write_pages"]
