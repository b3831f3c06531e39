"""Finds collectives in a compiled program's HLO text, their number and axes; and the weights that
the program copies.

Called by `aot.py`. A weight that is bit-cast, converted, transposed or laid out anew before use is
read and written in every step, and takes its size in memory once more.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pallas_kernels.hlo import INSTRUCTION, hbm_bytes
from pallas_kernels.small_ops import COLLECTIVES

_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"[a-z]+(\d+)\w*\[([\d,]*)\]")
_GROUP = re.compile(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")

_MESSAGES = "collective-permute", "all-gather|all-to-all|reduce-scatter"
_COMPUTES = "conditional", "custom-call"
"""Messages, and the work beside them: branches in programs of both roles, kernels in colocated."""
_IN_ORDER = tuple(
    re.compile(
        rf"\s+(?:ROOT )?(?P<name>%[\w.-]+) = .*? "
        rf"(?P<what>{work}|(?P<message>(?:ragged-)?(?:{names})(?P<part>-start|-done)?))\("
    )
    for names, work in zip(_MESSAGES, _COMPUTES, strict=True)
)
_NAMED = re.compile(r"%[\w.-]+")


_MOVES = {"bitcast-convert", "convert", "copy", "copy-done", "transpose"}
_BESIDE = {"parameter", "bitcast", "reshape", "constant", "tuple"}
"""Instructions that a fusion may also have if it only moves data."""
_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{")
_CALLED = re.compile(r"calls=%?([\w.-]+)")


class ProgramCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of one program on one device."""

    layers: int
    """Layers that run it in a step."""
    instructions: int
    bytes: int
    """Bytes read and written, without the page pool."""
    exchanged: dict[str, int] = {}
    """Bytes of collectives by name and by the mesh axes, or the number of neighbours, that they go
    over. A second collective of the same name starts with "2. "."""


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in an executable's HLO text, by name; an asynchronous one counts once."""
    return dict(Counter(match[1] for match in _COLLECTIVE.finditer(text)))


def waited_for(text: str, *, colocated: bool) -> int:
    """Returns the messages of a program of several lanes that end before a computation has begun
    beside them. Instructions are in the order in which they are scheduled."""
    waiting, beside = set[str](), set[str]()
    ended = 0
    for match in filter(None, map(_IN_ORDER[colocated].match, text.splitlines())):
        if match["message"] is None:
            beside |= waiting
        elif match["part"] == "-start":
            waiting.add(match["name"])
        else:
            ended += not any(name in beside for name in _NAMED.findall(match.string))
    return ended


def exchanged_bytes(text: str, devices: int, ragged: float = 0) -> dict[str, int]:
    """Bytes of collectives in an executable's HLO text, by name and mesh axes ("all-to-all over tp"
    and "2. all-to-all over tp"), or by the number of neighbouring devices ("all-to-all over 8
    neighbours"). Bytes are per device: after a gather, or before a reduce-scatter. A collective
    whose text names neither axes nor groups is among all `devices`; in a ragged all-to-all a device
    receives, or sends, `ragged` rows."""
    found: dict[str, int] = {}
    seen = Counter[str]()
    for name, size in (_exchanged(line, devices, ragged) for line in text.splitlines()):
        if name:
            found[f"{seen[name] + 1}. {name}" if seen[name] else name] = size
            seen[name] += 1
    return found


def _exchanged(line: str, devices: int, ragged: float) -> tuple[str, int]:
    """Name and bytes of the collective of a line, if there is one."""
    name, group = _COLLECTIVE.search(line), _GROUP.search(line)
    if name is None:
        return "", 0
    # What starts one has both sides: its operands, and its results.
    result = line[line.find("=") : name.start()]
    key, members = name[1], devices
    if neighbours := _neighbours(line):
        key, members = f"{key} over {neighbours} neighbours", neighbours
    if name[1] == "ragged-all-to-all":
        bits, shape = [one for one in _ARRAY.findall(result) if "," in one[1]][-1]
        return key, round(ragged * int(shape.split(",")[-1]) * int(bits) / 8)
    sides = [
        int(bits) // 8 * math.prod(map(int, filter(None, shape.split(","))))
        for bits, shape in _ARRAY.findall(result)
    ]
    if group is not None:
        axes = {axis: int(size) for axis, size in _AXIS.findall(group[1])}
        over = re.findall(r"\w+", group[2])
        key += " over " + " ".join(over)
        members = math.prod(axes[axis] for axis in over)
    whole = name[1] == "reduce-scatter" and name[2] is None
    return key, max(sides, default=0) * (members if whole else 1)


def _neighbours(line: str) -> int:
    """Devices of each listed group, if they are neighbours from a multiple on; else 0."""
    listed = _LISTED.search(line)
    if listed is None:
        return 0
    groups = [[int(one) for one in part.split(",")] for part in re.findall(r"[\d,]+\d", listed[1])]
    size = len(groups[0])
    ordered = all(group == list(range(group[0], group[0] + size)) for group in groups)
    return size if ordered and not any(group[0] % size for group in groups) else 0


class Copy(NamedTuple):
    """An instruction that writes an array as another one was, or in other bits."""

    name: str
    bytes: int


def copies(
    text: str, least: int, apart: Callable[[tuple[int, ...]], bool] = lambda shape: False
) -> list[Copy]:
    """Returns copies of `least` bytes and more in the HLO of a compiled program, in the order of
    the text, but for arrays whose shape is `apart`: activations may be as large as weights. A copy
    inside a fusion does not count, unless the fusion does nothing else; one in a loop counts once.
    """
    computation, ops, found = "", defaultdict[str, set[str]](set), []
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            computation = begins["name"]
        elif one := INSTRUCTION.match(line):
            ops[computation].add(one["op"])
            called = _CALLED.search(line) if one["op"] == "fusion" else None
            found.append((computation, one, called[1] if called else ""))
    fused = {called for _, _, called in found}
    copied = []
    for inside, each, uses in found:
        within, size = ops[uses], hbm_bytes(each["type"], apart)
        moves = each["op"] in _MOVES or (within & _MOVES and within <= _MOVES | _BESIDE)
        if moves and size >= least and inside not in fused:
            copied.append(Copy(each["name"], size))
    return copied
