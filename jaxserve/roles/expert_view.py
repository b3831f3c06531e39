"""Placement and load of moving experts, as metrics and the status page show them: plain data."""

import msgspec


class ExpertView(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of experts and their recent load."""

    epoch: int = 0
    """Number of finished rebalances."""
    epoch_seconds: float = 0.0
    """Seconds since the placement last changed."""
    moving: int = 0
    """Rounds of the current rebalance still to come."""
    moves: int = 0
    """Experts copied so far."""
    move_bytes: int = 0
    balance: float | None = None
    """Mean ÷ max tokens of a rank in the latest slice of time, mean over the layers."""
    imbalance: float | None = None
    """The busiest expert's tokens divided by the mean, averaged over the layers with tokens: 1 if
    all experts are equally busy, the number of experts if one gets everything."""
    expert_tokens: dict[int, list[int]] = {}
    """Layer → tokens of each expert in that slice."""
    loads: dict[int, list[int]] = {}
    """Layer → tokens of each rank in that slice."""
    loads_before: dict[int, list[int]] = {}
    """Layer → tokens of each rank when the last rebalance was decided."""
