"""Orders inside a worker, at a boundary, beside its steps: plain data.

The leader sends them with the plans of a boundary, so that all processes of a mesh carry them out
between the same two steps; an ffn worker with a runtime for itself carries them out between two
messages.
"""

import msgspec

from jaxserve.config.formats import FormatName

STORAGE = -1
"""A source slot's number that stands for the checkpoint."""


class FetchExperts(msgspec.Struct, frozen=True, tag=True):
    """Brings a piece of experts of one layer to the devices that shall have them, beside their
    slots: no step sees anything of it."""

    layer: int
    copies: list[tuple[int, int]]
    """(source, target) slots, at most one target a rank."""
    piece: int


class ReadExperts(msgspec.Struct, frozen=True, tag=True):
    """Has experts of one layer read from the checkpoint, beside the slots: whole, instead of all
    pieces."""

    layer: int
    experts: list[tuple[int, int]]
    """(expert, target slot), at most one target a rank."""


class MoveExperts(msgspec.Struct, frozen=True, tag=True):
    """Puts experts of one layer that were fetched in their slots and switches its table, both at
    once: a step sees all of it or nothing."""

    layer: int
    copies: list[tuple[int, int]]
    """As of the `FetchExperts` that went before, one for every piece, or with `STORAGE` for a
    source as of the `ReadExperts`; all sources are read before any target is written."""
    placement: list[int]
    """The expert of every slot from now on (`model.ffn.placement`)."""


class CountExperts(msgspec.Struct, frozen=True, tag=True):
    """Takes a snapshot of the experts' token counts, to be read later."""

    number: int
    """Ascending."""


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Reads a piece of pages for a hand-off, all processes of their mesh together."""

    domain: int
    group: int
    page_ids: list[int]
    offset: int
    """Of the first token in the first page."""
    tokens: int
    """Of the piece."""


class WritePages(msgspec.Struct, frozen=True, tag=True):
    """Writes a piece that has arrived at the leading process, all processes together."""

    domain: int
    group: int
    page_ids: list[int]
    offset: int
    tokens: int
    """Of the piece."""
    cache_format: FormatName
    """Of what has arrived."""


Action = FetchExperts | ReadExperts | MoveExperts | CountExperts | ReadPages | WritePages
