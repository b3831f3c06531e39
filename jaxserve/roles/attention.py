"""The attention worker, and the cell, which runs the workers of a process; neither ever waits.

The worker runs the attention stages of every lane's step: embedding, attention with its KV cache,
router, head and sampler. It sends each layer's message and takes in the answer. Each hot call takes
flat, committed arguments and stays on JAX's C++ path.

A cell holds the workers of one process: one attention worker for each domain, an ffn worker, or
both. It enqueues their stages in the total order of all lanes. Every process of the runtime takes
the same steps in the same order, so the two ends of each transfer pair up.
"""

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax

from jaxserve.link.dispatch.ends import Arrays, AttentionEnd, ReceiveAnswer, SendMessage
from jaxserve.mesh import zeros_of
from jaxserve.roles.attention_programs import (
    AttentionExecutables,
    AttentionWeights,
    LayerPrograms,
    Passes,
)
from jaxserve.roles.compilation import Call, hot_call
from jaxserve.roles.drafting import StepEnd
from jaxserve.roles.layout import Bucket, StepLoad
from jaxserve.roles.sampling import Finished, TokenLanes
from jaxserve.roles.schedule import Rotation, Stage, StageName
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import KVArrays
from jaxserve.roles.weights import HeldBlock, Leaves
from jaxserve.roles.worker import Observer, Passed, Stages, lane_of_all, layers_of

if TYPE_CHECKING:  # a cell of one role needs neither the other role's worker nor local links
    from jaxserve.link.runtime_link import RuntimeLink
    from jaxserve.roles.expert_slots import ExpertSlots
    from jaxserve.roles.ffn import FFNWorker

_Layer = tuple[int, Call, SendMessage, ReceiveAnswer, Leaves]
"""Everything that the stages of one layer call, looked up once: its number, the attend program
(`enter` in layer 0, `predict` in passes of prediction modules), sender and receiver of the link,
and the weights. A plain tuple, because Python unpacks named tuples more slowly."""


class AttentionWorker:
    """Runs the attention stages of all lanes."""

    def __init__(
        self,
        programs: LayerPrograms,
        executables: dict[Bucket, AttentionExecutables],
        weights: AttentionWeights,
        link: AttentionEnd,
    ):
        self._programs = programs
        self._executables, self._weights = executables, weights
        config, self._layers = programs.config, dict[tuple[int, Bucket], list[_Layer]]()
        self._passes: dict[Bucket, Passes] = {}
        ends = weights.embedding, weights.head, weights.predictions
        for bucket, bound in executables.items():
            calls = [bound.enter, *(bound.attend[kind] for kind in config.decoder[1:])]
            if bound.passes:
                self._passes[bucket] = Passes(programs, bucket, bound.passes, ends)
                calls += [bound.passes["predict"]] * config.modules
            for lane in range(programs.deployment.lanes):
                self._layers[lane, bucket] = [
                    (
                        layer,
                        hot_call(calls[layer]),
                        link.sender(layer, bucket.tokens, lane),
                        link.receiver(layer, bucket.tokens, lane),
                        weights.layers[layer],
                    )
                    for layer in layers_of(config, bucket)
                ]
        self.renew()

    def renew(self) -> None:
        """Makes empty pages and forgets all sequences: at the start and after a lost step."""
        programs = self._programs
        self._pages: list[list[jax.Array]] = []  # the old ones are free before there are new ones
        self._pages = [*map(zeros_of, programs.layer_pages)]
        self._lanes = TokenLanes(programs, self._weights.head)

    def held(self) -> list[HeldBlock]:
        """Returns the blocks of the checkpoint that this process holds."""
        return self._weights.held

    def kv_arrays(self) -> KVArrays:
        """This worker's pages, for hand-offs."""
        return KVArrays(self._programs, lambda: jax.tree.leaves(self._pages), self._set_pages)

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        given = iter(pages)
        for arrays in self._pages:
            arrays[:] = [next(given) for _ in arrays]

    def begin(self, plan: StepPlan) -> Stages:
        """Puts a step on a lane and returns its stages.

        Each layer, and each pass of a prediction module, has an attend stage, which makes the
        message and sends it, and a combine stage, which receives the answer. The leave stage makes
        a `Finished`.
        """
        return self._step(plan, *self._lanes.put(plan))

    def _step(self, plan: StepPlan, batch: jax.Array, table: jax.Array) -> Stages:
        """Yields the results of the stages of one step.

        The first attend is `enter`. It takes the last tokens, the batch and the embedding. Later
        layers take (and donate) the residual stream, the attention inputs that `enter` derived from
        the batch, and the answer to the layer before.
        """
        pages, lane = self._pages, plan.lane
        executables = self._executables[plan.bucket]
        before, batch = self._lanes.begin(plan, executables.drafting, batch)
        x = before
        combined: Arrays = self._weights.embedding
        shared = [batch]
        calls, layers = self._layers[lane, plan.bucket], self._programs.config.layers
        for layer, attend, send, receive, leaves in itertools.islice(calls, layers):
            x, message, *made = attend(x, table, *shared, *pages[layer], *combined, *leaves)
            arrays = len(pages[layer])
            pages[layer], shared = made[:arrays], made[arrays:] or shared
            send(message)
            yield message
            del message
            combined = receive()
            yield combined[0]
        left = executables.leave(x, before, batch, *combined, *self._weights.head)
        finished, end = self._lanes.end(
            plan,
            (executables.sampling, executables.drafting),
            (before, batch, table),
            left,
            (x, *combined),
        )
        if end is not None and (passes := self._passes.get(plan.bucket)) is not None:
            drafts = yield from self._predict(passes, end, calls[layers:])
            finished = self._lanes.keep(finished, drafts)
        yield finished

    def _predict(
        self, passes: Passes, end: StepEnd, calls: Sequence[_Layer]
    ) -> Generator[jax.Array | None, None, jax.Array]:
        """Yields the stages of the modules' passes, as further layers, and returns the drafts."""
        pages, state = self._pages, passes.first(end)
        for number, (layer, attend, send, receive, leaves) in enumerate(calls):
            x, batch, _ = state
            x, message, *pages[layer] = attend(x, end.table, batch, *pages[layer], *leaves)
            send(message)
            yield message
            combined = receive()
            yield combined[0]
            state = passes.next(number, state, (x, *combined))
        return state[-1]


