"""Arrays, and XLA's own estimates, in the HLO text of compiled programs. Knows no JAX."""

import math
import re
from collections.abc import Callable

INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)"
    r"\((?P<operands>.*?)\)"
)
"""Matches one instruction of a computation."""
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\]\{(?P<layout>[^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**62
"""XLA writes the largest integer where it has no estimate."""


def hbm_bytes(
    type_text: str, apart: Callable[[tuple[int, ...]], bool] = lambda shape: False
) -> int:
    """Returns the bytes of those arrays of a type that lie in HBM. A layout with a memory space,
    S(1), is on the core, except S(7): GPU memory that other devices write to.

    Args:
      type_text: type of an instruction: one array, or a tuple of arrays.
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


def parts_read(computations: str) -> dict[str, dict[int, float]]:
    """Returns for every fused computation, by name, the share of each parameter, by number, that it
    reads. A fusion computes only what its results need, and a slice needs only what it keeps.

    Args:
      computations: text of the computations.
    """
    found = {}
    for text in computations.split("\n\n"):
        if name := re.match(r"\s*%([\w.-]+) \(", text):
            found[name[1]] = _parts_read(text)
    return found


_EACH_BY_EACH = frozenset(
    [
        "abs",
        "add",
        "and",
        "bitcast",
        "concatenate",
        "convert",
        "divide",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "or",
        "reduce",
        "select",
        "shift-left",
        "subtract",
        "tuple",
    ]
)


def _parts_read(text: str) -> dict[int, float]:
    """Returns the share of each parameter that one computation reads. Unless an operation is known
    to be elementwise or a slice, it is assumed to read all of its operands."""
    lines = [match for line in text.splitlines() if (match := INSTRUCTION.match(line))]
    size = {match["name"]: _elements(match["type"]) for match in lines}
    needed: dict[str, float] = {}
    parameters: dict[int, float] = {}
    for match in reversed(lines):
        own = 1.0 if match["root"] else min(needed.get(match["name"], 0), 1)
        if match["op"] == "parameter":
            parameters[int(match["operands"])] = own
        for operand in re.findall(r"%([\w.-]+)", match["operands"]):
            part = 1.0
            if match["op"] == "slice":
                part = own * size[match["name"]] / size[operand]
            elif match["op"] in _EACH_BY_EACH:
                part = own
            needed[operand] = needed.get(operand, 0) + part
    return parameters


def _elements(type_text: str) -> int:
    """Returns the number of elements of the arrays of a type."""
    return sum(
        math.prod(int(size) for size in array["shape"].split(",") if size)
        for array in _ARRAY.finditer(type_text)
    )


def estimated_cycles(text: str) -> int:
    """Returns XLA's estimate for a TPU program, the sum over its instructions. Loop bodies count
    once. Kernels, gathers, scatters and sorts have no estimate and do not count. No instruction has
    less than some 2,300: for comparisons only."""
    found = map(int, _CYCLES.findall(text))
    return sum(cycles for cycles in found if cycles < _UNKNOWN)
