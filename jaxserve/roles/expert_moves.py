"""Moves of experts as engines and operators know them: who makes them, what they would bring."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from jaxserve.roles.actions import Action
from jaxserve.roles.expert_view import ExpertView


class LayerProposal(msgspec.Struct, frozen=True):
    """What would become of a layer."""

    layer: int
    placement: list[int]
    loads_now: list[float]
    """Tokens of each rank, as counted, with the placement of now."""
    loads_then: list[float]
    """The same tokens with the proposed one."""
    moves: int
    """Experts that are copied."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a rebalance would do, for people too."""

    balance_now: float
    """Mean ÷ max tokens of a rank, over all layers: Σ means ÷ Σ maxima."""
    balance_then: float
    gain: float
    """Part of the busiest ranks' tokens that is saved."""
    moves: int
    move_bytes: int
    seconds: float
    """That the moves take at `experts.move_gb_per_second`."""
    layers: list[LayerProposal] = []
    """Those that change."""


Counts = Mapping[int, np.ndarray]
"""Rank → uint32 [layers, experts]: all that was counted since the start, modulo 2^32."""

ReadCounts = Callable[[int, float], Counts]
"""(number, seconds) → the counts of the `CountExperts` of that number, of all ranks; raises
EngineFailedError after so many seconds."""


class MovesExperts(Protocol):
    """Who moves experts, as an engine knows it: an `ExpertBalancer`, or one in another runtime."""

    def start(self) -> None:
        """Begins to count, from now on."""

    def close(self) -> None:
        """Ends its thread."""

    def due(self) -> Sequence[Action]:
        """What is to be carried out now."""
        ...

    def carried_out(self, actions: Sequence[Action]) -> None:
        """That was done."""

    def view(self) -> ExpertView:
        """Where experts are, from any thread."""
        ...

    def rebalance(self, *, dry_run: bool) -> Proposal:
        """Proposes, and unless it is a dry run begins to move."""
        ...
