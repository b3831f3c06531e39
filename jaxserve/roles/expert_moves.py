"""Data about moves of experts for engines and operators: proposals, counts, and the interface."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from jaxserve.roles.actions import Action
from jaxserve.roles.expert_view import ExpertView


class LayerProposal(msgspec.Struct, frozen=True):
    """Change of one layer."""

    layer: int
    placement: list[int]
    loads_now: list[float]
    """Counted tokens of each rank, with the current placement."""
    loads_then: list[float]
    """Counted tokens of each rank, with the proposed placement."""
    moves: int
    """Number of experts that are copied."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a rebalance, also shown to operators."""

    balance_now: float
    """Mean ÷ max tokens of a rank, over all layers: Σ means ÷ Σ maxima."""
    balance_then: float
    gain: float
    """Share of the busiest ranks' tokens that the rebalance saves."""
    moves: int
    move_bytes: int
    seconds: float
    """Duration of the moves at `experts.move_gb_per_second`."""
    layers: list[LayerProposal] = []
    """Layers that change."""


Counts = dict[int, np.ndarray]
"""Rank → uint32 [layers, experts]: tokens since the start, modulo 2^32."""


class Counted(NamedTuple):
    """Answer to a `CountExperts`, with the counts of all ranks."""

    counts: Counts
    renewals: int = 0
    """Number of times that counts began at zero again because a lost step had destroyed them."""
    unread: str = ""
    """Why a process could not carry out the latest `ReadExperts`; empty where all could."""


ReadCounts = Callable[[int, float], Counted]
"""(number, seconds) → the answer to the `CountExperts` of that number. Raises EngineFailedError if
it does not come within the seconds."""


class MovesExperts(Protocol):
    """Interface through which engines move experts: a balancer here or in another runtime."""

    def start(self) -> None:
        """Begins to count."""

    def close(self) -> None:
        """Ends its thread."""

    def due(self) -> Sequence[Action]:
        """Actions to be carried out now."""

    def carried_out(self, actions: Sequence[Action]) -> None:
        """Notes that the actions were told to all processes and carried out in this one."""

    def view(self) -> ExpertView:
        """Placement and load of experts; may be called from any thread."""

    def rebalance(self, *, dry_run: bool) -> Proposal:
        """Makes a proposal and, unless it is a dry run, begins the moves."""
