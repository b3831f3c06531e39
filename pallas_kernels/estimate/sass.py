"""Reads the machine code of a Hopper kernel with its control codes, and counts the cycles of the
way round a loop.

Called by `count.py`. Knows the text that Mosaic dumps with `MOSAIC_GPU_DUMP_SASS_CTRL=1`
(`wait:read:write:yield:stall  /*address*/  instruction`), and nothing of kernels.

A warp issues in order. After an instruction it stalls for the cycles that its control code says,
and before one it waits for the scoreboards that it names, which are set by instructions of variable
latency. A warpgroup has a warp on each of the four schedulers, so that the cycles of one warp are
those of the warpgroup.
"""

import heapq
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_LINE = re.compile(
    r"\s*(?P<wait>[\d&-]+):(?P<read>[\d-]):(?P<write>[\d-]):[Y-]:(?P<stall>\d\d)\s+"
    r"/\*(?P<address>[0-9a-f]+)\*/\s+(?P<predicate>@!?U?P\d\s+)?(?P<op>[A-Z]\S*)(?P<operands>.*)"
)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_WGMMA = re.compile(r"[HIQ]GMMA\.64x(\d+)x(\d+)")


class Instruction(NamedTuple):
    """One instruction of a program, which other fields refer to by its index."""

    op: str
    waits: tuple[int, ...]
    """Scoreboards that have to be free before it issues."""
    read: int | None
    """Scoreboard that it holds until its operands are read."""
    write: int | None
    """Scoreboard that it holds until its result is ready."""
    stall: int
    """Cycles until the warp issues the next one."""
    conditional: bool
    target: int | None
    """Index of the instruction that it branches to."""
    columns: int
    """N of a wgmma; else 0."""
    depth: int
    """K of a wgmma; else 0."""
    from_registers: bool
    """Whether the left operand of a wgmma is in registers."""
    ends_group: bool
    """Whether it is the last wgmma of a group, for which a later instruction can wait."""
    left: int
    """If it waits for wgmmas: the number of groups that may still be running."""


class Cost(NamedTuple):
    """Cost of one turn of a loop for one warpgroup, in cycles."""

    chain: float
    """Cycles from one turn to the next, if nothing else runs."""
    issued: int
    """Number of instructions; a scheduler issues one a cycle for all of its warps."""
    tensor: float
    """Cycles of the tensor cores."""
    flops: int
    """Floating-point operations of the wgmmas."""
    columns: int
    """Largest N of the wgmmas."""
    pipes: Mapping[str, float]
    """Cycles that each unit of a scheduler is busy, by the unit's name."""


class Latencies(NamedTuple):
    """Latencies in cycles; `assumptions.py` has the values."""

    wgmma_columns: float
    """Cycles of a wgmma for each of its columns."""
    wgmma_left: float
    """Cycles to read the left operand, if it lies in shared memory."""
    wgmma_right: float
    """Cycles to read the right operand, for each of its columns."""
    result: Mapping[str, float]
    """Cycles until a result is ready, by the beginning of the name; the longest counts."""
    operands: float
    """Cycles until operands are read."""
    pipes: Mapping[str, tuple[str, float]]
    """Unit, and its busy cycles for a warp's instruction, by the beginning of the name."""


def parse(text: str) -> list[Instruction]:
    """Parses the instructions of one kernel.

    Raises:
      ValueError: the text has no instruction, or a branch leads nowhere.
    """
    labels: dict[str, int] = {}
    rows: list[tuple[re.Match[str], str | None]] = []
    for line in text.splitlines():
        if (label := re.match(r"(\.L_x_\d+):", line)) is not None:
            labels[label[1]] = len(rows)
        elif (match := _LINE.match(line)) is not None:
            target = _TARGET.search(match["operands"])
            rows.append((match, target and target[1]))
    if not rows:
        raise ValueError("no instruction with a control code")
    found = []
    for match, label_name in rows:
        if label_name is not None and label_name not in labels:
            raise ValueError(f"{match['op']} branches to {label_name}, which is nowhere")
        product, operands = _WGMMA.match(match["op"]), match["operands"]
        left = re.search(r"gsb0, 0x([0-9a-f]+)", operands)
        found.append(
            Instruction(
                match["op"],
                tuple(int(one) for one in match["wait"].split("&") if one != "-"),
                _scoreboard(match["read"]),
                _scoreboard(match["write"]),
                int(match["stall"]),
                match["predicate"] is not None,
                None if label_name is None else labels[label_name],
                int(product[1]) if product else 0,
                int(product[2]) if product else 0,
                bool(product) and re.match(r"\s*R\d+, R\d+,", operands) is not None,
                bool(product) and "gsb0" in operands,
                int(left[1], 16) if left else 0,
            )
        )
    return found


