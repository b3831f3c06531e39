"""Runs the workers of one process, stage by stage in the total order of all lanes; never waits.

A cell is the attention workers, one a domain, and the ffn worker of one runtime (design, words); in
a process that plays one of the two roles it holds that one's, and the other's stages are somebody
else's. Every process of the runtime takes the same steps in the same order, so the two ends of each
transfer pair up. A domain without steps has no stages in that order.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax

from jaxserve.roles.layout import StepLoad
from jaxserve.roles.sampling import Finished
from jaxserve.roles.schedule import Rotation, Stage, StageName
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import KVArrays
from jaxserve.roles.weights import HeldBlock
from jaxserve.roles.worker import Observer, Passed, Stages, Step, lane_of_all

if TYPE_CHECKING:  # a cell of one role has neither the other's worker nor links of its own
    from jaxserve.link.runtime_link import RuntimeLink
    from jaxserve.roles.attention import AttentionWorker
    from jaxserve.roles.expert_slots import ExpertSlots
    from jaxserve.roles.ffn import FFNWorker

RunStage = Callable[[], Any]
"""Enqueues what a worker does in a stage of a lane and returns what it makes, if anything."""


class Workers(NamedTuple):
    """The workers that a process plays."""

    attention: "tuple[AttentionWorker, ...]" = ()
    """One a domain, or none."""
    ffn: "tuple[FFNWorker, ...]" = ()
    """One or none; as all sequences here, so that nobody has to ask which."""

    def begin(self, step: Step) -> Mapping[StageName, tuple[RunStage, ...]]:
        """Puts a step on a lane of its domain. Who runs something in a stage of it, senders before
        receivers.

        With an attention worker the step is a whole `StepPlan`.
        """
        own = self.attention[step.domain : step.domain + 1]
        attention = tuple(_next(worker.begin(cast(Any, step))) for worker in own)
        ffn = tuple(_next(worker.begin(step)) for worker in self.ffn)
        return {
            "attend": attention,  # sends its message right away
            "dispatch": ffn,
            "ffn": ffn,
            "combine": ffn + attention,
            "leave": ffn + attention,
        }


def _next(stages: Stages) -> RunStage:
    return stages.__next__


class Cell:
    """Enqueues the steps of all lanes of all domains on the workers of this process.

    The engine begins a step plan on a lane and calls `advance`, which enqueues stages until some
    lane has left its step, and hands that step's sampled tokens out as arrays still being computed.

    Args:
      rotation: over the lanes of all domains, as `worker.lane_of_all` numbers them.
      lanes: of a domain.
      predicts: whether passes of prediction modules follow steps with drafts.
      links: of this runtime, whose two ends are both here; others are somebody else's to clear.

    Attributes:
      observer: told of what every stage makes.
      at: the stage that was enqueued last.
    """

    def __init__(
        self,
        workers: Workers,
        rotation: Rotation,
        lanes: int,
        observer: Observer | None = None,
        domains: int = 1,
        *,
        predicts: bool = False,
        links: "Sequence[RuntimeLink]" = (),
    ):
        self._links = links
        self._predicts = predicts
        self._workers, self._rotation, self._domains = workers, rotation, domains
        self._stages: list[Mapping[StageName, tuple[RunStage, ...]]] = [{}] * (lanes * domains)
        self._steps: list[Step | None] = [None] * (lanes * domains)
        self._loads: list[StepLoad | None] = [None] * (lanes * domains)
        self.observer = observer
        self.at: Stage | None = None

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step."""
        return bool(self._rotation.active)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = self._rotation.active
        return [lane for lane in range(len(self._steps)) if lane not in busy]

    @property
    def slots(self) -> "ExpertSlots | None":
        """Where the experts of this process's part of the ffn mesh are; None: it has none."""
        return next((worker.slots for worker in self._workers.ffn), None)

    def position(self) -> tuple[str, int, int, int] | None:
        """Stage, lane, layer and step number of what was enqueued last; from any thread."""
        if self.at is None:
            return None
        step = self._steps[self.at.lane]
        return (*self.at, -1 if step is None else step.number)

    @property
    def attends(self) -> bool:
        """Whether this process has devices of an attention mesh."""
        return bool(self._workers.attention)

    def held(self) -> list[HeldBlock]:
        """What of the checkpoint is here; all domains have the same."""
        blocks = [block for one in self._workers.attention[:1] for block in one.held()]
        return blocks + [block for one in self._workers.ffn for block in one.held()]

    def renew(self) -> bool:
        """After a lost step: empty pages, no sequence, no step, nothing on the way. Whether that
        can be done: where both roles are here."""
        if not self._links or not (self._workers.attention and self._workers.ffn):
            return False
        self._rotation.clear()
        self._stages = [{} for _ in self._stages]
        self._steps = [None] * len(self._steps)
        for link in self._links:
            link.clear()
        for worker in self._workers.attention:
            worker.renew()
        if self.slots is not None:
            self.slots.renew()
        return True

    def kv_arrays(self, domain: int = 0) -> KVArrays:
        """The pages of an attention worker, for hand-offs."""
        return self._workers.attention[domain].kv_arrays()

    def begin(self, step: Step) -> None:
        """Starts a step on an idle lane; its stages follow in `advance`."""
        lane = lane_of_all(step, self._domains)
        self._rotation.begin(lane, step.bucket.drafts if self._predicts else 0)
        self._steps[lane], self._loads[lane] = step, None
        self._stages[lane] = self._workers.begin(step)

    def advance(self) -> Finished | Passed:
        """Enqueues stages up to and including the next `leave`, and returns what that made: with an
        attention worker a `Finished`."""
        if not self._rotation.active:
            raise ValueError("no lane has begun a step")
        stages, observer = self._stages, self.observer
        for turn in self._rotation.turns:
            for stage in turn:
                self.at = stage
                runs = stages[stage[1]][stage[0]]
                if observer is None and stage[0] != "leave":
                    for run in runs:  # keeps nothing: memory that is free early is used again
                        run()
                    continue
                made, begun = None, time.time_ns()
                for run in runs:
                    made = run()
                if observer is not None:
                    self._observe(observer, stage, made, begun)
                if stage[0] == "leave":
                    return cast(Finished | Passed, made)
        raise AssertionError("the rotation has no end")

    def _observe(self, observer: Observer, stage: Stage, made: Any, begun: int) -> None:
        name, lane, layer = stage
        step, load = self._steps[lane], self._loads[lane]
        assert step is not None
        if load is None and isinstance(step, StepPlan):
            load = self._loads[lane] = step.load
        if isinstance(made, Finished):
            observer.observe("attend", lane, layer, step.number, made.sampled, load, begun)
        elif isinstance(made, jax.Array):
            observer.observe(name, lane, layer, step.number, made, load, begun)
