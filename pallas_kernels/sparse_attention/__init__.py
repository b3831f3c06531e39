"""Attention of every token to a few rows of a paged cache, which an indexer chooses."""

from pallas_kernels.sparse_attention.api import attend_chosen, choose_positions

__all__ = ["attend_chosen", "choose_positions"]
