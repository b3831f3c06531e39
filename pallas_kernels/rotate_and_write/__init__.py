"""RoPE of queries and keys, and writing of keys and values to a paged cache."""

from pallas_kernels.rotate_and_write.api import rotate_and_write
from pallas_kernels.rotate_and_write.reference import rotate

__all__ = ["rotate", "rotate_and_write"]
