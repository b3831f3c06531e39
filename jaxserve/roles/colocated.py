"""The colocated worker: a whole step is one program on one mesh. Other layouts yield its tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.mesh import ATTENTION_RULES, COLOCATED_FFN_RULES
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.compilation import Get, StepCompiler
from jaxserve.roles.drafting import DraftingExecutables, StepEnd, drafting_executables
from jaxserve.roles.expert_slots import ExpertSlots, open_slots
from jaxserve.roles.layout import Bucket
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.program import Arrays
from jaxserve.roles.sampling import SamplingExecutables, sampling_executables
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.token_programs import zeroed
from jaxserve.roles.weights import LeafSource, Leaves, RoleWeights, load_progress
from jaxserve.roles.whole_steps import WholeSteps
from jaxserve.roles.worker import Observer


class ColocatedWeights(RoleWeights):
    """Weights of a colocated worker: embedding, head, and for each run of equal layers the stacked
    leaves of both roles; then those of the prediction modules."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: ColocatedPrograms):
        super().__init__(source, programs.mesh)
        templates, config = programs.templates, programs.config
        self.embedding, self.head = self.add_ends(templates, names, ATTENTION_RULES)
        runs = config.runs()
        self._modules = 2 * len(runs)
        if names.predictions:
            runs = [*runs, (config.layer(config.layers), config.layers, config.all_layers)]
        for kind, first, stop in runs:
            if first == config.layers:
                block = templates.prediction
                self.add("prediction", block, names.predictions, ATTENTION_RULES, first)
            attention, ffn = names.attention[first:stop], names.ffn[first:stop]
            self.add("attention", templates.attention[kind], attention, ATTENTION_RULES, first)
            self.add("ffn", templates.ffn[kind.ffn], ffn, COLOCATED_FFN_RULES, first)

    @property
    def flat(self) -> Leaves:
        """All leaves but those of the prediction modules."""
        return sum(self.blocks[: self._modules], self.embedding + self.head)

    @property
    def modules(self) -> Leaves:
        """Embedding, head, and the leaves of the prediction modules: those beside their layers,
        then both roles' leaves of their layers."""
        return sum(self.blocks[self._modules :], self.embedding + self.head)


class ColocatedExecutables(NamedTuple):
    """Programs of a step of one bucket."""

    step: jax.stages.Compiled
    sampling: SamplingExecutables | None
    drafting: DraftingExecutables | None = None
    predict: jax.stages.Compiled | None = None
    """Passes of the prediction modules; None without modules, or for steps without drafts."""


def colocated_executables(
    programs: ColocatedPrograms, buckets: Sequence[Bucket], get: Get
) -> dict[Bucket, ColocatedExecutables]:
    """Collects the programs of each bucket: the step itself, sampling and drafting."""

    def step(bucket: Bucket) -> ColocatedExecutables:
        predicts = programs.config.modules and bucket.drafts
        return ColocatedExecutables(
            get(ColocatedPrograms.step, bucket),
            sampling_executables(programs, bucket, get),
            drafting_executables(programs, bucket, get),
            get(ColocatedPrograms.predict, bucket) if predicts else None,
        )

    return {bucket: step(bucket) for bucket in buckets}


def build_worker(
    model: OpenModel, deployment: Deployment, observer: Observer | None = None
) -> "ColocatedWorker":
    """Loads weights and compiles programs."""
    config, names, meshes, templates, source = model
    programs = ColocatedPrograms(templates, deployment, meshes.attention)
    with load_progress(source, 2 + 2 * config.all_layers):
        weights = ColocatedWeights(source, names, programs)
    compiler = StepCompiler(colocated_executables, programs, SamplingExecutables._fields)
    slots = open_slots(programs.experts, programs.banks, weights, names, source)
    return ColocatedWorker(programs, compiler, weights, slots, observer)


class ColocatedWorker(WholeSteps):
    """Runs whole steps on one mesh, one after another."""

    _weights: ColocatedWeights
    _programs: ColocatedPrograms

    def __init__(
        self,
        programs: ColocatedPrograms,
        compiler: StepCompiler,
        weights: ColocatedWeights,
        slots: ExpertSlots | None,
        observer: Observer | None = None,
    ):
        self._programs, self.compiler, self._ends = programs, compiler, compiler.executables
        super().__init__(programs.deployment.lanes, weights, slots, observer)

    def _clear(self) -> None:
        super()._clear()
        programs = self._programs
        self._pages = []  # the old ones are free before there are new ones
        self._pages = zeroed(programs.all_pages, programs.mesh)
        self._tokens = TokenLanes(programs, self._weights.head)

    def _take(self) -> list[StepPlan]:
        return [*map(self.compiler.fitted, super()._take())]

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        last, sampled, logits, x, *state = self._ends[bucket].step(
            *steps[0], *self._state, *self._weights.flat
        )
        own = [state.pop()] if bucket.drafts else []
        self._keep(state)
        return [((last, sampled, logits, *own), (x,))]

    def _predict(self, bucket: Bucket, ends: Sequence[StepEnd]) -> list[jax.Array]:
        (end,) = ends
        given = end.batch, end.table, end.sampled, end.lengths, end.drafts, *end.stream
        drafts, *state = self._ends[bucket].predict(*given, *self._state, *self._weights.modules)
        self._keep(state)
        return [drafts]
