"""Names of the GPUs that the kernels support. Planning without JAX imports this, too."""

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Parts of the names of GPUs that all kernels support (sm_90a)."""

BEFORE_HOPPER = ("A100", "A800", "A30", "A40", "A10", "A6000", "L20", "L40", "L4", "RTX 4090")
"""Parts of the names of GPUs that paged attention alone supports, by Triton (sm_80, sm_86, sm_89):
Step-3's attention devices that are no flagships."""
