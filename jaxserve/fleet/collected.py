"""What the leader of a runtime collects from processes that follow (`control.Collect`)."""

import msgspec

SPANS = "spans"
"""Name under which followers keep their measured spans."""
COUNTS = "counts"
"""What experts got, when that was last asked for."""
MEASURED = "measured"
"""And what their probes measured."""


class Counts(msgspec.Struct, frozen=True):
    """A follower's part of the counts."""

    number: int | None
    """None: it has no experts."""
    layers: int = 0
    ranks: dict[int, bytes] = {}
