"""Enqueues the stages of the schedule; never waits for one.

The engine begins a step plan on a lane and calls `advance`, which enqueues stages until some lane
has left its step, and hands that step's sampled tokens out as arrays still being computed. Each hot
call takes flat, committed arguments and stays on JAX's C++ path; stages overlap because their data
dependencies let them. Every process of a deployment runs the same driver over the same plans; a
process without devices of a role passes that role's stages over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxserve.link.transport import Arrays
from jaxserve.mesh import cached_sharding, has_local_devices
from jaxserve.pipeline.executables import AFDExecutables
from jaxserve.pipeline.plan import StepPlan, batch_array, page_table_array
from jaxserve.pipeline.schedule import Rotation, Stage
from jaxserve.pipeline.weights import AFDWeights, ColocatedWeights, layer_pages, zeros_maker
from jaxserve.programs import ROWS, AFDPrograms, ColocatedPrograms
from jaxserve.step import Bucket


class Finished(NamedTuple):
    """A step that has been enqueued to its end."""

    plan: StepPlan
    sampled: jax.Array | None
    """int32 [groups, slots], replicated over the attention mesh; None in processes without it."""
    logits: jax.Array | None
    """FP32 [groups * slots, vocab]; rows of slots that did not sample mean nothing."""
    last: jax.Array
    """What this process computes last in the step: when it is there, so is everything before."""


class Observer(Protocol):
    """Notes when a stage's output is there (`timeline.Recorder`)."""

    def observe(
        self, stage: Any, lane: int, layer: int, step: int, result: jax.Array, /
    ) -> None:
        """Called right after the stage was enqueued."""
        ...


class _Lane:
    """What one lane carries from stage to stage."""

    __slots__ = (
        "arrived",
        "batch",
        "combined",
        "executables",
        "last_tokens",
        "pieces",
        "plan",
        "results",
        "table",
        "x",
    )

    plan: StepPlan
    executables: AFDExecutables
    batch: jax.Array
    table: jax.Array
    x: jax.Array
    """The residual stream; every attend donates it to the next."""
    pieces: Arrays
    """attend's message, on the attention mesh."""
    arrived: Arrays
    """The same on the ffn mesh."""
    results: Arrays
    """ffn's output, on the ffn mesh."""
    combined: Arrays
    """The same on the attention mesh."""
    last_tokens: jax.Array


