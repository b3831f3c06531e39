"""Names and contents of what a leader collects from its followers (`control.Collect`)."""

import msgspec

SPANS = "spans"
"""Name of the followers' measured spans."""
COUNTS = "counts"
"""Name of the experts' token counts, as the latest `CountExperts` found them."""
MEASURED = "measured"
"""Name of what the followers' probes measured."""


class Counts(msgspec.Struct, frozen=True):
    """A follower's part of the experts' counts (`roles.expert_moves.Counted`)."""

    number: int | None
    """Number of the latest `CountExperts`; None: the follower has no experts."""
    layers: int = 0
    ranks: dict[int, bytes] = {}
    unread: str = ""
