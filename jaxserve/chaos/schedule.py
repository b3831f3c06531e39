"""What goes wrong when: a seeded sequence of faults.

Used by `storm.py`, which carries them out one after the other; the tests draw from it, too. Pure.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

KINDS = ("kill", "end", "stop", "slow", "drop", "delay", "corrupt", "disk", "clock")
"""kill: SIGKILL. end: SIGTERM, the planned end of a worker. stop: SIGSTOP for seconds. slow:
stopped most of the time for seconds. drop: the links to a worker are cut, or carry nothing, for
seconds. delay: what they carry comes later. corrupt: some of the bytes on the pages link of a
prefill worker come with a bit changed. disk: no file of the process grows for seconds, as on a full
disk. clock: the wall clock jumps."""
LINK_KINDS: Mapping[str, Sequence[str]] = {"drop": (), "delay": (), "corrupt": ("pages",)}
"""Kinds that disturb what is linked, of these roles alone; empty: of all. Other links have no
checksums but TCP's."""

NEVER_ENDED = ("router", "face", "pages")
"""Roles without a planned end in a storm: with the router's the deployment ends."""

SECONDS: Mapping[str, tuple[float, float]] = {
    "kill": (0.0, 0.0),
    "end": (0.0, 0.0),
    "stop": (1.0, 8.0),
    "slow": (2.0, 6.0),
    "drop": (0.5, 4.0),
    "delay": (2.0, 6.0),
    "corrupt": (2.0, 6.0),
    "disk": (2.0, 6.0),
    "clock": (2.0, 6.0),
}
"""How long a fault lasts: the shortest, the longest."""
PAUSE = (0.5, 2.0)
"""Of undisturbed running before a fault, once everything is back from the last one."""
WAYS_OF_A_DROP = ("cut", "stall", "truncate")
JUMPS = (-3600.0, 3600.0)


class Fault(NamedTuple):
    """One fault.

    Attributes:
      number: 0, 1, …
      kind: of `KINDS`.
      role, victim: which process; the victim is the how manieth of the role.
      pause: seconds to wait before it.
      seconds: how long it lasts.
      how: of a drop, one of `WAYS_OF_A_DROP`.
      size: of a delay, seconds each way; of a slow process, the part of the time in which it
        stands; of a corrupt link, the part of what it carries; of a jump of the clock, seconds.
    """

    number: int
    kind: str
    role: str
    victim: int
    pause: float
    seconds: float
    how: str = ""
    size: float = 0.0


def draw(
    seed: int, kinds: Sequence[str], victims: Mapping[str, int], linked: Sequence[str]
) -> Iterator[Fault]:
    """An endless sequence. Every pair of a kind and a role comes equally often: in each round once,
    in another order.

    Args:
      seed: the same one gives the same faults.
      kinds: of `KINDS`.
      victims: role → processes of it.
      linked: roles with a link that can be disturbed.
    """
    random_ = random.Random(seed)
    pairs = [(kind, role) for kind in kinds for role in victims if _befalls(kind, role, linked)]
    numbers = itertools.count()
    turns = dict.fromkeys(victims, 0)
    while pairs:
        random_.shuffle(pairs)
        for kind, role in pairs:
            turns[role] += 1
            size = {
                "delay": random_.uniform(0.02, 0.2),
                "slow": random_.uniform(0.5, 0.9),
                "corrupt": random_.uniform(0.1, 0.9),
                "clock": random_.choice(JUMPS),
            }.get(kind, 0.0)
            yield Fault(
                next(numbers),
                kind,
                role,
                turns[role] % victims[role],
                random_.uniform(*PAUSE),
                random_.uniform(*SECONDS[kind]),
                random_.choice(WAYS_OF_A_DROP) if kind == "drop" else "",
                size,
            )


def _befalls(kind: str, role: str, linked: Sequence[str]) -> bool:
    """Whether such a fault of such a role is possible."""
    if kind == "end":
        return role not in NEVER_ENDED
    if kind not in LINK_KINDS:
        return role != "pages"
    return role in linked and role in (LINK_KINDS[kind] or linked)
