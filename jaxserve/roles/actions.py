"""Orders inside a worker, at a boundary, beside its steps: plain data.

The leader sends them with the plans of a boundary, so that all processes of a mesh carry them out
between the same two steps; an ffn worker with a runtime for itself carries them out between two
messages.
"""

import msgspec


class MoveExperts(msgspec.Struct, frozen=True, tag=True):
    """Copies experts of one layer between slots and switches its table, both at once: a step sees
    all of it or nothing."""

    layer: int
    copies: list[tuple[int, int]]
    """(source, target) slots, at most one target a rank; all are read before any is written."""
    placement: list[int]
    """The expert of every slot from now on (`model.ffn.placement`)."""


class CountExperts(msgspec.Struct, frozen=True, tag=True):
    """Keeps what the experts have got so far, to be read later."""

    number: int
    """Ascending."""


Action = MoveExperts | CountExperts
