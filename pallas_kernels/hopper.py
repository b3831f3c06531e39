"""Names of the GPUs that the kernels support, and their multiprocessors.

Planning without JAX imports this, too.
"""

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

SMALLER_HOPPER = {"NVIDIA H20 ": 78, "NVIDIA H20-": 78, "NVIDIA H100 PCIe": 114}
"""Multiprocessors by the beginning of the device kind; other Hopper GPUs have 132."""


def multiprocessors_of(device_kind: str) -> int:
    """Returns the multiprocessors of a supported GPU, by its name in JAX."""
    # A space, so that names that end can be told from longer ones.
    names = SMALLER_HOPPER.items()
    smaller = (count for name, count in names if f"{device_kind} ".startswith(name))
    older = (count for part, count in BEFORE_HOPPER.items() if part in device_kind)
    return next(smaller, next(older, 132))