def _scoreboard(text: str) -> int | None:
    return None if text == "-" else int(text)


def loops(program: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Returns the first and last instruction of every loop, the inner ones first.

    A loop ends with a conditional branch. An unconditional branch back belongs to a wait that the
    compiler moved out of the way.
    """
    found = [
        (one.target, at)
        for at, one in enumerate(program)
        if one.target is not None and one.target < at and one.op.startswith("BRA")
        if one.conditional
    ]
    return sorted(found, key=lambda loop: loop[1] - loop[0])


def way(program: Sequence[Instruction], first: int, last: int, over: Collection[int]) -> list[int]:
    """Returns the cheapest path once round a loop, from `first` to `last`, through those
    instructions of `over` that it can reach, in their order.

    Raises:
      ValueError: no path leads from `first` to `last`.
    """
    found = [first]
    for stop in [*sorted(set(over) - {first, last}), last]:
        part = _shortest(program, found[-1], stop, last)
        if part is None and stop == last:
            raise ValueError(f"no way from instruction {first} to {last}")
        found += part or []
    return found


def _shortest(program: Sequence[Instruction], start: int, stop: int, last: int) -> list[int] | None:
    """Returns the path of fewest stalls, without its start, or None; it does not go past `last`."""
    came: dict[int, int] = {}
    ready = [(0, start, start)]
    while ready:
        stalls, at, before = heapq.heappop(ready)
        if at in came:
            continue
        came[at] = before
        if at == stop:
            break
        one = program[at]
        if at == last:
            continue
        ends = one.op.startswith(("BRA", "EXIT", "RET")) and not one.conditional
        leaps = [] if ends else [at + 1]
        if one.target is not None:
            leaps.append(one.target)
        for leap in leaps:
            if leap < len(program) and leap not in came:
                heapq.heappush(ready, (stalls + max(1, one.stall), leap, at))
    if stop not in came:
        return None
    found = []
    while stop != start:
        found.append(stop)
        stop = came[stop]
    return found[::-1]


def cost(program: Sequence[Instruction], found: Sequence[int], cycles: Latencies) -> Cost:
    """Returns the cost of a turn of a loop that always takes this path."""
    turns = [_clock(program, [*found] * count, cycles) for count in (2, 3)]
    pipes: dict[str, float] = {}
    tensor, flops = 0.0, 0
    for at in found:
        unit, taken = _longest(cycles.pipes, program[at].op, ("alu", 2.0))
        pipes[unit] = pipes.get(unit, 0.0) + taken
        tensor += _product(program[at], cycles)
        flops += 2 * 64 * program[at].columns * program[at].depth
    columns = max(program[at].columns for at in found)
    return Cost(turns[1] - turns[0], len(found), tensor, flops, columns, pipes)


def _clock(program: Sequence[Instruction], found: Sequence[int], cycles: Latencies) -> float:
    """Returns the cycle in which the last instruction of a path has been issued."""
    now = tensor = 0.0
    free: dict[int, float] = {}
    units: dict[str, float] = {}
    groups: list[float] = []
    for at in found:
        one = program[at]
        for scoreboard in one.waits:
            now = max(now, free.get(scoreboard, 0.0))
        unit, taken = _longest(cycles.pipes, one.op, ("alu", 2.0))
        now = max(now, units.get(unit, 0.0))
        units[unit] = now + taken
        if one.op.startswith("WARPGROUP.DEPBAR"):
            ended = groups[: len(groups) - one.left] if one.left else groups
            now = max([now, *ended])
            groups = groups[len(ended) :]
        if one.columns:
            tensor = max(now, tensor) + _product(one, cycles)
            if one.ends_group:
                groups.append(tensor)
        if one.write is not None:
            late = now + _longest(cycles.result, one.op, 20.0)
            free[one.write] = max(free.get(one.write, 0.0), late)
        if one.read is not None:
            free[one.read] = max(free.get(one.read, 0.0), now + cycles.operands)
        now += max(1, one.stall)
    return now


def _product(one: Instruction, cycles: Latencies) -> float:
    """Returns the tensor core cycles of an instruction."""
    if not one.columns:
        return 0.0
    full = one.columns * cycles.wgmma_columns
    if one.from_registers:
        return full
    return max(full, cycles.wgmma_left + one.columns * cycles.wgmma_right)


def _longest[Value](table: Mapping[str, Value], op: str, otherwise: Value) -> Value:
    """Returns the value of the table's longest key that the name begins with."""
    names = [name for name in table if op.startswith(name)]
    return table[max(names, key=len)] if names else otherwise
