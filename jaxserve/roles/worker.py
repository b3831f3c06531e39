"""Interfaces of a role's worker: the stages of its steps, what observes them, and the orders that
it carries out between two steps: moving experts, reading and writing pages.

The leader sends orders with the step plans, so that all processes of a mesh carry them out between
the same two steps. An ffn worker in a runtime of its own carries them out between two messages.
Balancers (`MovesExperts`) give the orders that move experts. Imports no JAX: engines and the
operators' endpoints use it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxserve.config.formats import FormatName
from jaxserve.config.model import ModelConfig
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.layout import Bucket, StepLoad

if TYPE_CHECKING:  # an ffn worker in a runtime of its own has no plans
    import jax

    from jaxserve.roles.step_plan import StepPlan


def lane_of_all(step: "StepPlan", domains: int) -> int:
    """Returns the step's lane among those of all domains, which alternate: lanes of equal number of
    all domains follow each other (xDeepServe §5.2)."""
    return step.lane * domains + step.domain


def modules_of(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """Returns the prediction module, counted from 1, of each pass that follows a step: one for each
    draft; the last module may come several times."""
    passes = range(1, 1 + bucket.drafts) if config.modules else ()
    return tuple(min(number, config.modules) for number in passes)


def layers_of(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """Returns the layers of a step in the order in which it takes them: the model's own, then those
    of the prediction modules."""
    modules = modules_of(config, bucket)
    return *range(config.layers), *(config.layers - 1 + module for module in modules)


class Passed(NamedTuple):
    """A step that a worker without the head has enqueued to its end."""

    last: "jax.Array"
    """The worker's last result of the step; all others are ready before it."""


Stages = Iterator[Any]
"""Stages of a step on a lane. Each `next` enqueues the worker's next stage and yields its result on
the worker's mesh, or None."""


class Observer(Protocol):
    """Observes when a stage's output is ready (`observe/timeline.py`)."""

    def observe(
        self,
        stage: Any,
        lane: int,
        layer: int,
        step: int,
        result: "jax.Array",
        load: StepLoad | None,
        begun: int,
        /,
    ) -> None:
        """Called right after the stage was enqueued.

        Args:
          load: work of the step.
          begun: when its enqueueing began, in nanoseconds since the epoch.
        """


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
