"""Moves experts while a worker serves: reads their token counts, decides, and hands out actions.

The owner of a mesh with routed experts (the engine's thread, or an ffn worker's message server)
asks at every boundary for the actions that are `due`, carries them out, and says so. A thread of
this module reads the counts, which may take a while, and never touches the worker. A rebalance is a
sequence of rounds, each of which leaves a placement that serves: one that is cut short leaves the
placement of its last round.

The policy is pure functions of counts. A layer is left alone unless its busiest rank would get
noticeably less to do (hysteresis): a move costs bandwidth and gains nothing where the skew is
noise.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import Experts
from jaxserve.errors import EngineFailedError
from jaxserve.model.ffn.balance import rebalance, rebalance_slices
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.move_rounds import aligned, plan_rounds
from jaxserve.model.ffn.placement import (
    MoveRound,
    Placement,
    SlotSizes,
    balance_of,
    home_slots,
    rank_loads,
)
from jaxserve.roles.expert_programs import expert_bytes, move_pieces
from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.worker import (
    STORAGE,
    Action,
    Counted,
    CountExperts,
    FetchExperts,
    LayerProposal,
    MoveExperts,
    Proposal,
    ReadCounts,
    ReadExperts,
)

CLOSE = 0.02
"""How much busier, as a share of the mean, the busiest rank may be for fewer moves."""


class ExpertFacts(msgspec.Struct, frozen=True):
    """Sizes of the experts that can be moved, equal in every process of a deployment."""

    layers: list[int]
    sizes: SlotSizes
    slot_bytes: int
    """Bytes of one expert's weights in one layer."""
    pieces: int = 1
    """Number of pieces in which an expert is fetched."""


def propose(
    counts: Mapping[int, np.ndarray],
    placements: Mapping[int, Placement],
    facts: ExpertFacts,
    settings: Experts,
) -> Proposal:
    """Returns the best placement of every layer for the tokens that were counted.

    Args:
      counts: layer → tokens [slices of time, experts].
      placements: layer → the expert of every slot now.
    """
    sizes, layers, mean, now, then = facts.sizes, [], 0.0, 0.0, 0.0
    for layer, slices in sorted(counts.items()):
        current, total = placements[layer], slices.sum(axis=0).astype(np.float64)
        loads = rank_loads(current, total, sizes.ranks)
        mean, now = mean + float(np.mean(loads)), now + float(np.max(loads))
        target = _best(slices, current, facts)
        loads_then = rank_loads(target, total, sizes.ranks)
        if np.max(loads_then) >= (1 - settings.least_gain) * np.max(loads):
            then += float(np.max(loads))
            continue
        then += float(np.max(loads_then))
        rounds = plan_rounds(current, target, sizes.ranks)
        layers.append(
            LayerProposal(
                layer,
                list(rounds[-1].placement) if rounds else list(current),
                loads.tolist(),
                loads_then.tolist(),
                _copies(rounds),
            )
        )
    moves = sum(layer.moves for layer in layers)
    size = moves * facts.slot_bytes
    return Proposal(
        balance_now=mean / now if now else 1.0,
        balance_then=mean / then if then else 1.0,
        gain=1 - then / now if now else 0.0,
        moves=moves,
        move_bytes=size,
        seconds=size / (settings.move_gb_per_second * 1e9),
        layers=layers,
    )


def _best(slices: np.ndarray, current: Placement, facts: ExpertFacts) -> Placement:
    """Returns the better balanced of two placements; if alike, the one with fewer moves."""
    sizes, total = facts.sizes, slices.sum(axis=0).astype(np.float64)
    slots, ranks, width = sizes.total, sizes.ranks, sizes.width
    candidates = [rebalance(total.tolist(), slots, ranks, most=width, apart=True)]
    if sizes.spare:
        candidates.append(rebalance_slices(slices.T, sizes))
    mean = float(np.mean(rank_loads(current, total, sizes.ranks)))
    found = []
    for candidate in candidates:
        target = aligned(current, candidate, sizes.ranks)
        most = float(np.max(rank_loads(target, total, sizes.ranks)))
        found.append((most, _copies(plan_rounds(current, target, sizes.ranks)), target))
    least = min(most for most, _, _ in found)
    return min(
        (each for each in found if each[0] <= least + CLOSE * mean), key=lambda each: each[1]
    )[2]


