"""Seeded sequence of faults.

Used by `storm.py`, which carries the faults out one after the other, and by tests. Pure.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

KINDS = ("kill", "end", "stop", "slow", "drop", "delay", "corrupt", "disk")
"""kill: SIGKILL. end: SIGTERM, the planned end of a worker. stop: SIGSTOP for seconds. slow:
stopped most of the time for seconds. drop: the links to a worker are cut, or carry nothing, for
seconds. delay: the links to a worker carry everything later. corrupt: some of the bytes on the
links to a worker arrive with a bit changed. disk: no file of the process grows for seconds, as on a
full disk."""
LINK_KINDS = ("drop", "delay", "corrupt")
"""Kinds that disturb the links to a worker."""

NEVER_ENDED = ("router", "face", "pages")
"""Roles without a planned end in a storm: the deployment ends with its router."""

SECONDS: Mapping[str, tuple[float, float]] = {
    "kill": (0.0, 0.0),
    "end": (0.0, 0.0),
    "stop": (1.0, 8.0),
    "slow": (2.0, 6.0),
    "drop": (0.5, 4.0),
    "delay": (2.0, 6.0),
    "corrupt": (2.0, 6.0),
    "disk": (2.0, 6.0),
}
"""Shortest and longest duration of a fault, by kind."""
PAUSE = (0.5, 2.0)
"""Shortest and longest undisturbed time, in seconds, between full recovery and the next fault."""
WAYS_OF_A_DROP = ("cut", "stall", "truncate")


class Fault(NamedTuple):
    """One fault, of one process or of several at the same moment.

    Attributes:
      number: 0, 1, …
      kind: one of `KINDS`.
      victims: role and index among the processes of the role, for each process that it befalls.
      pause: seconds to wait before it.
      seconds: how long it lasts.
      how: one of `WAYS_OF_A_DROP` for a drop, else empty.
      size: delay: seconds each way. slow: the part of the time in which the process stands.
        corrupt: the part of the bytes that is changed.
    """

    number: int
    kind: str
    victims: tuple[tuple[str, int], ...]
    pause: float
    seconds: float
    how: str = ""
    size: float = 0.0


def draw(
    seed: int,
    kinds: Sequence[str],
    victims: Mapping[str, int],
    linked: Sequence[str],
    together: int = 1,
) -> Iterator[Fault]:
    """Yields faults without end. Each round has every possible pair of a kind and a group of roles
    once, in a new order.

    Args:
      seed: the same seed gives the same faults.
      kinds: kinds to draw, out of `KINDS`.
      victims: role → number of its processes.
      linked: roles with a link that can be disturbed.
      together: number of different processes that each fault befalls.
    """
    random_ = random.Random(seed)
    pairs = [
        (kind, roles)
        for kind in kinds
        for roles in itertools.combinations_with_replacement(victims, together)
        if all(_befalls(kind, role, linked) for role in roles)
        and all(roles.count(role) <= victims[role] for role in roles)
    ]
    numbers = itertools.count()
    turns = {role: itertools.count(1) for role in victims}
    while pairs:
        random_.shuffle(pairs)
        for kind, roles in pairs:
            size = {
                "delay": random_.uniform(0.02, 0.2),
                "slow": random_.uniform(0.5, 0.9),
                "corrupt": random_.uniform(0.1, 0.9),
            }.get(kind, 0.0)
            yield Fault(
                next(numbers),
                kind,
                tuple((role, next(turns[role]) % victims[role]) for role in roles),
                random_.uniform(*PAUSE),
                random_.uniform(*SECONDS[kind]),
                random_.choice(WAYS_OF_A_DROP) if kind == "drop" else "",
                size,
            )


def _befalls(kind: str, role: str, linked: Sequence[str]) -> bool:
    """Tells whether a fault of this kind can befall a process of this role."""
    if kind == "end":
        return role not in NEVER_ENDED
    if kind not in LINK_KINDS:
        return role != "pages"
    return role in linked
