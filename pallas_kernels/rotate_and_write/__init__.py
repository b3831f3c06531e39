"""RoPE of queries and keys, and writing of keys and values, or of latents, to a paged cache."""

from pallas_kernels.rotate_and_write.api import rotate_and_write
from pallas_kernels.rotate_and_write.latents import Latents, norm_and_write
from pallas_kernels.rotate_and_write.reference import kept, rotate

__all__ = ["Latents", "kept", "norm_and_write", "rotate", "rotate_and_write"]
