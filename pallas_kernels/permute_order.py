"""Reads the order of the collective permutes in the text of a compiled program.

XLA orders collectives as it likes. Where two programs exchange arrays with each other, their orders
must be equal. Called by `jaxserve/roles/step_programs.py`. Knows only HLO text, of CPUs and GPUs.
"""

import functools
import re
from collections.abc import Callable, Iterator

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) .*\{\n((?: .*\n)*)", re.MULTILINE)
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PERMUTE = re.compile(
    r".* = \(*(\w+\[[\d,]*\]).* collective-permute(?:-start)?\(.*pairs=\{(.*?)\}\}"
)


def permutes(text: str, counts: Callable[[str], bool]) -> list[str]:
    """Lists collective permutes in the order in which they start, with loops unrolled.

    Args:
      counts: returns whether a permute between these pairs of devices is listed.

    Returns:
      shape and pairs of devices of each, as in "u8[8,64] {0,1},{1,0".

    Raises:
      ValueError: a loop with listed permutes has no known number of turns.
    """
    bodies = dict(_COMPUTATION.findall(text))

    @functools.cache
    def of(name: str) -> tuple[str, ...]:
        return tuple(one for line in bodies[name].splitlines() for one in inside(line))

    def inside(line: str) -> Iterator[str]:
        if found := _PERMUTE.match(line):
            if counts(found[2]):
                yield f"{found[1]} {found[2]}"
            return
        called = [one for name in _CALLED.findall(line) for one in of(name)]
        if called and " while(" in line:
            trips = _TRIPS.search(line)
            if trips is None:
                raise ValueError("a compiled loop has no known trip count")
            called *= int(trips[1])
        yield from called

    (entry,) = re.findall(r"^ENTRY %(\S+)", text, re.MULTILINE)
    return list(of(entry))
