"""The colocated worker: a whole step is one program on one mesh, which scans over stacked layers.
Other layouts yield its tokens."""

import itertools
from collections.abc import Generator, Sequence
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
from jaxserve.model.ffn.exchange import ended, make_exchanges
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
from jaxserve.roles.whole_steps import (
    LayerAt,
    StackedLeaves,
    WholeSteps,
    through_layers,
    with_own_pages,
)
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

    def step(self, bucket: Bucket, lanes: int = 1) -> Program:
        """((last_tokens, batch, page_table) of each lane, pages, counts, tables, embedding, head,
        runs) → ((last_tokens, sampled, logits, lengths, x) of each lane, pages…, counts…).

        Counts and tables are those of all banks of experts. x is the residual stream after the last
        layer. A pool's pages are those of all its layers, layer after layer: `[dp * layers * pages,
        …]`. Steps without drafts have no lengths (`TokenPrograms.draw`).
        """
        templates, runs = self.templates, self.config.runs()
        sizes = {run: stop - start for run, (_, start, stop) in enumerate(runs)}

        def body(
            steps: Sequence[Arrays], pages: Pages, counts: Arrays, tables: Arrays, *rest: Any
        ) -> Arrays:
            (embedding, head), leaves = rest
            contexts = [
                self.step_context(bucket, batch, table, last) for last, batch, table in steps
            ]
            layers = _StackedStep(self, runs, [one.batch for one in contexts], leaves, tables)
            begun = [self.embed(context, embedding) for context in contexts]
            begin = _Between(begun, None, pages, self._no_loads(runs))
            flow = layers.end(*through_layers(sizes, begin, layers.layer, apart=lanes > 1))
            ended: list[Array] = []
            for x, (last, *_), context in zip(flow.x, steps, contexts, strict=True):
                ended += [*self.end_step(x, last, context.fields, head, bucket), x]
            counted = *map(add_load, counts, flow.loads), *counts[len(flow.loads) :]
            return *ended, *flow.pages, *counted

        counts, tables = bank_arrays(self.mesh, self.banks, _DIVIDED)
        of_lane = ROWS, REPLICATED, self.logits_spec, *([ROWS] if bucket.drafts else []), ROWS
        return Program(
            "step" if lanes == 1 else f"step_{lanes}",
            body,
            self.mesh,
            (
                [self.step_shapes(bucket)] * lanes,
                self.all_pages,
                counts,
                tables,
                self.leaves(templates.embedding, templates.head),
                [self._layers(kind, stop - start) for kind, start, stop in runs],
            ),
            (
                *of_lane * lanes,
                *self.pages_specs(*self.pools),
                *[_COUNTS] * len(counts),
            ),
            donates=(1, 2),
            cuda_graphs="branches",
            lanes=lanes,
        )

    def predict(self, bucket: Bucket) -> Program:
        """All passes of the prediction modules after a step of this bucket.

        (batch, page_table, sampled, lengths, drafts, x, pages, counts, tables, embedding, head,
        modules) → (drafts, pages…, counts…). The modules' bank is the last one, if they have
        experts.
        """
        layers, modules, tokens = self.config.layers, self.config.modules, bucket.tokens
        templates, kind = self.templates, self.config.layer(layers)
        longest = bucket.pages * self.deployment.cache.page_size

        def body(
            batch: Array, table: Array, sampled: Array, lengths: Array, drafts: Array, *rest: Any
        ) -> Arrays:
            (x,), pages, counts, tables, (embedding, head), stacks = rest
            prediction, runs = tuple(map(sliceable, stacks[0])), [(kind, layers, layers + modules)]
            samples = BatchLayout(tokens, self.slots).fields(batch[0])["sample"] > 0
            own = sampled[jax.lax.axis_index("dp")]
            start = first_pass(self, tokens, x, batch[0], own, lengths[0], head)
            found, loads = [], self._no_loads(runs)
            for number in range(bucket.drafts):
                index = min(number, modules - 1)
                module = [leaf[index] for leaf in prediction]
                x = enter_module(self, tokens, start, embedding, module)
                context = self.step_context(bucket, start.batch[None], table)
                module_layers = _StackedStep(self, runs, [context.batch], [stacks[1:]], tables[-1:])
                flow = module_layers.layer(_Between([x], None, pages, loads), LayerAt(0, index))
                (x,), _, pages, loads = flow
                ahead = min(number + 1, modules)
                hidden, draft = leave_module(self, tokens, x, start.batch, ahead, module, head)
                found.append(jnp.where(samples, draft, drafts[0, :, number]))
                again = number + 1 >= modules
                start = next_pass(
                    self, tokens, hidden, start.batch, draft, again=again, longest=longest
                )
            if loads:
                counts = *counts[:-1], add_load(counts[-1], loads[0])
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
        return (
            self.templates.attention[kind].arrays(self.mesh, ATTENTION_RULES, count),
            self.templates.ffn[kind.ffn].arrays(self.mesh, COLOCATED_FFN_RULES, count),
        )

    def _no_loads(self, runs: Sequence[tuple[LayerKind, int, int]]) -> list[Array]:
        """Zeros for the rows that experts get in each layer of the runs with routed experts."""
        sizes = [stop - start for kind, start, stop in runs if kind.ffn.router]
        return [jnp.zeros((size, self.config.experts), jnp.int32) for size in sizes]


