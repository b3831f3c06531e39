"""The colocated worker: a whole step is one program on one mesh, which scans over stacked layers.
Other layouts yield its tokens."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import PackedRows, answer_format, message_formats
from jaxserve.mesh import ATTENTION_AXES, ATTENTION_RULES, COLOCATED_FFN_RULES, AnyMesh, zeros_of
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.exchange import make_exchanges
from jaxserve.model.module import Template
from jaxserve.model.residual import added
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.compilation import REPLICATED, ROWS, Arrays, Get, Program, StepCompiler
from jaxserve.roles.drafting import (
    DraftingExecutables,
    StepEnd,
    drafting_executables,
    enter_module,
    first_pass,
    leave_module,
    next_pass,
)
from jaxserve.roles.expert_programs import (
    Bank,
    ExpertPrograms,
    add_load,
    bank_arrays,
    stacked_banks,
)
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.layout import Bucket
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.sampling import SamplingExecutables, TokenLanes, sampling_executables
from jaxserve.roles.step_arrays import BatchLayout
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import TokenPrograms
from jaxserve.roles.weights import LeafSource, Leaves, RoleWeights, load_progress
from jaxserve.roles.whole_steps import StackedLeaves, WholeSteps, scanned, with_own_pages
from jaxserve.roles.worker import Observer
from pallas_kernels.quantize import sliceable

_DIVIDED = ATTENTION_AXES[:1]
_COUNTS = Bank.counts_spec(_DIVIDED)


class ColocatedPrograms(TokenPrograms):
    """The whole step in one program: the oracle of every AFD layout, and a product."""

    templates: ModelTemplates

    def __init__(self, templates: ModelTemplates, deployment: Deployment, mesh: AnyMesh):
        super().__init__(templates, deployment, mesh)
        contract = Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(contract), answer_format(contract)
        axes = Axes(*ATTENTION_AXES, rows=("dp",))
        self.exchanges = make_exchanges(
            templates.exchange, axes, self.dtype, combine=contract.combine
        )
        self.banks = stacked_banks(self.config.runs(), templates.slots)
        if self.config.modules and self.config.predictors[0].ffn.router:
            modules = range(self.config.layers, self.config.all_layers)
            self.banks += (Bank(tuple(modules), templates.slots),)
        self.experts: ExpertPrograms | None = None
        if templates.moe:
            rules = COLOCATED_FFN_RULES
            self.experts = ExpertPrograms(
                templates, deployment.experts, mesh, rules, _DIVIDED, stacked=True
            )

    def step(self, bucket: Bucket) -> Program:
        """(last_tokens, batch, page_table, pages, counts, tables, embedding, head, runs) →
        (last_tokens, sampled, logits, x, pages…, counts…).

        Counts and tables are those of all banks of experts. x is the residual stream after the last
        layer. A pool's pages are those of all its layers, layer after layer: `[dp * layers * pages,
        …]`. With drafts it returns the lengths last (`TokenPrograms.draw`).
        """
        templates = self.templates

        def body(
            last: Array, batch: Array, table: Array, pages: Pages, counts: Arrays, *rest: Any
        ) -> Arrays:
            tables, (embedding, head), runs = rest
            context = self.step_context(bucket, batch, table, last)
            carry: Any = self.embed(context, embedding), pages
            loads: list[Array] = []
            for (kind, start, stop), leaves in zip(self.config.runs(), runs, strict=True):
                of_layers = tables[len(loads)] if kind.ffn.router else None
                stacks = [*map(StackedLeaves.of, self._blocks(kind), leaves)]
                layer = functools.partial(self._layer, kind, start, context.batch, stacks)
                inputs = scanned(stop - start, stacks, of_layers)
                carry, load = jax.lax.scan(layer, carry, inputs)
                if load is not None:
                    loads.append(load)
            x, pages = carry
            last, sampled, logits, *lengths = self.end_step(x, last, context.fields, head, bucket)
            counted = *map(add_load, counts, loads), *counts[len(loads) :]
            return last, sampled, logits, x, *pages, *counted, *lengths

        counts, tables = bank_arrays(self.mesh, self.banks, _DIVIDED)
        return Program(
            "step",
            body,
            self.mesh,
            (
                *self.step_shapes(bucket),
                self.all_pages,
                counts,
                tables,
                self.leaves(templates.embedding, templates.head),
                [self._layers(kind, stop - start) for kind, start, stop in self.config.runs()],
            ),
            (
                *(ROWS, REPLICATED, self.logits_spec, ROWS),
                *self.pages_specs(*self.pools),
                *[_COUNTS] * len(counts),
                *([ROWS] if bucket.drafts else []),
            ),
            donates=(3, 4),
            cuda_graphs="branches",
        )

    def predict(self, bucket: Bucket) -> Program:
        """All passes of the prediction modules after a step of this bucket.

        (batch, page_table, sampled, lengths, drafts, x, pages, counts, tables, embedding, head,
        modules) → (drafts, pages…, counts…). The modules' bank is the last one, if they have
        experts.
        """
        templates, kind = self.templates, self.config.layer(self.config.layers)
        tokens, modules = bucket.tokens, self.config.modules
        longest = bucket.pages * self.deployment.cache.page_size

        def body(
            batch: Array, table: Array, sampled: Array, lengths: Array, drafts: Array, *rest: Any
        ) -> Arrays:
            (x,), pages, counts, tables, (embedding, head), stacks = rest
            prediction = tuple(map(sliceable, stacks[0]))
            blocks = [*map(StackedLeaves.of, self._blocks(kind), stacks[1:])]
            samples = BatchLayout(tokens, self.slots).fields(batch[0])["sample"] > 0
            own = sampled[jax.lax.axis_index("dp")]
            start = first_pass(self, tokens, x, batch[0], own, lengths[0], head)
            loads = jnp.zeros((modules, self.config.experts), jnp.int32)
            found = []
            for number in range(bucket.drafts):
                index = min(number, modules - 1)
                module = [leaf[index] for leaf in prediction]
                x = enter_module(self, tokens, start, embedding, module)
                context = self.step_context(bucket, start.batch[None], table)
                inputs = scanned(modules, blocks, tables[-1] if kind.ffn.router else None)
                own_inputs = jax.tree.map(lambda leaf, at=index: leaf[at], inputs)
                layer = functools.partial(
                    self._layer, kind, self.config.layers, context.batch, blocks
                )
                (x, pages), load = layer((x, pages), own_inputs)
                if load is not None:
                    loads = loads.at[index].add(load)
                ahead = min(number + 1, modules)
                hidden, draft = leave_module(self, tokens, x, start.batch, ahead, module, head)
                found.append(jnp.where(samples, draft, drafts[0, :, number]))
                again = number + 1 >= modules
                start = next_pass(
                    self, tokens, hidden, start.batch, draft, again=again, longest=longest
                )
            if kind.ffn.router:
                counts = *counts[:-1], add_load(counts[-1], loads)
            return jnp.stack(found, axis=1)[None], *pages, *counts

        counts, tables = bank_arrays(self.mesh, self.banks, _DIVIDED)
        state = self.groups, self.slots
        return Program(
            "predict",
            body,
            self.mesh,
            (
                *self.step_shapes(bucket)[1:],
                self.shape(*state, 1 + bucket.drafts, spec=REPLICATED),
                self.shape(*state),
                self.shape(*state, bucket.drafts),
                self.stream_shapes(bucket),
                self.all_pages,
                counts,
                tables,
                self.leaves(templates.embedding, templates.head),
                (
                    templates.prediction.arrays(self.mesh, ATTENTION_RULES, modules),
                    *self._layers(kind, modules),
                ),
            ),
            (ROWS, *self.pages_specs(*self.pools), *[_COUNTS] * len(counts)),
            donates=(6, 7),
        )

    def _layers(
        self, kind: LayerKind, count: int
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
        """Shapes of the stacked leaves of attention and ffn in layers of one kind."""
        attention, ffn = self._blocks(kind)
        return (
            attention.arrays(self.mesh, ATTENTION_RULES, count),
            ffn.arrays(self.mesh, COLOCATED_FFN_RULES, count),
        )

    def _blocks(self, kind: LayerKind) -> tuple[Template, Template]:
        """Templates of attention and ffn in layers of one kind."""
        return self.templates.attention[kind], self.templates.ffn[kind.ffn]

    def _layer(
        self,
        kind: LayerKind,
        start: int,
        batch: RaggedBatch,
        stacks: Sequence[StackedLeaves],
        carry: tuple[Array, Pages],
        inputs: Any,
    ) -> tuple[tuple[Array, Pages], Array | None]:
        """Runs one layer of a run that begins at layer `start`, on its `scanned` inputs."""
        (x, pages), (place, sliced, table) = carry, inputs
        attention, ffn = (
            block.merge(stack.of_layer(own, place))
            for block, stack, own in zip(self._blocks(kind), stacks, sliced, strict=True)
        )
        at, shifted = with_own_pages(self, kind, start, place, batch)
        x, message, own = attention(x, pages[at], self.of_kind(shifted, kind), self.sentinel)
        pages = *pages[: at.start], *own, *pages[at.stop :]
        formats = self.formats[kind.ffn.kind]
        packing, packed = PackedRows(formats, self.dtype), formats.pack(message)
        rows, load = self.exchanges[kind.ffn.kind](packed, ffn, packing, table, place)
        # Rounded as a link would round them.
        output = self.answers.total([self.answers.pack(rows)], x.dtype)
        return (added(self.config, x, output), pages), load


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


class ColocatedWorker(WholeSteps):
    """Runs whole steps on one mesh, one after another."""

    _weights: ColocatedWeights
    _programs: ColocatedPrograms

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None = None):
        config, names, meshes, templates, source = model
        self._programs = programs = ColocatedPrograms(templates, deployment, meshes.attention)
        with load_progress(source, 2 + 2 * config.all_layers):
            weights = ColocatedWeights(source, names, programs)
        self.compiler = StepCompiler(colocated_executables, programs, SamplingExecutables._fields)
        self._ends = self.compiler.executables
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(deployment.lanes, weights, slots, observer)

    def _clear(self) -> None:
        super()._clear()
        programs = self._programs
        self._pages = []  # the old ones are free before there are new ones
        self._pages = zeros_of(programs.all_pages)
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
