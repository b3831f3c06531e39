"""Finds the largest number within a bound, for batches and memory, whose values grow nearly in
proportion.

Called by `search.py` and `memory.py`.
"""

from collections.abc import Callable

STRAIGHT = 2
"""Interpolated guesses in a row. The next guess is the middle, where a value grows in jumps."""


def largest(value: Callable[[int], float], low: int, high: int, bound: float) -> int:
    """Returns the largest number from `low` to `high` whose value is within `bound`.

    Args:
      value: never falls. Its value at `low` is within the bound.
    """
    at_low, at_high, guesses = value(low), value(high), 0
    if at_high <= bound:
        return high
    while high - low > 1:
        guesses += 1
        share = (bound - at_low) / (at_high - at_low) if guesses % (STRAIGHT + 1) else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        there = value(middle)
        if there <= bound:
            low, at_low = middle, there
        else:
            high, at_high = middle, there
    return low
