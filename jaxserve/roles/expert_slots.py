"""The experts in a worker's slots and their token counts: the part of its state that actions
change.

Owned by the worker of a mesh with routed experts (`ffn.py`, `colocated.py`) and called by the
thread that enqueues its steps. Decides no moves (see `expert_balancer.py`).
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.errors import EngineFailedError
from jaxserve.mesh import cached_sharding, zeros_of
from jaxserve.model.ffn.placement import (
    EMPTY,
    Placement,
    check_placement,
    home_slots,
    replica_table,
)
from jaxserve.roles.compilation import REPLICATED, Program, compile_all
from jaxserve.roles.expert_programs import NOTHING, Bank, ExpertPrograms, bank_arrays
from jaxserve.roles.weights import LeafSource, Leaves, RoleWeights
from jaxserve.roles.worker import (
    STORAGE,
    Action,
    Counted,
    CountExperts,
    FetchExperts,
    MoveExperts,
    ReadExperts,
)
from pallas_kernels.quantize import array_bytes


def read_experts(
    programs: ExpertPrograms,
    names: CheckpointNames,
    source: LeafSource,
    layer: int,
    experts: Sequence[int],
) -> Leaves:
    """Reads one expert for each rank from the checkpoint or from a running worker elsewhere, at the
    rate of moves, for slots that no device can fill (xDeepServe §4.5, step 3). Waits for them.

    A device reads its own share of its own expert, quantised as when the worker was loaded. At most
    one expert for each device is in memory beside the slots, twice while it is copied there.

    Args:
      source: source of the worker's weights.
      experts: the expert of each rank; below 0: none.

    Returns:
      leaves laid out as `ExpertPrograms.room`.

    Raises:
      CheckpointError, OSError: an expert cannot be read.
    """
    settings, template = programs.settings, programs.templates.of_experts(tuple(experts))
    shardings = [cached_sharding(programs.mesh, s) for s in template.specs(programs.rules)]
    source = source if settings.source == "peer" else source.storage
    source.on_read = lambda size: None
    leaves = []
    for leaf in source.leaves(template, names.ffn[layer], shardings):
        leaves.append(leaf)
        time.sleep(array_bytes(leaf.shape, leaf.dtype) / (settings.move_gb_per_second * 1e9))
    return tuple(leaves)


class Snapshot(NamedTuple):
    """Token counts at the time of a `CountExperts`."""

    number: int
    """Number of the `CountExperts`."""
    counts: jax.Array
    """uint32 [layers, ranks, experts]."""
    renewals: int
    """How often counts had been reset to zero by then."""


SlotProgram = tuple[Literal["fetch", "insert", "count"], tuple[int, int]]
"""Name of a program, and `Bank.form` of the banks that it is for; `_ALL`: all banks."""

_ALL = 0, 0


def slot_programs(programs: ExpertPrograms, banks: Sequence[Bank]) -> dict[SlotProgram, Program]:
    """Returns the programs that count and move the experts of these banks; on one device none
    move."""
    wanted: dict[SlotProgram, Program] = {("count", _ALL): programs.count(banks)}
    if programs.sizes.ranks > 1:
        for form, bank in {bank.form: bank for bank in banks}.items():
            wanted["fetch", form] = programs.fetch(bank)
            wanted["insert", form] = programs.insert(bank)
    return wanted


class ExpertSlots:
    """Slots, tables and counts of all banks of a mesh.

    Attributes:
      banks: in the order of their layers.
      tables: table of each bank, as an argument of programs.
      counts: counts of each bank; a program that adds to them takes them donated and returns them.
      room: leaves of one expert for each rank on its way to a slot; empty with a single rank.
      placements: the expert of every slot, by layer.
      compiled: `slot_programs`, compiled.
      read: reads one expert of a layer for each rank (`read_experts`).
      changing: lock held while experts are moved into slots and `placements` is updated. A thread
        that reads slots holds it until its read is enqueued.
    """

    def __init__(
        self,
        programs: ExpertPrograms,
        banks: Sequence[Bank],
        weights: RoleWeights,
        compiled: Mapping[SlotProgram, jax.stages.Compiled],
        read: Callable[[int, Sequence[int]], Leaves],
    ):
        self.changing = threading.Lock()
        self._read_experts = read
        self._reading = threading.Thread()
        self._arrived: Leaves = ()
        self._fetched_lost = False
        self.banks, self.sizes = tuple(banks), programs.sizes
        self._mesh: Mesh = programs.mesh
        self._weights, self._compiled = weights, compiled
        home = home_slots(self.sizes)
        self.placements: dict[int, Placement] = {n: home for bank in banks for n in bank.layers}
        self.tables = [self._table(bank) for bank in banks]
        self._counts, _ = bank_arrays(self._mesh, banks, programs.axes)
        self.counts = zeros_of(self._counts)
        self._room = programs.room if self.sizes.ranks > 1 else ()
        self.room: Leaves = (*zeros_of(self._room),)
        self.counted: Snapshot | None = None
        """Latest snapshot of the counts."""
        self._renewals = 0
        self.unread = ""
        """Reason why the latest `ReadExperts` failed; empty if it did not."""

    def renew(self) -> None:
        """Resets counts to zero that were donated to a lost step. Experts fetched from pools that
        a step took along are read from the checkpoint instead (`_move`)."""
        for number, counts in enumerate(self.counts):
            if lost(counts):
                self.counts[number : number + 1] = zeros_of(self._counts[number : number + 1])
                self._renewals += 1
        if any(map(lost, self.room)):
            self.room, self._fetched_lost = (*zeros_of(self._room),), True

    def read_counts(self, number: int) -> Counted:
        """Returns the counts of this process's ranks. Waits for them.

        Args:
          number: the number of the latest `CountExperts`.

        Raises:
          EngineFailedError: the latest snapshot has another number.
          JaxRuntimeError: a lost step destroyed the counts.
        """
        taken = self.counted
        if taken is None or taken.number != number:
            raise EngineFailedError(f"the counts of number {number} were not taken: {taken}")
        return Counted(counts_of_ranks(taken.counts), taken.renewals, self.unread)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers with routed experts, ascending."""
        return tuple(self.placements)

    def carry_out(self, action: Action) -> None:
        """Enqueues an action.

        Raises:
          ValueError: the action names no valid layer or placement; nothing has changed.
        """
        match action:
            case FetchExperts():
                self._fetch(action)
            case ReadExperts():
                self._read(action)
            case MoveExperts():
                self._move(action)
            case CountExperts(number):
                counts = self._compiled["count", _ALL](*self.counts)
                counts.copy_to_host_async()
                self.counted = Snapshot(number, counts, self._renewals)

    def _fetch(self, fetch: FetchExperts) -> None:
        """Fetches one piece of every expert of a round."""
        number, moves = self._bank(fetch.layer), self._moves(fetch.copies)
        bank = self.banks[number]
        index, run = bank.layers.index(fetch.layer), self._compiled["fetch", bank.form]
        numbers = np.array([index, fetch.piece], np.int32)
        where = [self._everywhere(each) for each in (moves, *numbers)]
        self.room = tuple(run(*where, *self._weights.of_slots(number), *self.room))

    def _read(self, read: ReadExperts) -> None:
        """Has experts read from the checkpoint on a thread of its own.

        With several processes, each waits for the read: all must enqueue the same in the same
        order.
        """
        self._bank(read.layer)
        self._arrived, self.unread = (), ""
        order = read.layer, self._of_ranks(read.experts)
        self._reading = threading.Thread(
            target=self._arrive, args=order, name="jaxserve-read-experts", daemon=True
        )
        self._reading.start()
        if jax.process_count() > 1:
            self._reading.join()

    def _of_ranks(self, experts: Iterable[tuple[int, int]]) -> list[int]:
        """Returns the expert of each rank, from experts and the slots that they are for."""
        found = [EMPTY] * self.sizes.all_ranks
        for expert, target in experts:
            found[target // self.sizes.local] = expert
        return found

    def _arrive(self, layer: int, experts: Sequence[int]) -> None:
        try:
            self._arrived = self._read_experts(layer, experts)
        except Exception as error:
            self.unread = f"process {jax.process_index()}: {type(error).__name__}: {error}"

    def has_read(self) -> bool:
        """True once the latest `ReadExperts` has ended, successfully or not."""
        return not self._reading.is_alive()

    def _move(self, move: MoveExperts) -> None:
        number, moves = self._bank(move.layer), self._moves(move.copies)
        check_placement(move.placement, self.sizes)
        if any(source == STORAGE for source, _ in move.copies):
            if not self._arrived:
                raise ValueError(f"layer {move.layer}: nothing was read for {move.copies}")
            self.room, self._arrived = self._arrived, ()
        elif self._fetched_lost and move.copies:
            own = self._of_ranks((move.placement[target], target) for _, target in move.copies)
            self.room, self._fetched_lost = self._read_experts(move.layer, own), False
        bank = self.banks[number]
        with self.changing:
            if move.copies:
                self._insert(number, bank.layers.index(move.layer), moves)
            self.placements[move.layer] = tuple(move.placement)
        self.tables[number] = self._table(bank)

    def _insert(self, number: int, index: int, moves: np.ndarray) -> None:
        """Puts fetched experts into a bank."""
        run = self._compiled["insert", self.banks[number].form]
        where = self._everywhere(moves), self._everywhere(np.int32(index))
        inserted = run(*where, *self.room, *self._weights.of_slots(number))
        self._weights.replace_slots(number, inserted)

    def _bank(self, layer: int) -> int:
        """Returns the number of a layer's bank."""
        if layer not in self.placements:
            raise ValueError(f"layer {layer} has no experts to move")
        return next(n for n, bank in enumerate(self.banks) if layer in bank.layers)

    def _moves(self, copies: Sequence[tuple[int, int]]) -> np.ndarray:
        """Makes the programs' `moves`: each rank's source slot and its own target slot."""
        moves = np.full((self.sizes.all_ranks, 2), (NOTHING, 0), np.int32)
        for source, target in copies:
            rank, slot = divmod(target, self.sizes.local)
            there = STORAGE <= source < self.sizes.total and 0 <= target < self.sizes.total
            if not there or moves[rank, 0] != NOTHING:
                raise ValueError(f"copies {copies}: more than one to a rank, or from nowhere")
            moves[rank] = max(source, 0), slot
        return moves

    def _table(self, bank: Bank) -> jax.Array:
        rows = [replica_table(self.placements[layer], self.sizes) for layer in bank.layers]
        return self._everywhere(np.stack(rows))

    def _everywhere(self, value: np.ndarray | np.generic) -> jax.Array:
        whole = np.asarray(value)
        sharding = cached_sharding(self._mesh, REPLICATED)
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def open_slots(
    experts: ExpertPrograms | None,
    banks: Sequence[Bank],
    weights: RoleWeights,
    names: CheckpointNames,
    source: LeafSource,
) -> ExpertSlots | None:
    """Compiles the programs of a worker's routed experts, and returns their slots, which read
    experts from where its weights came from; None without routed experts."""
    if experts is None:
        return None
    compiled = compile_all(slot_programs(experts, banks))
    read = functools.partial(read_experts, experts, names, source)
    return ExpertSlots(experts, banks, weights, compiled, read)


def lost(array: jax.Array) -> bool:
    """Returns whether an array was donated or could not be computed. Waits for it."""
    try:
        array.block_until_ready()
    except RuntimeError:
        return True
    return bool(array.is_deleted())


def counts_of_ranks(counted: jax.Array) -> dict[int, np.ndarray]:
    """Returns this process's part of the counts: rank → uint32 [layers, experts]. Waits for it.

    In one program of both roles only the ffn role's devices count, which are last.
    """
    return {
        shard.index[1].start or 0: np.asarray(shard.data)[:, 0]
        for shard in counted.addressable_shards
    }
