"""RMSNorm, optionally with quantisation of its rows to 8 bits."""

from pallas_kernels.norm_quantize.api import rms_norm_quantize
from pallas_kernels.norm_quantize.reference import rms_norm

__all__ = ["rms_norm", "rms_norm_quantize"]
