"""Drives programs that each run whole steps, in colocated mode and with `pipeline: step`."""

import time
from collections import deque
from collections.abc import Sequence

import jax

from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import KVArrays, TokenPrograms
from jaxserve.roles.weights import HeldBlock, RoleWeights
from jaxserve.roles.worker import Observer, Passed


class WholeSteps:
    """Collects the steps that begin, for drivers whose `advance` enqueues and returns them.

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
        return KVArrays(self._programs, True, self._own_pages, self._set_pages)

    def _own_pages(self) -> Sequence[jax.Array]:
        """Returns the pages as arrays of the mesh of `_programs`."""
        return self._pages

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        """Takes the pages back."""
        self._pages = [*pages]

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
