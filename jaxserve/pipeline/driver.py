"""Enqueues the stages of the schedule; never waits for one.

The engine begins a step plan on a lane and calls `advance`, which enqueues stages until some lane
has left its step, and hands that step's sampled tokens out as arrays still being computed. Each hot
call takes flat, committed arguments and stays on JAX's C++ path; stages overlap because their data
dependencies let them. Every process of a deployment runs the same driver over the same plans; a
process without devices of a role passes that role's stages over.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxserve.config.model import LayerKind
from jaxserve.link.transport import Arrays
from jaxserve.mesh import cached_sharding, has_local_devices
from jaxserve.pipeline.executables import AFDExecutables, ColocatedExecutables
from jaxserve.pipeline.plan import StepPlan, batch_array, page_table_array
from jaxserve.pipeline.sampling import Finished, Sampling
from jaxserve.pipeline.schedule import Rotation, Stage
from jaxserve.pipeline.weights import AFDWeights, ColocatedWeights, layer_pages, zeroed
from jaxserve.programs import ROWS, AFDPrograms, ColocatedPrograms
from jaxserve.step import Bucket

Send = Callable[[Arrays], Arrays]
OnLoad = Callable[[tuple[int, ...], jax.Array], None]
"""Takes layers and how many tokens of a step their experts got, int32 [parts, layers, experts]: the
sum over the parts, and over all processes, is the whole."""


class Observer(Protocol):
    """Notes when a stage's output is there (`timeline.Recorder`)."""

    def observe(self, stage: Any, lane: int, layer: int, step: int, result: jax.Array, /) -> None:
        """Called right after the stage was enqueued."""
        ...


class _Layer(NamedTuple):
    """What the stages of one layer run, looked up once. What runs elsewhere is None or empty."""

    attend: jax.stages.Compiled | None
    """In layer 0 the program `enter`."""
    dispatch: Send
    ffn: jax.stages.Compiled | None
    combine: Send
    attention_leaves: tuple[jax.Array, ...]
    ffn_leaves: tuple[jax.Array, ...]
    absent_pieces: Arrays
    """What dispatch takes where there is no attend."""
    absent_results: Arrays
    """What combine takes where there is no ffn."""


class AFDDriver:
    """Runs the steps of all lanes over two meshes."""

    def __init__(
        self,
        programs: AFDPrograms,
        executables: dict[Bucket, AFDExecutables],
        weights: AFDWeights,
        observer: Observer | None = None,
    ):
        self._executables = executables
        self._weights = weights
        kinds = [programs.config.kind(layer) for layer in range(programs.config.layers)]
        self._layers = {
            bucket: _bind_layers(kinds, bound, weights) for bucket, bound in executables.items()
        }
        self._pages = layer_pages(programs)
        self._sends = programs.dispatch.sends
        self._routed = [kind.ffn == "moe" for kind in kinds]
        self.observer = observer
        self.on_load: OnLoad | None = None
        """Told of every layer, where there is an observer too."""
        self._on_attention = has_local_devices(programs.meshes.attention)
        lanes = programs.deployment.lanes
        self._rotation = Rotation(programs.config.layers, lanes)
        self._plans: list[StepPlan | None] = [None] * lanes
        self._steps: list[Iterator[Arrays | Finished]] = [iter(())] * lanes
        self._put = GroupPut(programs)
        self._last_tokens = [
            self._put.last_tokens() if self._on_attention else None for _ in range(lanes)
        ]
        self._sampling: Any = None
        if self._on_attention:
            self._sampling = Sampling(programs, weights.head, self._put.rows)
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
        return [lane for lane in range(len(self._steps)) if lane not in busy]

    def position(self) -> tuple[str, int, int, int] | None:
        """Stage, lane, layer and step number of what was enqueued last; from any thread."""
        if self.at is None:
            return None
        plan = self._plans[self.at.lane]
        return (*self.at, -1 if plan is None else plan.number)

    def begin(self, plan: StepPlan) -> None:
        """Starts a step on an idle lane; its stages follow in `advance`."""
        self._rotation.begin(plan.lane)
        self._plans[plan.lane] = plan
        batch, table = self._put(plan) if self._on_attention else (None, None)
        self._steps[plan.lane] = self._step(plan, batch, table)

    def advance(self) -> Finished:
        """Enqueues stages up to and including the next `leave`."""
        if not self._rotation.active:
            raise ValueError("no lane has begun a step")
        steps, observer = self._steps, self.observer
        for turn in self._rotation.turns:
            for stage in turn:
                self.at = stage
                made = next(steps[stage.lane])
                if observer is not None:
                    self._observe(observer, stage, made)
            if isinstance(made, Finished):
                return made
        raise AssertionError("the rotation has no end")

    def _step(
        self, plan: StepPlan, batch: jax.Array | None, table: jax.Array | None
    ) -> Iterator[Arrays | Finished]:
        """One step of a lane: enqueues a stage each time it is resumed, yields what it makes.

        The first attend is `enter`, which takes the last tokens and the embedding where the others
        take the residual stream (and donate it) and what came from the ffn mesh.
        """
        pages, sends = self._pages, self._sends
        executables = self._executables[plan.bucket]
        x = self._last_tokens[plan.lane]
        combined: Arrays = self._weights.embedding
        results: Arrays = ()
        for layer, bound in enumerate(self._layers[plan.bucket]):
            attend, dispatch, ffn, combine, attention_leaves, ffn_leaves, pieces, results = bound
            if attend is not None:
                x, *made = attend(x, batch, table, *pages[layer], *combined, *attention_leaves)
                pieces, pages[layer] = made[:sends], made[sends:]
            yield pieces
            arrived = dispatch(pieces)
            yield arrived
            if ffn is not None:
                results = ffn(*arrived, *ffn_leaves)
            yield results
            combined = combine(results)
            yield combined
        if executables.leave is None:
            yield Finished(plan, None, None, results[0])
            return
        before = self._last_tokens[plan.lane]
        left = executables.leave(x, before, batch, *combined, *self._weights.head)
        self._last_tokens[plan.lane], finished = self._sampling.finish(
            plan, executables.sampling, batch, before, left, (x, *combined)
        )
        yield finished

    def _observe(self, observer: Observer, stage: Stage, made: Arrays | Finished) -> None:
        plan = self._plans[stage.lane]
        assert plan is not None
        if isinstance(made, Finished):
            if made.sampled is not None:
                observer.observe("attend", stage.lane, stage.layer, plan.number, made.sampled)
        elif made[0].addressable_shards:
            observer.observe(stage.name, stage.lane, stage.layer, plan.number, made[0])
            if stage.name == "attend" and self.on_load is not None and self._routed[stage.layer]:
                count: Any = self._executables[plan.bucket].load
                self.on_load((stage.layer,), count(*made))


