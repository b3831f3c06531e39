"""The colocated worker: a whole step is one program on one mesh (design, decision 2)."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh

from jaxserve.checkpoint.manifest import blocks_of
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.mesh import ATTENTION_RULES, COLOCATED_FFN_RULES
from jaxserve.model.module import Template
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.compilation import Get, ProgramKey, compile_steps
from jaxserve.roles.drafting import Drafting, DraftingExecutables, StepEnd, drafting_executables
from jaxserve.roles.expert_slots import ExpertReader, ExpertSlots, slot_programs
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.sampling import Finished, Sampling, SamplingExecutables, sampling_executables
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import GroupPut, KVArrays
from jaxserve.roles.weights import HeldBlock, LeafSource, Leaves, load_leaves, load_progress, zeroed
from jaxserve.roles.worker import Observer


class ColocatedWeights:
    """Weights of a colocated worker: embedding, head, and for each run of equal layers the stacked
    leaves of both roles.

    Attributes:
      flat: all leaves but those of the head and the prediction modules, in one tuple.
      modules: leaves of the prediction modules: those beside their layers, then both roles' leaves
        of their layers; empty without modules.
    """

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: ColocatedPrograms):
        templates, mesh = programs.templates, programs.mesh
        flat = load_leaves(source, templates.embedding, names.embedding, mesh, ATTENTION_RULES)
        self.head = load_leaves(source, templates.head, names.head, mesh, ATTENTION_RULES)
        self._sources = {block.name: block.sources for block in blocks_of(names)}
        self.held: list[HeldBlock] = []
        """Blocks of the checkpoint that this process holds."""
        self._note("embedding", templates.embedding, functools.partial(tuple, flat))
        self._note("head", templates.head, functools.partial(tuple, self.head))
        flat += self.head
        self._banks: list[slice] = []
        for kind, start, stop in programs.stacked():
            for part, template, tables, rules in (
                ("attention", templates.attention[kind], names.attention, ATTENTION_RULES),
                ("ffn", templates.ffn[kind.ffn], names.ffn, COLOCATED_FFN_RULES),
            ):
                place = slice(len(flat), len(flat) + len(template.leaves))
                flat += load_leaves(source, template, tables[start:stop], mesh, rules)
                leaves = functools.partial(self._leaves, "flat", place)
                for layer in range(start, stop):
                    self._note(f"layers.{layer}.{part}", template, leaves, layer, layer - start)
            if kind.ffn.router:
                self._banks.append(slice(len(flat) - len(template.leaves), len(flat)))
        self.flat: Leaves = flat
        self.modules: Leaves = ()
        if names.predictions:
            kind, first = programs.config.layer(programs.config.layers), programs.config.layers
            for part, template, tables, rules in (
                ("prediction", templates.prediction, names.predictions, ATTENTION_RULES),
                ("attention", templates.attention[kind], names.attention[first:], ATTENTION_RULES),
                ("ffn", templates.ffn[kind.ffn], names.ffn[first:], COLOCATED_FFN_RULES),
            ):
                self._own_experts = slice(len(self.modules), None)
                place = slice(len(self.modules), len(self.modules) + len(template.leaves))
                self.modules += load_leaves(source, template, tables, mesh, rules)
                leaves = functools.partial(self._leaves, "modules", place)
                for index in range(len(tables)):
                    name = f"layers.{first + index}.{part}"
                    self._note(name, template, leaves, first + index, index)

    def _note(
        self,
        name: str,
        template: Template,
        leaves: Callable[[], Leaves],
        layer: int = -1,
        entry: int | None = None,
    ) -> None:
        self.held.append(HeldBlock(name, self._sources[name], template, leaves, layer, entry))

    def _leaves(self, which: Literal["flat", "modules"], place: slice) -> Leaves:
        leaves: Leaves = getattr(self, which)
        return leaves[place]

    def bank(self, number: int) -> Leaves:
        """The stacked leaves of a bank's ffn blocks."""
        if number == len(self._banks):
            return self.modules[self._own_experts]
        return self.flat[self._banks[number]]

    def replace_bank(self, number: int, leaves: Leaves) -> None:
        """Replaces all leaves of a bank's layer or layers."""
        if number == len(self._banks):
            self.modules = *self.modules[: self._own_experts.start], *leaves
            return
        place = self._banks[number]
        self.flat = *self.flat[: place.start], *leaves, *self.flat[place.stop :]


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
        predict = None
        if programs.config.modules and bucket.drafts:
            predict = get(ProgramKey("predict", None, bucket), programs.predict, bucket)
        return ColocatedExecutables(
            get(ProgramKey("step", None, bucket), programs.step, bucket),
            sampling_executables(programs, bucket, get),
            drafting_executables(programs, bucket, get),
            predict,
        )

    return {bucket: step(bucket) for bucket in buckets}


