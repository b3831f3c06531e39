"""Orders that a worker carries out between two steps: moving experts, reading and writing pages.

The leader sends them with the step plans, so that all processes of a mesh carry them out between
the same two steps. An ffn worker in a runtime of its own carries them out between two messages.
"""

import msgspec

from jaxserve.config.formats import FormatName

STORAGE = -1
"""Stands for the checkpoint where a source slot is expected."""


class FetchExperts(msgspec.Struct, frozen=True, tag=True):
    """Copies one piece of some experts of a layer to the devices that will hold them, into the room
    beside their slots. Steps do not see it."""

    layer: int
    copies: list[tuple[int, int]]
    """(source, target) slots, at most one target a rank."""
    piece: int


class ReadExperts(msgspec.Struct, frozen=True, tag=True):
    """Starts reading whole experts of one layer from the checkpoint into the room beside the slots,
    in place of one `FetchExperts` for each piece."""

    layer: int
    experts: list[tuple[int, int]]
    """(expert, target slot), at most one target a rank."""


class MoveExperts(msgspec.Struct, frozen=True, tag=True):
    """Moves the fetched experts of one layer into their slots and switches its table. A step sees
    all of the change or nothing."""

    layer: int
    copies: list[tuple[int, int]]
    """(source, target) slots of the preceding `FetchExperts`, or (`STORAGE`, target) after
    `ReadExperts`. All sources are read before any target is written."""
    placement: list[int]
    """The expert of every slot from now on (`model.ffn.placement`)."""


class CountExperts(msgspec.Struct, frozen=True, tag=True):
    """Takes a snapshot of the experts' token counts, to be read later."""

    number: int
    """Number of the snapshot; each is greater than the one before."""


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Reads a piece of pages. All processes of the mesh take part."""

    access: int
    """Number of the access to pages: that of the domain for hand-offs, and for host memory the
    number of domains more."""
    group: int
    page_ids: list[int]
    offset: int
    """Offset of the piece's first token in the first page, in tokens."""
    tokens: int
    """Tokens in the piece."""


class WritePages(msgspec.Struct, frozen=True, tag=True):
    """Writes a piece that has arrived at the leader. All processes of the mesh take part."""

    access: int
    """See `ReadPages`."""
    group: int
    page_ids: list[int]
    offset: int
    tokens: int
    """Tokens in the piece."""
    cache_format: FormatName
    """Format of the arrived entries."""


PageOrder = ReadPages | WritePages
Action = FetchExperts | ReadExperts | MoveExperts | CountExperts | PageOrder