class AFDDriver:
    """Runs the steps of all lanes over two meshes."""

    def __init__(
        self,
        programs: AFDPrograms,
        executables: dict[Bucket, AFDExecutables],
        weights: AFDWeights,
        observer: Observer | None = None,
    ):
        self._programs = programs
        self._executables = executables
        self._weights = weights
        self._kinds = [programs.config.kind(layer) for layer in range(programs.config.layers)]
        self._pages = layer_pages(programs)
        self.observer = observer
        mesh = programs.meshes.attention
        self._on_attention = has_local_devices(mesh)
        on_ffn = has_local_devices(programs.meshes.ffn)
        self._rotation = Rotation(programs.config.layers, programs.deployment.lanes)
        self._lanes = [_Lane() for _ in range(programs.deployment.lanes)]
        self._put = GroupPut(programs)
        self._handlers: dict[str, Callable[[_Lane, int], None]] = {
            "attend": self._attend if self._on_attention else self._attend_elsewhere,
            "dispatch": self._dispatch,
            "ffn": self._ffn if on_ffn else self._ffn_elsewhere,
            "combine": self._combine,
        }
        if self._on_attention:
            for lane in self._lanes:
                lane.last_tokens = self._put.last_tokens()
        self.at: Stage | None = None
        """What was enqueued last."""

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step."""
        return bool(self._rotation.active)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = self._rotation.active
        return [lane for lane in range(len(self._lanes)) if lane not in busy]

    def position(self) -> tuple[str, int, int, int] | None:
        """Stage, lane, layer and step number of what was enqueued last; from any thread."""
        if self.at is None:
            return None
        return (*self.at, self._lanes[self.at.lane].plan.number)

    def begin(self, plan: StepPlan) -> None:
        """Starts a step on an idle lane; its stages follow in `advance`."""
        self._rotation.begin(plan.lane)
        lane = self._lanes[plan.lane]
        lane.plan, lane.executables = plan, self._executables[plan.bucket]
        if self._on_attention:
            lane.batch, lane.table = self._put(plan)

    def advance(self) -> Finished:
        """Enqueues stages up to and including the next `leave`."""
        lanes, handlers, observer = self._lanes, self._handlers, self.observer
        while True:
            for stage in self._rotation.turn():
                self.at = stage
                name, number, layer = stage
                if name == "leave":
                    return self._leave(lanes[number])
                handlers[name](lanes[number], layer)
                if observer is not None:
                    self._observe(observer, lanes[number], stage)

    def _attend(self, lane: _Lane, layer: int) -> None:
        k, v = self._pages[layer]
        if layer == 0:
            lane.x, *lane.pieces, k, v = lane.executables.enter(  # type: ignore[misc]
                *(lane.last_tokens, lane.batch, lane.table, k, v),
                *self._weights.embedding,
                *self._weights.attention[0],
            )
        else:
            attend = lane.executables.attend[self._kinds[layer]]
            lane.x, *lane.pieces, k, v = attend(  # type: ignore[misc]
                *(lane.x, lane.batch, lane.table, k, v),
                *lane.combined,
                *self._weights.attention[layer],
            )
        self._pages[layer] = k, v

    def _attend_elsewhere(self, lane: _Lane, layer: int) -> None:
        lane.pieces = lane.executables.dispatch[self._kinds[layer]].placeholders()

    def _dispatch(self, lane: _Lane, layer: int) -> None:
        lane.arrived = lane.executables.dispatch[self._kinds[layer]](lane.pieces)

    def _ffn(self, lane: _Lane, layer: int) -> None:
        ffn = lane.executables.ffn[self._kinds[layer]]
        lane.results = ffn(*lane.arrived, *self._weights.ffn[layer])  # type: ignore[misc]

    def _ffn_elsewhere(self, lane: _Lane, layer: int) -> None:
        lane.results = lane.executables.combine.placeholders()

    def _combine(self, lane: _Lane, layer: int) -> None:
        lane.combined = lane.executables.combine(lane.results)

    def _leave(self, lane: _Lane) -> Finished:
        if not self._on_attention:
            return Finished(lane.plan, None, None, lane.results[0])
        lane.last_tokens, sampled, logits = lane.executables.leave(  # type: ignore[misc]
            *(lane.x, lane.last_tokens, lane.batch), *lane.combined, *self._weights.head
        )
        return Finished(lane.plan, sampled, logits, sampled)

    def _observe(self, observer: Observer, lane: _Lane, stage: Stage) -> None:
        outputs = {
            "attend": lambda: lane.pieces,
            "dispatch": lambda: lane.arrived,
            "ffn": lambda: lane.results,
            "combine": lambda: lane.combined,
        }[stage.name]()
        if len(outputs[0].addressable_shards):
            observer.observe(stage.name, stage.lane, stage.layer, lane.plan.number, outputs[0])


class ColocatedDriver:
    """Runs whole steps on one mesh; `advance` finishes the step that waited longest."""

    def __init__(
        self,
        programs: ColocatedPrograms,
        executables: dict[Bucket, jax.stages.Compiled | None],
        weights: ColocatedWeights,
    ):
        self._executables = executables
        self._weights = weights
        self._put = GroupPut(programs)
        self._last_tokens = [self._put.last_tokens() for _ in range(programs.deployment.lanes)]
        mesh = programs.meshes.attention
        shape = (programs.config.layers, *programs.page_shape)
        spec = jax.sharding.PartitionSpec(None, "dp")
        make = zeros_maker(shape, programs.dtype, cached_sharding(mesh, spec))
        self._k, self._v = make(), make()
        self._begun: list[tuple[StepPlan, jax.Array, jax.Array]] = []
        self._at: tuple[str, int, int, int] | None = None

    @property
    def active(self) -> bool:
        """Whether a step waits to be enqueued."""
        return bool(self._begun)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = {plan.lane for plan, _, _ in self._begun}
        return [lane for lane in range(len(self._last_tokens)) if lane not in busy]

    def position(self) -> tuple[str, int, int, int] | None:
        """Lane and number of the step that was enqueued last; from any thread."""
        return self._at

    def begin(self, plan: StepPlan) -> None:
        """Takes a plan in; `advance` enqueues it."""
        self._begun.append((plan, *self._put(plan)))

    def advance(self) -> Finished:
        """Enqueues one whole step."""
        plan, batch, table = self._begun.pop(0)
        self._at = ("step", plan.lane, 0, plan.number)
        last, sampled, logits, self._k, self._v = self._executables[plan.bucket](  # type: ignore[misc]
            *(self._last_tokens[plan.lane], batch, table, self._k, self._v), *self._weights.flat
        )
        self._last_tokens[plan.lane] = last
        return Finished(plan, sampled, logits, sampled)


class GroupPut:
    """Puts a plan's arrays on the attention mesh, each DP group's row on its devices."""

    def __init__(self, programs: AFDPrograms | ColocatedPrograms):
        self._sharding = cached_sharding(programs.meshes.attention, ROWS)
        self._groups, self._slots = programs.groups, programs.slots

    def __call__(self, plan: StepPlan) -> tuple[jax.Array, jax.Array]:
        """The batch array and the page table."""
        arrays = batch_array(plan, self._slots), page_table_array(plan, self._slots)
        if jax.process_count() == 1:
            batch, table = jax.device_put(arrays, (self._sharding, self._sharding))
            return batch, table
        batch, table = (self._put(array) for array in arrays)
        return batch, table

    def last_tokens(self) -> jax.Array:
        """A lane's last tokens before its first step."""
        return self._put(np.zeros((self._groups, self._slots), np.int32))

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, self._sharding, array.__getitem__)