class _Between(NamedTuple):
    """The arrays that one layer hands to the next."""

    x: Sequence[Array]
    """Residual stream of each lane; the second one's lacks its last FFN."""
    waiting: Array | None
    """The second lane's packed message; None before it has one."""
    pages: Pages
    loads: list[Array]
    """Rows that experts got, int32 [layers, experts], of every run with routed experts."""


class _StackedStep:
    """The layers of one step, of a lane or of two.

    With two lanes the rows of one travel, there and back, while the other computes, as in
    DeepSeek's decoding with two batches. The second lane is half a layer behind: its FFN runs
    beside messages of the first lane's next layer.

    Args:
      runs: kind, first and last layer but one of each run of equal layers.
      leaves: stacked leaves of attention and ffn of each run.
      tables: tables of experts of the runs that have routed ones.
    """

    def __init__(
        self,
        programs: ColocatedPrograms,
        runs: Sequence[tuple[LayerKind, int, int]],
        batches: Sequence[RaggedBatch],
        leaves: Sequence[Sequence[Arrays]],
        tables: Sequence[Array],
    ):
        self.programs, self.runs, self.batches, self.tables = programs, runs, batches, tables
        templates = programs.templates
        self.blocks = [(templates.attention[kind], templates.ffn[kind.ffn]) for kind, *_ in runs]
        self.stacks = [
            [*map(StackedLeaves.of, blocks, own)]
            for blocks, own in zip(self.blocks, leaves, strict=True)
        ]
        with_experts = [run for run, (kind, *_) in enumerate(runs) if kind.ffn.router]
        self.banks = {run: bank for bank, run in enumerate(with_experts)}

    def layer(self, flow: _Between, at: LayerAt, before: LayerAt | None = None) -> _Between:
        """Runs a layer of all lanes, but for the second one's FFN.

        Args:
          before: the layer before; None: this is the first one.
        """
        (x, *second), waiting, pages, loads = flow._replace(loads=[*flow.loads])
        if not second:
            x, packed, pages = self._attend(0, at, x, pages)
            return _Between([ended(self._ffn(at, packed, x, loads))], None, pages, loads)
        # In each of four parts one lane's rows travel while the other lane computes.
        (other,), both = second, jax.lax.optimization_barrier
        late = _added_already(other)
        if before is not None and waiting is not None:
            late = self._ffn(before, waiting, other, loads)
        arrived, (x, packed, pages) = both((next(late), self._attend(0, at, x, pages)))
        early = self._ffn(at, packed, x, loads)
        received, results = both((next(early), late.send(arrived)))
        other, results = both((ended(late, results), early.send(received)))
        attended = self._attend(1, at, other, pages)
        x, (other, packed, pages) = both((ended(early, results), attended))
        return _Between([x, other], packed, pages, loads)

    def end(self, flow: _Between, last: LayerAt) -> _Between:
        """Runs the FFN that the last layer has left."""
        if flow.waiting is None:
            return flow
        (x, other), loads = flow.x, [*flow.loads]
        return flow._replace(x=[x, ended(self._ffn(last, flow.waiting, other, loads))], loads=loads)

    def _attend(self, lane: int, at: LayerAt, x: Array, pages: Pages) -> tuple[Array, Array, Pages]:
        """Runs a lane's attention: its residual stream, its packed message, and the pages."""
        programs, (kind, start, _) = self.programs, self.runs[at.run]
        attention = self.blocks[at.run][0].merge(self.stacks[at.run][0].at(at.layer))
        where, shifted = with_own_pages(programs, kind, start, at.layer, self.batches[lane])
        batch = programs.of_kind(shifted, kind)
        x, message, own = attention(x, pages[where], batch, programs.sentinel)
        packed = programs.formats[kind.ffn.kind].pack(message)
        return x, packed, (*pages[: where.start], *own, *pages[where.stop :])

    def _ffn(
        self, at: LayerAt, packed: Array, x: Array, loads: list[Array]
    ) -> Generator[Any, Any, Array]:
        """Returns the residual stream after a layer's FFN, which yields as `Exchange.stages`, and
        adds to the loads."""
        programs, kind, bank = self.programs, self.runs[at.run][0].ffn, self.banks.get(at.run)
        ffn = self.blocks[at.run][1].merge(self.stacks[at.run][1].at(at.layer))
        packing = PackedRows(programs.formats[kind.kind], programs.dtype)
        table = None if bank is None else self.tables[bank][at.layer]
        exchange = programs.exchanges[kind.kind]
        rows, load = yield from exchange.stages(packed, ffn, packing, table, at.layer)
        if bank is not None and load is not None:
            loads[bank] = loads[bank].at[at.layer].add(load)
        # Rounded as a link would round them.
        output = programs.answers.total([programs.answers.pack(rows)], x.dtype)
        return added(programs.config, x, output)


