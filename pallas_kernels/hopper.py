"""Which GPUs the kernels support; imports nothing, so that planning without JAX may ask, too."""

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Substrings of the names of GPUs that the kernels support (sm_90a)."""