def _bind_layers(
    kinds: Sequence[LayerKind], executables: AFDExecutables, weights: AFDWeights
) -> list[_Layer]:
    """One entry a layer."""
    layers = []
    for layer, kind in enumerate(kinds):
        attend = executables.attend[kind] if layer else executables.enter
        dispatch, ffn, combine = (
            executables.dispatch[kind.ffn],
            executables.ffn[kind.ffn],
            executables.combine,
        )
        layers.append(
            _Layer(
                attend,
                dispatch.bind(),
                ffn,
                combine.bind(),
                weights.attention[layer],
                weights.ffn[layer],
                dispatch.placeholders() if attend is None else (),
                combine.placeholders() if ffn is None else (),
            )
        )
    return layers


class ColocatedDriver:
    """Runs whole steps on one mesh; `advance` finishes the step that waited longest."""

    def __init__(
        self,
        programs: ColocatedPrograms,
        executables: dict[Bucket, ColocatedExecutables],
        weights: ColocatedWeights,
    ):
        self._executables = executables
        self._weights = weights
        self._put = GroupPut(programs)
        self._last_tokens = [self._put.last_tokens() for _ in range(programs.deployment.lanes)]
        self._pages = zeroed(programs.all_pages, programs.meshes.attention)
        self._sampling = Sampling(programs, weights.head, self._put.rows)
        config = programs.config
        self._routed = tuple(n for n in range(config.layers) if config.kind(n).ffn == "moe")
        self.observer: Observer | None = None
        self.on_load: OnLoad | None = None
        """Told of every step, of all layers at once."""
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
        step, sampling = self._executables[plan.bucket]
        before = self._last_tokens[plan.lane]
        last, sampled, logits, x, load, *self._pages = step(  # type: ignore[misc]
            before, batch, table, *self._pages, *self._weights.flat
        )
        self._last_tokens[plan.lane], finished = self._sampling.finish(
            plan, sampling, batch, before, (last, sampled, logits), (x,)
        )
        if self.observer is not None:
            self.observer.observe("step", plan.lane, 0, plan.number, finished.last)
        if self.on_load is not None and self._routed:
            self.on_load(self._routed, load)
        return finished


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
        batch, table = map(self.rows, arrays)
        return batch, table

    def last_tokens(self) -> jax.Array:
        """A lane's last tokens before its first step."""
        return self.rows(np.zeros((self._groups, self._slots), np.int32))

    def rows(self, array: np.ndarray) -> jax.Array:
        """An array with a row a DP group."""
        if jax.process_count() == 1:
            return jax.device_put(array, self._sharding)
        return jax.make_array_from_callback(array.shape, self._sharding, array.__getitem__)
