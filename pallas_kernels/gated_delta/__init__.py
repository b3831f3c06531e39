"""One step of Gated DeltaNet's recurrence for each of many sequences."""

from pallas_kernels.gated_delta.api import delta_step

__all__ = ["delta_step"]