RunStage = Callable[[], Any]
"""Enqueues one worker's part of a lane's stage and returns the result, if the stage has one."""


class Workers(NamedTuple):
    """Workers that this process runs."""

    attention: tuple[AttentionWorker, ...] = ()
    """One attention worker for each domain; empty in an ffn process."""
    ffn: "tuple[FFNWorker, ...]" = ()
    """At most one ffn worker."""

    def begin(self, step: StepPlan) -> Mapping[StageName, tuple[RunStage, ...]]:
        """Puts a step on a lane of its domain. Returns, for each stage, the calls of the workers
        that take part in it, senders before receivers."""
        own = self.attention[step.domain : step.domain + 1]
        attention = tuple(worker.begin(step).__next__ for worker in own)
        ffn = tuple(worker.begin(step).__next__ for worker in self.ffn)
        return {
            "attend": attention,  # sends its message right away
            "dispatch": ffn,
            "ffn": ffn,
            "combine": ffn + attention,
            "leave": ffn + attention,
        }


class Cell:
    """Enqueues the steps of all lanes of all domains on the workers of this process.

    The engine begins a step plan on a lane and calls `advance`, which enqueues stages until some
    lane has left its step, and hands that step's sampled tokens out as arrays still being computed.

    Args:
      rotation: over the lanes of all domains, as `worker.lane_of_all` numbers them.
      lanes: lanes of a domain.
      predicts: whether passes of prediction modules follow steps with drafts.
      links: links of this runtime, of which this process has both ends.

    Attributes:
      observer: gets the result of every stage.
      at: the stage that was enqueued last.
      exchanges: empty: the host orders the messages, by plans that all processes share.
    """

    exchanges = ""

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
        self._steps: list[StepPlan | None] = [None] * (lanes * domains)
        self._loads: list[StepLoad | None] = [None] * (lanes * domains)
        self.observer = observer
        self.at: Stage | None = None

    @property
    def active(self) -> bool:
        """True while some lane is inside a step."""
        return bool(self._rotation.active)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = self._rotation.active
        return [lane for lane in range(len(self._steps)) if lane not in busy]

    @property
    def slots(self) -> "ExpertSlots | None":
        """Slots of this process's part of the ffn mesh; None without routed experts."""
        return next((worker.slots for worker in self._workers.ffn), None)

    def position(self) -> tuple[str, int, int, int] | None:
        """Stage, lane, layer and step number of the stage enqueued last; for any thread."""
        if self.at is None:
            return None
        step = self._steps[self.at.lane]
        return (*self.at, -1 if step is None else step.number)

    @property
    def attends(self) -> bool:
        """True if this process has devices of an attention mesh."""
        return bool(self._workers.attention)

    def held(self) -> list[HeldBlock]:
        """Returns the blocks that this process holds; all domains have the same."""
        blocks = [block for one in self._workers.attention[:1] for block in one.held()]
        return blocks + [block for one in self._workers.ffn for block in one.held()]

    def renew(self) -> bool:
        """Forgets pages, sequences, steps and messages after a lost step. Returns False where that
        is impossible because the two roles are in different processes."""
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

    def begin(self, step: StepPlan) -> None:
        """Starts a step on an idle lane; its stages follow in `advance`."""
        lane = lane_of_all(step, self._domains)
        self._rotation.begin(lane, step.bucket.drafts if self._predicts else 0)
        self._steps[lane], self._loads[lane] = step, None
        self._stages[lane] = self._workers.begin(step)

    def advance(self) -> Finished | Passed:
        """Enqueues stages up to and including the next `leave`, and returns its result: a
        `Finished` if this process has an attention worker, otherwise a `Passed`."""
        if not self._rotation.active:
            raise ValueError("no lane has begun a step")
        stages, observer = self._stages, self.observer
        for turn in self._rotation.turns:
            for stage in turn:
                self.at = stage
                runs = stages[stage[1]][stage[0]]
                if observer is None and stage[0] != "leave":
                    for run in runs:  # keeps no result, so that its memory can be reused early
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
        if load is None:
            load = self._loads[lane] = step.load
        if isinstance(made, Finished):
            observer.observe("attend", lane, layer, step.number, made.sampled, load, begun)
        elif isinstance(made, jax.Array):
            observer.observe(name, lane, layer, step.number, made, load, begun)