def _added_already(x: Array) -> Generator[Any, Any, Array]:
    """Stands for an FFN before the first layer."""
    yield ()
    yield ()
    return x


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

    step: Sequence[jax.stages.Compiled]
    """Programs for one lane, two lanes, and so on; one, unless lanes run together."""
    sampling: SamplingExecutables | None
    drafting: DraftingExecutables | None = None
    predict: jax.stages.Compiled | None = None
    """Passes of the prediction modules; None without modules, or for steps without drafts."""


def colocated_executables(
    programs: ColocatedPrograms, buckets: Sequence[Bucket], get: Get
) -> dict[Bucket, ColocatedExecutables]:
    """Collects the programs of each bucket: the step itself, sampling and drafting."""
    deployment = programs.deployment
    together = min(2, deployment.lanes) if deployment.pipeline == "step" else 1

    def step(bucket: Bucket) -> ColocatedExecutables:
        predicts = programs.config.modules and bucket.drafts
        return ColocatedExecutables(
            [get(ColocatedPrograms.step, bucket, lanes) for lanes in range(1, together + 1)],
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
        self._most = 2 if deployment.pipeline == "step" else 1
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
        step, of_lane = self._ends[bucket].step[len(steps) - 1], 5 if bucket.drafts else 4
        made = step(*itertools.chain(*steps), *self._state, *self._weights.flat)
        self._keep(made[(end := of_lane * len(steps)) :])
        lanes = itertools.batched(made[:end], of_lane)
        return [(tuple(own), (x,)) for *own, x in lanes]

    def _predict(self, bucket: Bucket, ends: Sequence[StepEnd]) -> list[jax.Array]:
        found = []
        for end in ends:
            given = end.batch, end.table, end.sampled, end.lengths, end.drafts, *end.stream
            drafts, *state = self._ends[bucket].predict(
                *given, *self._state, *self._weights.modules
            )
            self._keep(state)
            found.append(drafts)
        return found
