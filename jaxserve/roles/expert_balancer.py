"""Moves experts while a worker serves: reads what they got, decides, and hands out actions.

Whoever runs a mesh with routed experts (the engine's thread, or an ffn worker's message server)
asks at every boundary for the actions that are `due`, carries them out, and says so. A thread of
this module reads the counts, which may take a while, and never touches the worker. A rebalance is a
sequence of rounds, each of which leaves a placement that serves: one that is cut short leaves the
last of them.
"""

import functools
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
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.ffn.placement import Placement, SlotSizes, home_slots, plan_rounds
from jaxserve.roles.actions import (
    STORAGE,
    Action,
    CountExperts,
    FetchExperts,
    MoveExperts,
    ReadExperts,
)
from jaxserve.roles.expert_moves import Counts, MovesExperts, Proposal, ReadCounts
from jaxserve.roles.expert_policy import Options, balances, imbalance, propose
from jaxserve.roles.expert_programs import expert_bytes, move_pieces
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks
from jaxserve.roles.expert_view import ExpertView

logger = logging.getLogger(__name__)

READ_SECONDS = 5.0
LOOK_SECONDS = 2.0
"""How often counts are read, at most, while somebody looks at them."""
SLICES = 10
"""Slices of time that a decision looks back on."""


class ExpertFacts(msgspec.Struct, frozen=True):
    """What can be moved, as every process of a deployment knows it."""

    layers: list[int]
    sizes: SlotSizes
    slot_bytes: int
    """Of one expert's weights in one layer."""
    groups: int = 1
    """Of experts, that the router chooses first."""
    pieces: int = 1
    """In which an expert is fetched."""


def expert_facts(templates: ModelTemplates, settings: Experts) -> ExpertFacts | None:
    """What can be moved; None: the model has no routed experts."""
    config, sizes = templates.config, templates.slots
    if config.router is None or "moe" not in templates.ffn:
        return None
    layers = [layer for layer in range(config.all_layers) if config.kind(layer).ffn == "moe"]
    size, pieces = expert_bytes(templates.ffn["moe"], sizes), move_pieces(templates, settings)
    return ExpertFacts(layers, sizes, size, config.router.groups, pieces)


def make_balancer(
    facts: ExpertFacts | None,
    deployment: Deployment,
    slots: ExpertSlots | None,
    others: ReadCounts | None = None,
) -> "ExpertBalancer | None":
    """Who moves the experts of a mesh; None: there are none.

    Args:
      slots: those of this process, if it has some.
      others: reads the counts of other processes, if there are some.
    """
    if facts is None:
        return None

    def read(number: int, seconds: float) -> Counts:
        counts = dict(others(number, seconds)) if others is not None else {}
        if slots is not None and slots.counted is not None:
            counts |= counts_of_ranks(slots.counted[1])
        return counts

    has_read = (lambda: True) if slots is None else slots.has_read
    return ExpertBalancer(facts, deployment.experts, read, has_read=has_read)


def balancer_of(
    templates: ModelTemplates, deployment: Deployment, slots: ExpertSlots | None
) -> Callable[[ReadCounts | None], MovesExperts | None]:
    """`make_balancer` for a runtime's own experts, but for who reads the counts of others."""
    facts = expert_facts(templates, deployment.experts)
    return functools.partial(make_balancer, facts, deployment, slots)