def _copies(rounds: list[MoveRound]) -> int:
    return sum(len(each.copies) for each in rounds)


def imbalance(tokens: Mapping[int, Sequence[int]]) -> float | None:
    """The busiest expert's tokens over the mean, averaged over the layers with tokens.

    1: all experts are equally busy; the number of experts: one gets everything. None: no tokens.
    """
    ratios = [max(own) * len(own) / sum(own) for own in tokens.values() if sum(own)]
    return sum(ratios) / len(ratios) if ratios else None


logger = logging.getLogger(__name__)

READ_SECONDS = 5.0
LOOK_SECONDS = 2.0
"""Least seconds between two reads of the counts while an operator looks at them."""
SLICES = 10
"""Slices of time that a decision looks back on."""

Placements = dict[int, Placement]
"""Layer → the expert of every slot."""


def expert_facts(templates: FFNTemplates, settings: Experts) -> ExpertFacts | None:
    """Returns the facts of a model's experts, or None where it has no routed ones."""
    config, sizes = templates.config, templates.slots
    if (template := templates.moe) is None:
        return None
    layers = [layer for layer in range(config.all_layers) if config.layer(layer).ffn.router]
    size, pieces = expert_bytes(template, sizes), move_pieces(templates, settings)
    return ExpertFacts(layers, sizes, size, pieces)


def make_balancer(
    templates: FFNTemplates,
    deployment: Deployment,
    slots: ExpertSlots | None,
    others: ReadCounts | None = None,
) -> "ExpertBalancer | None":
    """Builds the balancer of a mesh, or returns None where the model has no routed experts, or
    nothing here has slots whose experts could move.

    Args:
      slots: this process's, if it holds experts.
      others: reads the counts of other processes, if they hold experts.
    """
    facts = expert_facts(templates, deployment.experts)
    if facts is None or (slots is None and others is None):
        return None

    def read(number: int, seconds: float) -> Counted:
        found = Counted({}) if others is None else others(number, seconds)
        if slots is None:
            return found
        own = slots.read_counts(number)
        return Counted(found.counts | own.counts, own.renewals, found.unread or own.unread)

    has_read = (lambda: True) if slots is None else slots.has_read
    return ExpertBalancer(facts, deployment.experts, read, has_read=has_read)


