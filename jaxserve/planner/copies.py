"""What a compiled program copies, read from its HLO text.

Called by `aot.py`. A weight that is bit-cast, converted, transposed or laid out anew before it is
used is read and written in every step, and takes its size in memory once more.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pallas_kernels.hlo import hbm_bytes

_MOVES = {"bitcast-convert", "convert", "copy", "copy-done", "transpose"}
_BESIDE = {"parameter", "bitcast", "reshape", "constant", "tuple"}
"""What a fusion that moves has besides."""
_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[\w-]+)\((?P<rest>.*)"
)
_CALLED = re.compile(r"calls=%?([\w.-]+)")


class Copy(NamedTuple):
    """An array that is written as another one was, or in other bits."""

    name: str
    """Of the instruction."""
    bytes: int


class _Instruction(NamedTuple):
    computation: str
    name: str
    op: str
    bytes: int
    """0: it does not lie in HBM."""
    called: str


def copies(
    text: str, least: int, apart: Callable[[tuple[int, ...]], bool] = lambda shape: False
) -> list[Copy]:
    """Copies of at least so many bytes, in the order of the text. What is inside of a fusion does
    not count, unless the fusion does nothing else; what is in a loop counts once.

    Args:
      text: HLO of a compiled program.
      least: bytes.
      apart: whether arrays of a shape do not count: activations may be as large as weights.
    """
    found = list(_instructions(text, apart))
    ops: dict[str, set[str]] = {}
    for one in found:
        ops.setdefault(one.computation, set()).add(one.op)
    fused = {one.called for one in found if one.called}

    def moves(one: _Instruction) -> bool:
        within = ops.get(one.called, set())
        return one.op in _MOVES or bool(within & _MOVES and within <= _MOVES | _BESIDE)

    return [
        Copy(one.name, one.bytes)
        for one in found
        if one.bytes >= least and one.computation not in fused and moves(one)
    ]


def _instructions(text: str, apart: Callable[[tuple[int, ...]], bool]) -> Iterator[_Instruction]:
    computation = ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            computation = begins["name"]
        elif match := _INSTRUCTION.match(line):
            called = _CALLED.search(match["rest"]) if match["op"] == "fusion" else None
            yield _Instruction(
                computation,
                match["name"],
                match["op"],
                hbm_bytes(match["type"], apart),
                called[1] if called else "",
            )
