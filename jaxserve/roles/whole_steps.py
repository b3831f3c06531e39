"""Programs that each run whole steps, in colocated mode and with `pipeline: step`: the stacks of
equal layers that they scan over, and their driver.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from msgspec.structs import replace

from jaxserve.config.model import LayerKind
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.module import Template
from jaxserve.roles.compilation import Arrays
from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.layout import Bucket
from jaxserve.roles.sampling import Finished, TokenLanes
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import KVArrays, TokenPrograms
from jaxserve.roles.weights import HeldBlock, RoleWeights
from jaxserve.roles.worker import Observer, Passed, modules_of
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize import StackEntry, sliceable
from pallas_kernels.quantize.words import LANES
from pallas_kernels.target import current_target


class StackedLeaves(NamedTuple):
    """Leaves of one block of a run's layers, by their place in the block.

    A scan would copy a layer's experts, matrices that lie input by input, and on TPUs quantised
    matrices before every use. Products with these take the whole stack and find their layer;
    experts of all layers are in one row. TPUs keep a matrix whose width is no multiple of 128
    with its axes swapped. A branch of a program would take it in order, and copy the stack, so its
    axes are swapped by name, which moves nothing.
    """

    whole: dict[int, Any]
    """Leaves that stay whole stacks."""
    sliced: dict[int, Any]
    """Leaves that are sliced."""

    @classmethod
    def of(cls, template: Template, stacks: Sequence[Array | None]) -> "StackedLeaves":
        """Divides the stacked leaves of a block. None: the leaf has no stack of its own."""
        whole: dict[int, Any] = {}
        sliced: dict[int, Any] = {}
        multiplied_in_stacks = current_target().backend == "mosaic_tpu"
        held = {place: sliceable(stack) for place, stack in enumerate(stacks) if stack is not None}
        for place, stack in held.items():
            if template.leaves[place].of_slots:
                whole[place] = stack.reshape(-1, *stack.shape[2:])
            elif template.leaves[place].input_major:
                whole[place] = InputMajor(stack)
            elif template.leaves[place].quantised and multiplied_in_stacks:
                swapped = stack.shape[-1] > LANES and stack.shape[-1] % LANES > 0
                kept = stack.swapaxes(-1, -2) if swapped else stack
                whole[place] = StackEntry(kept, None, swapped)
            else:
                sliced[place] = stack
        return cls(whole, sliced)

    def at(self, layer: Array | int) -> list[Any]:
        """Returns the leaves of one layer of the run, in the order of the block."""
        place = jnp.asarray(layer, jnp.int32)
        found = {name: _of_layer(leaf, place) for name, leaf in self.whole.items()}
        found |= {name: leaf[place] for name, leaf in self.sliced.items()}
        return [found[name] for name in range(len(found))]


class LayerAt(NamedTuple):
    """A layer: the number of its run, and its place in the run."""

    run: int
    layer: Array | int


def through_layers[Turn](
    counts: Mapping[int, int],
    turn: Turn,
    layer: Callable[[Turn, LayerAt, LayerAt | None], Turn],
    *,
    apart: bool,
) -> tuple[Turn, LayerAt]:
    """Runs all layers of some runs, with a scan over each run. Returns what the last one returns,
    and which layer that was.

    Args:
      counts: layers of each run, by its number.
      layer: runs a layer; also given the layer before, if there was one.
      apart: whether the first layer of a run is no part of its scan, because what it takes from the
        layer before has another shape or kind there.
    """
    before: Any = None
    for run, count in counts.items():
        first = int(apart)
        if apart:
            turn = layer(turn, LayerAt(run, 0), before)

        def one(turn: Turn, place: Array, run: int = run) -> tuple[Turn, None]:
            return layer(turn, LayerAt(run, place), LayerAt(run, place - 1)), None

        if count > first:
            turn, _ = jax.lax.scan(one, turn, jnp.arange(first, count, dtype=jnp.int32))
        before = LayerAt(run, count - 1)
    return turn, before


def with_own_pages(
    programs: TokenPrograms, kind: LayerKind, start: int, layer: Array | int, batch: RaggedBatch
) -> tuple[slice, RaggedBatch]:
    """Returns where the page arrays of a layer are among those of all layers
    (`TokenPrograms.all_pages`), and the batch with a page table that points at the layer's part.

    Args:
      kind, start, layer: kind and first layer of a run, and the layer's place in the run.
    """
    pool = programs.pool(kind)
    at = programs.pools.index(pool)
    first = sum(len(before.arrays) for before in programs.pools[:at])
    # Pages of the layers before, in each of the tables, whose entries take turns.
    pages = jnp.asarray(pool.pages, jnp.int32) * (pool.layers.index(start) + layer)
    table = batch.page_table
    shifted = table + jnp.tile(pages, table.shape[1] // programs.tables)
    return slice(first, first + len(pool.arrays)), batch._replace(page_table=shifted)


def _of_layer(
    leaf: Array | InputMajor | StackEntry, layer: Array
) -> Array | InputMajor | StackEntry:
    if isinstance(leaf, StackEntry):
        return StackEntry(leaf.stack, layer, leaf.swapped)
    return InputMajor(leaf.values, layer) if isinstance(leaf, InputMajor) else leaf


class WholeSteps:
    """Collects the steps that begin, dispatches them, and hands out their results one by one.

    Args:
      slots: slots of the routed experts that this process has; None without any.

    Attributes:
      observer: gets the result of every step.
      attends: True if this process has devices of an attention mesh.
      exchanges: digest of the messages in compiled steps, which all processes must share.
    """

    attends = True
    exchanges = ""
    _most: int | None = 1
    """Most lanes whose steps a dispatch runs; None: all."""
    _programs: TokenPrograms
    _pages: list[jax.Array]
    """Pages of all layers, in processes with devices of an attention mesh."""
    _tokens: TokenLanes
    _ends: dict[Bucket, Any]
    """Programs of each bucket; the last but two and one are those for sampling and drafting."""
    _step: Callable[[Bucket, Sequence[Arrays]], Sequence[tuple[Arrays, Arrays]]]
    """Enqueues a step of lanes, each with its last tokens, batch and page table. Returns the
    results of each lane: those of the step's end, and the arrays of its residual stream."""
    _predict: Callable[[Bucket, Sequence[Any]], Sequence[jax.Array]]
    """Enqueues the passes of the prediction modules, given the `StepEnd` of each lane; returns each
    lane's drafts."""

    def __init__(
        self,
        lanes: int,
        weights: RoleWeights,
        slots: ExpertSlots | None = None,
        observer: Observer | None = None,
    ):
        self._weights, self.slots, self.observer = weights, slots, observer
        self._lanes = range(lanes)
        self._at: tuple[str, int, int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        """Forgets all steps."""
        self._begun: list[StepPlan] = []
        self._left: deque[tuple[StepPlan, Finished | Passed]] = deque()

    def renew(self) -> bool:
        """Forgets pages, sequences and steps after a lost step. Returns True: it always can."""
        if self.slots is not None:
            self.slots.renew()
        self._clear()
        return True

    @property
    def active(self) -> bool:
        """True while `advance` has a step to return."""
        return bool(self._begun or self._left)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = {plan.lane for plan in [*self._begun, *(plan for plan, _ in self._left)]}
        return [lane for lane in self._lanes if lane not in busy]

    def position(self) -> tuple[str, int, int, int] | None:
        """First lane and step enqueued last. May be called from any thread."""
        return self._at

    def held(self) -> list[HeldBlock]:
        """Returns the blocks of the checkpoint that this process holds."""
        return self._weights.held

    def kv_arrays(self, domain: int = 0) -> KVArrays:
        """This worker's pages, for hand-offs."""
        return KVArrays(self._programs, self._own_pages, self._set_pages)

    def _own_pages(self) -> Sequence[jax.Array]:
        """Returns the pages as arrays of the mesh of `_programs`."""
        return self._pages

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        """Takes the pages back."""
        self._pages = [*pages]

    def advance(self) -> Finished | Passed:
        """Returns the next result of the latest dispatch; if none is left, dispatches first."""
        if not self._left:
            plans = self._take()
            for plan, made in zip(plans, self._run(plans), strict=True):
                self._left.append((plan, made))
                self._observe(plan, made)
        return self._left.popleft()[1]

    def _run(self, plans: Sequence[StepPlan]) -> Sequence[Finished | Passed]:
        """Enqueues these steps as one dispatch, and the programs before and after it."""
        bucket = max((plan.bucket for plan in plans), key=lambda bucket: bucket.pages)
        options, steps = self._ends[bucket][-3:-1], []
        for plan in plans:
            batch, table = self._tokens.put(replace(plan, bucket=bucket))
            steps.append((*self._tokens.begin(plan, options[1], batch), table))
        made = zip(plans, steps, self._step(bucket, steps), strict=True)
        ended = [self._tokens.end(plan, options, given, *left) for plan, given, left in made]
        finished, ends = zip(*ended, strict=True)
        if not modules_of(self._programs.config, bucket):
            return finished
        return [*map(self._tokens.keep, finished, self._predict(bucket, ends))]

    @property
    def _state(self) -> list[jax.Array]:
        """Arrays that a program takes and replaces, and tables of experts."""
        experts = [] if self.slots is None else [*self.slots.counts, *self.slots.tables]
        return [*self._pages, *experts]

    def _keep(self, state: Sequence[jax.Array]) -> None:
        """Keeps the pages and the counts of experts that a program returned."""
        pages = len(self._pages)
        self._pages[:] = state[:pages]
        if self.slots is not None:
            self.slots.counts = [*state[pages:]]

    def begin(self, plan: StepPlan) -> None:
        """Accepts a step plan for an idle lane, which `advance` will enqueue."""
        self._begun.append(plan)

    def _take(self) -> list[StepPlan]:
        """Takes the begun steps that the next dispatch runs."""
        plans = self._next()
        self._begun = [plan for plan in self._begun if plan not in plans]
        self._at, self._since = ("step", plans[0].lane, 0, plans[0].number), time.time_ns()
        return plans

    def _next(self) -> list[StepPlan]:
        """Returns the begun steps that the next dispatch runs: the one that waited longest, and
        together with it those that differ by pages alone."""
        size = replace(self._begun[0].bucket, pages=1)
        return [one for one in self._begun if replace(one.bucket, pages=1) == size][: self._most]

    def _observe(self, plan: StepPlan, made: Finished | Passed) -> None:
        """Tells the observer of an enqueued step."""
        if self.observer is not None:
            step = "step", plan.lane, 0, plan.number
            self.observer.observe(*step, made.last, plan.load, self._since)
