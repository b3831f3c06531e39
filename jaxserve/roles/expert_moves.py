"""Moves of experts as engines and operators know them: proposals, counts, and the interface."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.roles.actions import Action
from jaxserve.roles.expert_view import ExpertView


class ExpertFacts(msgspec.Struct, frozen=True):
    """Sizes of the experts that can be moved, equal in every process of a deployment."""

    layers: list[int]
    sizes: SlotSizes
    slot_bytes: int
    """Bytes of one expert's weights in one layer."""
    pieces: int = 1
    """Number of pieces in which an expert is fetched."""


class LayerProposal(msgspec.Struct, frozen=True):
    """Change of one layer."""

    layer: int
    placement: list[int]
    loads_now: list[float]
    """Tokens of each rank, as counted, with the placement of now."""
    loads_then: list[float]
    """The same tokens with the proposed one."""
    moves: int
    """Number of experts that are copied."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a rebalance; shown to operators, too."""

    balance_now: float
    """Mean ÷ max tokens of a rank, over all layers: Σ means ÷ Σ maxima."""
    balance_then: float
    gain: float
    """Saved part of the busiest ranks' tokens."""
    moves: int
    move_bytes: int
    seconds: float
    """Duration of the moves at `experts.move_gb_per_second`."""
    layers: list[LayerProposal] = []
    """Layers that change."""


Counts = dict[int, np.ndarray]
"""Rank → uint32 [layers, experts]: all that was counted since the start, modulo 2^32."""


class Counted(NamedTuple):
    """Answer to a `CountExperts`, of all ranks."""

    counts: Counts
    renewals: int = 0
    """How often a lost step had taken the counts along, so that they began at zero."""
    unread: str = ""
    """Why a process could not carry out the latest `ReadExperts`; empty where all could."""


ReadCounts = Callable[[int, float], Counted]
"""(number, seconds) → the answer to the `CountExperts` of that number. Raises EngineFailedError
where it does not come within the seconds."""


class MovesExperts(Protocol):
    """Moves experts, as an engine knows it: an `ExpertBalancer`, or one in another runtime."""

    def start(self) -> None:
        """Begins to count, from now on."""

    def close(self) -> None:
        """Ends its thread."""

    def due(self) -> Sequence[Action]:
        """Actions to be carried out now."""
        ...

    def carried_out(self, actions: Sequence[Action]) -> None:
        """All processes were told of the actions, and this one has carried them out."""

    def view(self) -> ExpertView:
        """Where experts are, from any thread."""
        ...

    def rebalance(self, *, dry_run: bool) -> Proposal:
        """Proposes, and unless it is a dry run begins to move."""
        ...