class ExpertBalancer:
    """Decides and paces.

    Args:
      read: reads the counts.
      clock: seconds, monotonic.
      has_read: whether experts that come from the checkpoint are there; raises EngineFailedError
        where they cannot be read.
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
        home = home_slots(facts.sizes)
        self.placements: dict[int, Placement] = dict.fromkeys(facts.layers, home)
        self._options = Options(
            least_gain=settings.least_gain,
            bytes_per_second=settings.move_gb_per_second * 1e9,
            slot_bytes=facts.slot_bytes,
            groups=facts.groups,
            nodes=settings.nodes,
        )
        self._changed = threading.Condition()
        self._orders: deque[FetchExperts | ReadExperts | MoveExperts] = deque()
        self._rounds = 0  # in the orders
        self._next_move = self._switched = self._decided = clock()
        self._begun = self._next_look = self._switched  # the slice of time, and to be seen
        self._slice_ends, self._looked = True, float("-inf")
        self._wanted = self._asked = self._got = 0  # counts: to be taken, taken, read
        self._totals: dict[int, np.ndarray] | None = None
        self._slices: deque[dict[int, np.ndarray]] = deque(maxlen=SLICES)
        self._view = ExpertView()
        self._failure = ""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-experts", daemon=True)

    def start(self) -> None:
        """Begins to count, from now on."""
        self._wanted = 1
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; what is not moved stays where it is."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._rounds = 0
            self._changed.notify_all()

    def due(self) -> Sequence[Action]:
        """What is to be carried out now, before anything else is enqueued; quick."""
        now = self._clock()
        actions: list[Action] = []
        ends = self._wanted > self._asked or now - self._begun >= self._settings.window_seconds
        watched = now - self._looked < 2 * LOOK_SECONDS
        if self._asked == self._got and (ends or (watched and now >= self._next_look)):
            self._next_look, self._slice_ends = now + LOOK_SECONDS, ends
            self._begun = now if ends else self._begun
            actions.append(CountExperts(self._asked + 1))
        if self._orders and now >= self._next_move and self._room_is_full():
            order = self._orders[0]  # it counts as to come until it was carried out
            if isinstance(order, FetchExperts):
                size = len(order.copies) * self.facts.slot_bytes / self.facts.pieces
                self._next_move = now + size / self._options.bytes_per_second
            actions.append(order)
        return actions

    def _room_is_full(self) -> bool:
        """Whether what the next order needs was read; if it cannot be, experts stay where they
        are."""
        try:
            return self._has_read()
        except EngineFailedError as error:
            logger.error("%s; the other %d rounds are given up", error, self._rounds)
            with self._changed:
                self._failure = str(error)
                self._orders.clear()
                self._rounds = 0
            return False

    def carried_out(self, actions: Sequence[Action]) -> None:
        """All processes have been told of them, and this one has carried them out."""
        with self._changed:
            for action in actions:
                match action:
                    case FetchExperts() | ReadExperts() if self._orders:
                        self._orders.popleft()
                    case MoveExperts():
                        self._moved(action)
                    case CountExperts(number):
                        self._asked = number
            self._changed.notify_all()

    def view(self) -> ExpertView:
        """From any thread; counts are read more often while somebody looks."""
        self._looked = now = self._clock()
        seconds = now - self._switched
        return msgspec.structs.replace(self._view, epoch_seconds=seconds, moving=self._rounds)

    def rebalance(self, *, dry_run: bool, seconds: float = 2 * READ_SECONDS) -> Proposal:
        """Proposes by what was counted up to now, and unless it is a dry run begins to move; any
        thread but the one that asks what is due.

        Raises:
          EngineFailedError: the counts did not come in time.
          ValueError: moves are still under way.
        """
        with self._changed:
            self._wanted = wanted = max(self._wanted, self._asked) + 1
            self._failure = ""
            done = self._changed.wait_for(
                lambda: self._got >= wanted or self._failure or self._closed, seconds
            )
            if self._failure or self._got < wanted:
                why = self._failure or ("closed" if done else f"no counts within {seconds:g} s")
                raise EngineFailedError(f"experts: {why}")
        proposal = self._propose()
        if not dry_run:
            self._begin(proposal)
        return proposal

    def place(self, placements: Mapping[int, Placement]) -> int:
        """Begins to move experts to these placements; the number of rounds.

        Raises:
          ValueError: moves are still under way.
        """
        with self._changed:
            if self._rounds:
                raise ValueError(f"{self._rounds} rounds of moves are still to come")
            ranks = self.facts.sizes.ranks
            for layer, target in placements.items():
                for copies, placement in plan_rounds(self.placements[layer], target, ranks):
                    pairs = [(copy.source, copy.target) for copy in copies]
                    if pairs and self._settings.source != "devices":
                        experts = [(placement[target], target) for _, target in pairs]
                        self._orders.append(ReadExperts(layer, experts))
                        pairs = [(STORAGE, target) for _, target in pairs]
                    elif pairs:
                        pieces = range(self.facts.pieces)
                        self._orders += [FetchExperts(layer, pairs, piece) for piece in pieces]
                    self._orders.append(MoveExperts(layer, pairs, list(placement)))
                    self._rounds += 1
            return self._rounds

    def _propose(self) -> Proposal:
        slices = list(self._slices)
        if not slices:
            slices = [{layer: np.zeros((1, self.facts.sizes.experts)) for layer in self.placements}]
        counts = {
            layer: np.stack([part[layer].sum(axis=0) for part in slices])
            for layer in self.facts.layers
        }
        return propose(counts, self.placements, self.facts.sizes, self._options)

    def _begin(self, proposal: Proposal) -> None:
        self.place({each.layer: tuple(each.placement) for each in proposal.layers})
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
            self._slices.clear()  # the next decision looks at what comes now

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._got or self._closed)
                if self._closed:
                    return
                number = self._asked
            try:
                counts = self._read(number, READ_SECONDS)
            except EngineFailedError as error:
                logger.warning("experts: %s", error)
                with self._changed:
                    self._failure = str(error)
                    self._got = number
                    self._changed.notify_all()
                continue
            with self._changed:
                self._take(counts)
                self._got = number
                self._changed.notify_all()
            self._decide()

    def _take(self, counts: Counts) -> None:
        """What was counted since the last slice of time, which is shown, and at its end kept."""
        # Ranks of the shared expert come last, and count no tokens.
        ranks = [counts[rank] for rank in sorted(counts) if rank < self.facts.sizes.ranks]
        totals = {
            layer: np.stack([own[place] for own in ranks])
            for place, layer in enumerate(self.facts.layers)
        }
        if self._totals is not None:
            before = self._totals
            new = {layer: totals[layer] - before[layer] for layer in totals}  # modulo 2^32
            self._show({layer: part.astype(np.int64) for layer, part in new.items()})
            if not self._slice_ends:
                return
            self._slices.append({layer: part.astype(np.int64) for layer, part in new.items()})
        self._totals = totals

    def _show(self, counts: Mapping[int, np.ndarray]) -> None:
        """Tokens [ranks, experts] by layer."""
        loads = {layer: part.sum(axis=1).tolist() for layer, part in counts.items()}
        each = [b for layer, b in balances(counts).items() if any(loads[layer])]
        tokens = {layer: part.sum(axis=0).tolist() for layer, part in counts.items()}
        self._view = msgspec.structs.replace(
            self._view,
            loads=loads,
            balance=sum(each) / len(each) if each else None,
            expert_tokens=tokens,
            imbalance=imbalance(tokens),
        )

    def _decide(self) -> None:
        """Rebalances if it is time to, and worth it."""
        every, now = self._settings.rebalance_seconds, self._clock()
        if not every or now - self._decided < every or self._rounds:
            return
        self._decided = now
        proposal = self._propose()
        if proposal.gain < self._settings.least_gain or proposal.seconds > every / 2:
            return
        logger.info(
            "experts: balance %.3f to %.3f by %d moves",
            *(proposal.balance_now, proposal.balance_then, proposal.moves),
        )
        self._begin(proposal)