def build_colocated(
    templates: ModelTemplates,
    deployment: Deployment,
    mesh: Mesh,
    source: LeafSource,
    names: CheckpointNames,
) -> tuple[
    ColocatedPrograms, dict[Bucket, ColocatedExecutables], ColocatedWeights, ExpertSlots | None
]:
    """Loads weights and compiles programs: the arguments of `ColocatedWorker`."""
    programs = ColocatedPrograms(templates, deployment, mesh)
    buckets = deployment_buckets(deployment)
    with load_progress(source, 2 + 2 * templates.config.all_layers) as counted:
        weights = ColocatedWeights(counted, names, programs)
    moving = slot_programs(programs.experts, programs.banks)
    executables, compiled = compile_steps(colocated_executables, programs, buckets, others=moving)
    slots = None
    if programs.experts is not None:
        reader = ExpertReader(programs.experts, deployment.experts, names, source)
        slots = ExpertSlots(programs.experts, programs.banks, weights, compiled, reader)
    return programs, executables, weights, slots


class ColocatedWorker:
    """Runs whole steps on one mesh; `advance` finishes the step that waited longest.

    Args:
      slots: slots of the routed experts; None without routed experts.
    """

    def __init__(
        self,
        programs: ColocatedPrograms,
        executables: dict[Bucket, ColocatedExecutables],
        weights: ColocatedWeights,
        slots: ExpertSlots | None,
    ):
        self.slots = slots
        self._programs = programs
        self._executables = executables
        self._weights = weights
        self.observer: Observer | None = None
        self._at: tuple[str, int, int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        programs = self._programs
        lanes, drafts = programs.deployment.lanes, programs.deployment.drafts
        self._pages: list[jax.Array] = []  # the old ones are free before there are new ones
        self._put = GroupPut(programs)
        self._last_tokens = [self._put.last_tokens() for _ in range(lanes)]
        self._pages = list(zeroed(programs.all_pages, programs.mesh))
        self._sampling = Sampling(programs, self._weights.head, self._put.rows)
        self._drafting = Drafting(programs, self._put.rows) if drafts else None
        self._begun: list[tuple[StepPlan, jax.Array, jax.Array]] = []

    def renew(self) -> bool:
        """Forgets pages, sequences and steps after a lost step. Returns True: it always can."""
        if self.slots is not None:
            self.slots.renew()
        self._clear()
        return True

    attends = True
    """True: this process has devices of an attention mesh."""

    def kv_arrays(self, domain: int = 0) -> KVArrays:
        """This worker's pages, for hand-offs."""
        return KVArrays(self._programs, True, lambda: self._pages, self._set_pages)

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        self._pages = list(pages)

    @property
    def active(self) -> bool:
        """True while a step waits to be enqueued."""
        return bool(self._begun)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = {plan.lane for plan, _, _ in self._begun}
        return [lane for lane in range(len(self._last_tokens)) if lane not in busy]

    def position(self) -> tuple[str, int, int, int] | None:
        """Lane and number of the step enqueued last. May be called from any thread."""
        return self._at

    def begin(self, plan: StepPlan) -> None:
        """Accepts a step plan, which `advance` will enqueue."""
        self._begun.append((plan, *self._put(plan)))

    def advance(self) -> Finished:
        """Enqueues one whole step."""
        begun = time.time_ns()
        plan, batch, table = self._begun.pop(0)
        self._at = ("step", plan.lane, 0, plan.number)
        step, sampling, drafting, predict = self._executables[plan.bucket]
        before, slots = self._last_tokens[plan.lane], self.slots
        if self._drafting is not None and drafting is not None:
            batch = self._drafting.resolve(drafting, plan, batch, before)
        banks = self._programs.stacked_banks
        experts = [] if slots is None else [*slots.counts[:banks], *slots.tables[:banks]]
        last, sampled, logits, x, *state = step(
            before, batch, table, *self._pages, *experts, *self._weights.flat
        )
        pages = len(self._pages)
        self._pages = state[:pages]
        own = [state.pop()] if plan.bucket.drafts else []
        if slots is not None:
            slots.counts[:banks] = state[pages:]
        left = last, sampled, logits, *own
        last, finished, lengths = self._sampling.finish(plan, sampling, batch, before, left, (x,))
        self._last_tokens[plan.lane] = last
        if self._drafting is not None and drafting is not None and plan.proposes:
            end = self._drafting.end(finished, batch, table, (x,), last, lengths)
            if predict is not None:
                finished = self._drafting.keep(finished, self._predict(predict, end))
            elif not self._programs.config.modules:
                finished = self._drafting.keep(finished, self._drafting.look_up(drafting, end))
        if self.observer is not None:
            made = finished.last
            self.observer.observe("step", plan.lane, 0, plan.number, made, plan.load, begun)
        return finished

    def held(self) -> list[HeldBlock]:
        """Returns the blocks of the checkpoint that this process holds."""
        return self._weights.held

    def _predict(self, predict: jax.stages.Compiled, end: StepEnd) -> jax.Array:
        """Enqueues the passes of the prediction modules; returns their drafts."""
        slots, weights, templates = self.slots, self._weights, self._programs.templates
        first = self._programs.stacked_banks
        banks = [] if slots is None else [*slots.counts[first:], *slots.tables[first:]]
        shared = len(templates.embedding.leaves) + len(templates.head.leaves)
        drafts, *state = predict(
            end.batch,
            end.table,
            end.sampled,
            end.lengths,
            end.drafts,
            *end.stream,
            *self._pages,
            *banks,
            *weights.flat[:shared],
            *weights.modules,
        )
        pages = len(self._pages)
        self._pages = state[:pages]
        if slots is not None:
            slots.counts[first:] = state[pages:]
        return drafts
