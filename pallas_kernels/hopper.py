"""Names of the GPUs that the kernels support. Planning without JAX imports this, too."""

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Parts of the names of GPUs that all kernels support (sm_90a)."""

BEFORE_HOPPER = {
    "A100": 108,
    "A800": 108,
    "A30": 56,
    "A40": 84,
    "A10": 72,
    "A6000": 84,
    "L20": 92,
    "L40": 142,
    "L4": 58,
    "RTX 4090": 128,
}
"""Multiprocessors of the GPUs that paged attention alone supports, by Triton (sm_80, sm_86, sm_89):
by a part of the name, of which the first match counts. Step-3's attention devices that are no
flagships."""
