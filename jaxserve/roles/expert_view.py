"""What metrics and the page show of experts that move: plain data."""

import msgspec


class ExpertView(msgspec.Struct, frozen=True, kw_only=True):
    """Where experts are and what they got lately, for metrics and the page."""

    epoch: int = 0
    """How many rebalances were finished."""
    epoch_seconds: float = 0.0
    """Since the placement changed last."""
    moving: int = 0
    """Rounds that are still to come."""
    moves: int = 0
    """Experts that were copied."""
    move_bytes: int = 0
    balance: float | None = None
    """Mean ÷ max tokens of a rank in the latest slice of time, mean over the layers."""
    imbalance: float | None = None
    """The busiest expert's tokens over the mean, averaged over the layers with tokens: 1 where all
    experts are equally busy, their number where one gets everything."""
    expert_tokens: dict[int, list[int]] = {}
    """Layer → tokens of each expert in that slice."""
    loads: dict[int, list[int]] = {}
    """Layer → tokens of each rank in that slice."""
    loads_before: dict[int, list[int]] = {}
    """The same, when the last rebalance was decided."""
