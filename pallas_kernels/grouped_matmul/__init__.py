"""Matrix products of rows that are sorted by group, each group with its own weights (experts)."""

from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_swiglu

__all__ = ["grouped_matmul", "grouped_swiglu"]
