"""Drives programs that each run whole steps, in colocated mode and with `pipeline: step`."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Arrays
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.token_programs import KVArrays, TokenPrograms
from jaxserve.roles.weights import HeldBlock, RoleWeights
from jaxserve.roles.worker import Observer, Passed, modules_of


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
            batch, table = self._tokens.put(msgspec.structs.replace(plan, bucket=bucket))
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
        """Returns the begun steps that the next dispatch runs: the one that waited longest."""
        return self._begun[:1]

    def _observe(self, plan: StepPlan, made: Finished | Passed) -> None:
        """Tells the observer of an enqueued step."""
        if self.observer is not None:
            step = "step", plan.lane, 0, plan.number
            self.observer.observe(*step, made.last, plan.load, self._since)
