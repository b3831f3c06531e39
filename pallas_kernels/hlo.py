"""Arrays, and XLA's own estimates, in the HLO text of compiled programs. Knows no JAX."""

import math
import re
from collections.abc import Callable

_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\]\{(?P<layout>[^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**62
"""XLA writes the largest integer where it gave up."""


def hbm_bytes(
    type_text: str, apart: Callable[[tuple[int, ...]], bool] = lambda shape: False
) -> int:
    """Bytes of the arrays of a type that lie in HBM: a layout with a memory space, S(1), is on the
    core, but for S(7), GPUs' memory that other devices write to.

    Args:
      type_text: as an instruction has it, of one array or a tuple of some.
      apart: whether arrays of a shape do not count.
    """
    total = 0
    for array in _ARRAY.finditer(type_text):
        sizes = tuple(int(size) for size in array["shape"].split(",") if size)
        if "S(" in array["layout"].replace("S(7)", "") or apart(sizes):
            continue
        bits = 8 if array["dtype"] == "pred" else int(re.findall(r"\d+", array["dtype"])[0])
        total += math.prod(sizes) * bits // 8
    return total


def estimated_cycles(text: str) -> int:
    """XLA's estimate for a TPU program, the sum over its instructions; loop bodies count once, and
    what it has no estimate for not at all: kernels, gathers, scatters, sorts. No instruction has
    less than some 2,300: for comparisons only."""
    found = map(int, _CYCLES.findall(text))
    return sum(cycles for cycles in found if cycles < _UNKNOWN)