class ExpertBalancer:
    """Decides which experts move, and paces the moves.

    Args:
      read: reads the counts.
      clock: seconds, monotonic.
      has_read: whether this process has finished the latest `ReadExperts`, well or not.

    Attributes:
      placements: the expert of every slot, by layer, as the carried-out moves left it.
    """

    def __init__(
        self,
        facts: ExpertFacts,
        settings: Experts,
        read: ReadCounts,
        clock: Callable[[], float] = time.monotonic,
        has_read: Callable[[], bool] = lambda: True,
    ):
        self.facts, self._settings, self._read, self._clock = facts, settings, read, clock
        self._has_read = has_read
        self.placements: Placements = dict.fromkeys(facts.layers, home_slots(facts.sizes))
        self._changed = threading.Condition()
        self._orders: deque[FetchExperts | ReadExperts | MoveExperts] = deque()
        self._rounds = 0  # in the orders
        self._next_move = self._switched = self._decided = clock()
        self._begun = self._next_look = self._switched  # the slice of time, and to be seen
        self._slice_ends, self._looked = True, float("-inf")
        # Numbers of counts: to be asked for, asked for, answered or not to be had, and taken in.
        self._wanted = self._asked = self._got = self._taken = 0
        self._unconfirmed = False  # whether experts were read, and not all processes said so yet
        self._confirming = 0  # the count with which they say so
        self._renewals = 0  # of the counts in `_totals`
        self._totals: dict[int, np.ndarray] | None = None
        self._slices: deque[dict[int, np.ndarray]] = deque(maxlen=SLICES)
        self._view = ExpertView()
        self._failure = ""  # of the latest count that was not to be had
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-experts", daemon=True)

    def start(self) -> None:
        """Begins to count, from now on."""
        self._wanted = 1
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and gives up moves that are still to come.

        Waits a moment for the thread: it refers to the weights, which the caller wants to free.
        """
        with self._changed:
            self._closed = True
            self._drop_rounds()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(LOOK_SECONDS)

    def due(self) -> Sequence[Action]:
        """Returns the actions to carry out now, before anything else is enqueued; quick."""
        now = self._clock()
        actions: list[Action] = []
        ends = self._wanted > self._asked or now - self._begun >= self._settings.window_seconds
        watched = now - self._looked < 2 * LOOK_SECONDS and now >= self._next_look
        with self._changed:
            confirms = self._unconfirmed and self._has_read()
            if self._asked == self._got and (ends or watched or confirms):
                self._next_look, self._slice_ends = now + LOOK_SECONDS, ends
                self._begun = now if ends else self._begun
                self._confirming = self._asked + 1 if confirms else 0
                actions.append(CountExperts(self._asked + 1))
            if self._orders and now >= self._next_move and not self._unconfirmed:
                order = self._orders[0]  # counts as moving until it was carried out
                if isinstance(order, FetchExperts):
                    size = len(order.copies) * self.facts.slot_bytes / self.facts.pieces
                    self._next_move = now + size / (self._settings.move_gb_per_second * 1e9)
                actions.append(order)
        return actions

    def carried_out(self, actions: Sequence[Action]) -> None:
        """Notes that the actions were told to all processes and carried out in this one."""
        with self._changed:
            for action in actions:
                match action:
                    case CountExperts(number):
                        self._asked = number
                    case MoveExperts():
                        self._moved(action)
                    case FetchExperts() | ReadExperts() if self._orders:
                        self._orders.popleft()
                        self._unconfirmed = isinstance(action, ReadExperts)
            self._changed.notify_all()

    def view(self) -> ExpertView:
        """Returns figures, from any thread; counts are read more often while this is called."""
        self._looked = now = self._clock()
        seconds = now - self._switched
        return msgspec.structs.replace(self._view, epoch_seconds=seconds, moving=self._rounds)

    def rebalance(self, *, dry_run: bool, seconds: float = 2 * READ_SECONDS) -> Proposal:
        """Makes a proposal from the tokens counted so far and, unless it is a dry run, begins the
        moves. Call it on any thread but the one that asks for `due`.

        Raises:
          EngineFailedError: the counts did not come in time.
          ValueError: moves are still under way, or have ended since the proposal.
        """
        with self._changed:
            self._wanted = wanted = max(self._wanted, self._asked) + 1
            self._changed.wait_for(lambda: self._got >= wanted or self._closed, seconds)
            if self._taken < wanted:
                late = "closed" if self._closed else f"no counts within {seconds:g} s"
                why = self._failure if self._got >= wanted else late
                raise EngineFailedError(f"experts: {why}")
        current, proposal = self._propose()
        if not dry_run:
            self._begin(current, proposal)
        return proposal

    def place(self, targets: Mapping[int, Placement], current: Placements | None = None) -> int:
        """Begins to move experts to these placements; returns the number of rounds.

        Args:
          current: placements of which the targets were made; None: any.

        Raises:
          ValueError: moves are still under way, or experts are not where `current` says.
        """
        current = dict(self.placements) if current is None else current
        orders: list[FetchExperts | ReadExperts | MoveExperts] = []
        for layer, target in targets.items():
            for copies, placement in plan_rounds(current[layer], target, self.facts.sizes.ranks):
                pairs = [(copy.source, copy.target) for copy in copies]
                if pairs and self._settings.source != "devices":
                    experts = [(placement[target], target) for _, target in pairs]
                    orders.append(ReadExperts(layer, experts))
                    pairs = [(STORAGE, target) for _, target in pairs]
                elif pairs:
                    pieces = range(self.facts.pieces)
                    orders += [FetchExperts(layer, pairs, piece) for piece in pieces]
                orders.append(MoveExperts(layer, pairs, list(placement)))
        with self._changed:
            if self._rounds:
                raise ValueError(f"{self._rounds} rounds of moves are still to come")
            if self._closed or self.placements != current:
                raise ValueError("experts have moved since this was decided")
            self._orders += orders
            self._rounds = sum(isinstance(order, MoveExperts) for order in orders)
            return self._rounds

    def _propose(self) -> tuple[Placements, Proposal]:
        """Returns the current placements, and a proposal for them."""
        with self._changed:
            current, slices = dict(self.placements), list(self._slices)
        if not slices:
            slices = [{layer: np.zeros((1, self.facts.sizes.experts)) for layer in current}]
        counts = {
            layer: np.stack([part[layer].sum(axis=0) for part in slices])
            for layer in self.facts.layers
        }
        return current, propose(counts, current, self.facts, self._settings)

    def _begin(self, current: Placements, proposal: Proposal) -> None:
        self.place({each.layer: tuple(each.placement) for each in proposal.layers}, current)
        with self._changed:
            self._view = msgspec.structs.replace(self._view, loads_before=self._view.loads)

    def _moved(self, move: MoveExperts) -> None:
        if self._orders:
            self._orders.popleft()
            self._rounds -= 1
        self.placements[move.layer] = tuple(move.placement)
        self._switched = self._clock()
        moves = len(move.copies)
        self._view = msgspec.structs.replace(
            self._view,
            moves=self._view.moves + moves,
            move_bytes=self._view.move_bytes + moves * self.facts.slot_bytes,
            epoch=self._view.epoch + (not self._rounds),
        )
        if not self._rounds:
            self._slices.clear()  # the next decision uses later counts only

    def _drop_rounds(self) -> None:
        self._orders.clear()
        self._rounds, self._unconfirmed = 0, False

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._got or self._closed)
                if self._closed:
                    return
                number = self._asked
            try:
                self._count(number)
                self._decide()
            except Exception as error:  # the next counts may do better
                expected = isinstance(error, EngineFailedError | ValueError)
                self._failure = str(error) if expected else f"{type(error).__name__}: {error}"
                logger.warning("experts: %s", self._failure, exc_info=not expected)
            with self._changed:
                self._got = number
                self._changed.notify_all()

    def _count(self, number: int) -> None:
        """Reads and shows the tokens since the slice of time began; keeps them at its end."""
        counted = self._read(number, READ_SECONDS)
        # Ranks of the shared expert come last, and count no tokens.
        ranks = [counted.counts[rank] for rank in range(self.facts.sizes.ranks)]
        totals = {
            layer: np.stack([own[place] for own in ranks])
            for place, layer in enumerate(self.facts.layers)
        }
        with self._changed:
            self._taken = self._got = number
            self._changed.notify_all()
            if number == self._confirming:
                self._unconfirmed = False
                if counted.unread:
                    logger.error("%s; %d rounds are given up", counted.unread, self._rounds)
                    self._drop_rounds()
            before, renewed = self._totals, counted.renewals != self._renewals
            if before is not None and not renewed:
                new = {layer: totals[layer] - before[layer] for layer in totals}  # modulo 2^32
                slice_ = {layer: part.astype(np.int64) for layer, part in new.items()}
                self._show(slice_)
                # A rebalance may have asked for this number after `due` had chosen to look only.
                if not (self._slice_ends or self._wanted >= number):
                    return
                self._slices.append(slice_)
            self._totals, self._renewals = totals, counted.renewals

    def _show(self, counts: Mapping[int, np.ndarray]) -> None:
        """Shows tokens [ranks, experts] by layer."""
        loads = {layer: part.sum(axis=1).tolist() for layer, part in counts.items()}
        each = [balance_of(ranks) for ranks in loads.values() if any(ranks)]
        tokens = {layer: part.sum(axis=0).tolist() for layer, part in counts.items()}
        self._view = msgspec.structs.replace(
            self._view,
            loads=loads,
            balance=sum(each) / len(each) if each else None,
            expert_tokens=tokens,
            imbalance=imbalance(tokens),
        )

    def _decide(self) -> None:
        """Rebalances if it is due and worth it."""
        every, now = self._settings.rebalance_seconds, self._clock()
        if not every or now - self._decided < every or self._rounds:
            return
        self._decided = now
        current, proposal = self._propose()
        if proposal.gain < self._settings.least_gain or proposal.seconds > every / 2:
            return
        logger.info(
            "experts: balance %.3f to %.3f by %d moves",
            *(proposal.balance_now, proposal.balance_then, proposal.moves),
        )
        self._begin(current, proposal)
