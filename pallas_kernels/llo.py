"""Reads the VLIW bundles of a TPU program from libtpu's dumps and counts those of a loop iteration.

Called by `bundles.py`. Knows the text of `*final_bundles.txt` and nothing of kernels.

A core issues at most one bundle per cycle, so the number of bundles of an iteration is a lower
bound of its cycles. Of the paths through a loop's branches the shortest that does a full
iteration's work counts: it starts the expected number of copies and has as many matrix products as
the longest branch-free stretch. In a program without products every bundle stands for one.
"""

import re
from typing import NamedTuple

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:(?P<depth>[> ]*)\{(?P<text>.*)")
_BRANCH = re.compile(r"sbr\.rel (?P<condition>\([^)]*\))? ?target = \$region(?P<target>\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_MATMUL = re.compile(r"\bvmatmul")
_COPY = re.compile(r"\bdma\.(?:hbm_to_vmem|general|strided|hbm_to_smem|local)")


class Bundle(NamedTuple):
    """One bundle; its index in the program is its address."""

    matmuls: int
    copies: int
    """Copies started."""
    target: int | None
    """Region to which it branches."""
    always: bool
    """Whether the branch has no condition."""
    regions: frozenset[int]
    """Regions that begin here."""
    header: bool
    """Whether a loop begins here."""


class Round(NamedTuple):
    """The counted path of a loop iteration."""

    bundles: int
    matmuls: int
    copies: int


def parse(text: str) -> list[Bundle]:
    """Parses the bundles of one program.

    Raises:
      ValueError: addresses do not follow each other, so that this is not such a dump.
    """
    bundles: list[Bundle] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        if int(match[1], 16) != len(bundles):
            raise ValueError(f"bundle {match[1]} follows bundle {len(bundles) - 1:#x}")
        body = match["text"]
        branch = _BRANCH.search(body)
        bundles.append(
            Bundle(
                matmuls=len(_MATMUL.findall(body)),
                copies=len(_COPY.findall(body)),
                target=int(branch["target"]) if branch else None,
                always=branch is not None and branch["condition"] is None,
                regions=frozenset(map(int, _REGION.findall(body))),
                header=bool(re.match(r"\s*\S+\s+L[BH]", line)),
            )
        )
    return bundles


def shortest_round(bundles: list[Bundle], copies: int, delay: int) -> Round:
    """Returns the shortest path of a loop iteration that multiplies and starts this many copies.

    Args:
      delay: bundles after a branch that are issued before it takes place.

    Raises:
      ValueError: no loop has such a path.
    """
    start_of = {region: at for at, bundle in enumerate(bundles) for region in bundle.regions}
    if not any(bundle.matmuls for bundle in bundles):
        bundles = [bundle._replace(matmuls=1) for bundle in bundles]
    loops = []
    for at, bundle in enumerate(bundles):
        back = None if bundle.target is None else start_of.get(bundle.target)
        if back is not None and back <= at and bundles[back].header:
            loops.append((back, at + delay))
    found = [way for loop in loops if (way := _round(bundles, start_of, *loop, copies, delay))]
    if not found:
        raise ValueError(f"of {len(loops)} loops none multiplies and starts {copies} copies")
    return min(found)


def _round(
    bundles: list[Bundle],
    start_of: dict[int, int],
    first: int,
    last: int,
    copies: int,
    delay: int,
) -> Round | None:
    """Returns the shortest path from `first` to `last`, forwards, that does enough."""
    stretches, length = [0], 0
    for bundle in bundles[first : last + 1]:
        length = 0 if bundle.regions or bundle.target is not None else length + bundle.matmuls
        stretches.append(length)
    enough = max(stretches)
    if not enough:
        return None
    # Fewest bundles so far, by the copies and matmuls on the way; ways only lead forwards.
    ways: dict[int, dict[tuple[int, int], int]] = {first: {(0, 0): 0}}
    for at in range(first, last + 1):
        bundle = bundles[at]
        leaps = []
        branch = bundles[at - delay] if at - delay >= first else None
        if branch is not None and branch.target is not None:
            target = start_of.get(branch.target)
            if target is not None and at < target <= last:
                leaps.append(target)
        if branch is None or not branch.always or not leaps:
            leaps.append(at + 1)
        for (started, multiplied), count in ways.pop(at, {}).items():
            key = (
                min(copies, started + bundle.copies),
                min(enough, multiplied + bundle.matmuls),
            )
            for leap in leaps:
                there = ways.setdefault(leap, {})
                there[key] = min(count + 1, there.get(key, count + 1))
    done = ways.get(last + 1, {}).get((copies, enough))
    return None if done is None else Round(done, enough, copies)
