"""A step of all layers and lanes as one program of both roles (`pipeline: step` in one process).

The mesh has the devices of both roles: its first axis, `role`, separates them. What a device does
is a branch by its role. Between the branches every device exchanges an array with the paired device
of the other role, so all devices run the same exchanges in the same order.

In every turn a lane passes a layer. With several lanes the ffn role serves the message of the turn
before, so both roles compute at once. With three lanes and more both exchanges of a turn run beside
a computation. The message, sent after attention's branch of the turn before, arrives before the ffn
role's branch. The answer, sent after the ffn role's branch of the turn before, arrives after it.
Two lanes need the answer of the turn before at once. A lane alone waits for its answer in every
turn.

Arrays of a program have the same shape on all of its devices. Each device therefore has memory for
the weights and pages of both roles; on TPUs pages and experts share it (`both_roles.py`).
Embedding, head and sampler are programs of the attention mesh.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.message import PackedRows
from jaxserve.mesh import (
    ATTENTION_RULES,
    FFN_AXES,
    FFN_RULES,
    ROLE,
    Submeshes,
    cached_sharding,
    zeros_of,
)
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.exchange import ended, make_exchanges
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.attention_programs import AttentionPrograms, add_modules
from jaxserve.roles.both_roles import Halves, PooledWeights, Run, SharedPools, both_roles_mesh
from jaxserve.roles.compilation import PIECES, ROWS, Arrays, Get, Program
from jaxserve.roles.expert_programs import ExpertPrograms, add_load, bank_arrays, stacked_banks
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.lane_steps import StepPipeline, all_runs, options, runs_of
from jaxserve.roles.layout import Bucket
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.sampling import TokenLanes
from jaxserve.roles.token_programs import StepContext
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.whole_steps import LayerAt, StackedLeaves, through_layers, with_own_pages
from jaxserve.roles.worker import Observer


class BothRolesPrograms(AttentionPrograms):
    """Programs of the attention mesh for both ends of a step, and on the mesh of both roles for the
    layers between.

    Attributes:
      union: the mesh of both roles.
      ranks, tensor: its axes that divide the experts, and the one that divides every expert's d_ff.
      rules: sharding rules of ffn blocks on it.
      pages: `all_pages` on it. The ffn role's half holds nothing but experts.
      runs: runs of equal layers, those of prediction modules last.
      banks, experts: see `ColocatedPrograms`.
    """

    templates: ModelTemplates
    shared: SharedPools | None = None

    def __init__(self, templates: ModelTemplates, deployment: Deployment, meshes: Submeshes):
        super().__init__(templates, deployment, meshes.attention)
        self.union, everywhere = both_roles_mesh(deployment, meshes)
        *ranks, self.tensor = everywhere
        self.ranks = tuple(ranks)
        own: dict[Any, str | tuple[str, ...]]
        own = {"ep": self.ranks, "tp": self.tensor, FFN_AXES: everywhere}
        self.rules = {name: own[axes] for name, axes in FFN_RULES.items()}
        axes, combine = Axes(self.ranks, self.tensor, rows=everywhere), self.contract.combine
        self.exchanges = make_exchanges(templates.exchange, axes, self.dtype, combine=combine)
        self.runs: Sequence[Run] = [Run(*run) for run in all_runs(self.config)]
        if self.config.platform == "tpu":
            self.shared = pools = SharedPools(deployment, templates, meshes)
            self.runs = pools.runs
        self.pages = [self._on_both(array) for array in self.all_pages]
        self.banks = stacked_banks(self.runs, templates.slots)
        self.experts: ExpertPrograms | None = None
        if templates.moe:
            given = templates, deployment.experts, self.union, self.rules, self.ranks
            self.experts = ExpertPrograms(*given, stacked=True, pools=self.shared)

    @property
    def all_pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See `TokenPrograms`; pools in place of the arrays that lie in them."""
        pages, shared = super().all_pages, self.shared
        if shared is None:
            return pages
        pool = self.shape(*shared.over(self.mesh.size), spec=PIECES)
        return *[pool for _ in shared.arrays], *pages[len(shared.arrays) :]

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Sharding of an array whose first half lies on the attention mesh as this spec says."""
        first, *rest = spec
        rows = [ROLE, "ep", "ffn_tp", *(["tp"] if first == PIECES[0] else [])]
        return cached_sharding(self.union, PartitionSpec(tuple(rows), *rest))

    def embedded(self, bucket: Bucket) -> Program:
        """(last_tokens, batch, embedding) → (x, batch), on the attention mesh; in the batch every
        `FROM_DEVICE` among the tokens is replaced."""

        def body(last: Array, batch: Array, embedding: Arrays) -> Arrays:
            no_pages = jnp.zeros((1, self.slots, self.tables), jnp.int32)
            context = self.step_context(bucket, batch, no_pages, last)
            known = batch.at[0, : bucket.tokens].set(context.fields["token_ids"])
            return self.embed(context, embedding), known

        inputs = *self.step_shapes(bucket)[:2], *self.leaves(self.templates.embedding)
        return Program("embedded", body, self.mesh, inputs, (ROWS, ROWS))

    def step(self, bucket: Bucket, lanes: int, module: int = 0) -> Program:
        """((x, batch, page_table) of each lane, pages, counts, tables, runs) → (x of each lane,
        pages…, counts…).

        The results x are the residual streams after the last layer. Arrays of lanes are those of
        the attention mesh; the other half is anything.

        Args:
          module: the prediction module, from 1, whose layer alone runs; 0: the model's own layers.
        """
        runs, templates = self.runs, self.templates
        chosen = runs_of(self.config, runs, module)

        def body(
            steps: Sequence[Arrays], pages: Pages, counts: Arrays, tables: Arrays, leaves: Any
        ) -> Arrays:
            contexts = [self.step_context(bucket, batch, table) for _, batch, table in steps]
            step = _Step(self, contexts, leaves, tables)
            turn = step.begin([x for x, *_ in steps], pages)
            sizes = {run: runs[run].stop - runs[run].start for run in chosen}
            turn = step.end(*through_layers(sizes, turn, step.layer, apart=lanes > 1))
            made = map(self._add_combined, turn.x, turn.answers)
            return *made, *turn.pages, *map(add_load, counts, turn.loads)

        of_lane = *self.stream_shapes(bucket), *self.step_shapes(bucket)[1:]
        counts, tables = bank_arrays(self.union, self.banks, self.ranks)
        leaves = [
            (
                templates.attention[kind].arrays(self.union, ATTENTION_RULES, stop - start),
                self._beside_pools(kind, stop - start),
            )
            for kind, start, stop, *_ in runs
        ]
        steps, pages = [(*map(self._on_both, of_lane),)] * lanes, tuple(self.pages)
        inputs = steps, pages, counts, tables, leaves
        name = f"{'pass' if module else 'step'}_{lanes}"
        specs = *[self.sharding(ROWS).spec] * lanes, *[a.sharding.spec for a in pages + counts]
        return Program(name, body, self.union, inputs, specs, donates=(1, 2))

    def layer(
        self, kind: LayerKind, stream: Arrays, pages: Pages, batch: RaggedBatch, leaves: list[Any]
    ) -> Arrays:
        """Runs attention's part of a layer inside a program; see `attend`."""
        shared = self.shared if self.pool(kind) is self.pools[0] else None
        held: Any = pages if shared is None else shared.in_arrays(pages)
        made: Any = self._attend(kind, self._add_combined(*stream), held, batch, leaves)
        return tuple(made) if shared is None else shared.in_pools(made)

    def _beside_pools(self, kind: LayerKind, layers: int) -> Sequence[Any]:
        """Returns the stacked leaves of ffn blocks; None for those that are in pools."""
        leaves = self.templates.ffn[kind.ffn].arrays(self.union, self.rules, layers)
        held = self.shared.matrices if self.shared and kind.ffn.router else {}
        return [None if place in held else leaf for place, leaf in enumerate(leaves)]

    def _on_both(self, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, both = (2 * array.shape[0], *array.shape[1:]), self.sharding(array.sharding.spec)
        return array.update(shape=shape, sharding=both)


class _Turn(NamedTuple):
    """The arrays that one turn hands to the next."""

    x: list[Array]
    """Residual stream of each lane."""
    answers: list[Array]
    """Last answer to each lane's message; anything on devices of the ffn role."""
    waiting: Array
    """Message of the turn before, which is to be sent."""
    ahead: Array
    """Answer of the turn before, which is to be sent."""
    pages: Pages
    loads: list[Array]
    """Rows that experts got, int32 [layers, experts], of every run with routed experts."""


class _Step:
    """The turns of one step."""

    def __init__(
        self, programs: BothRolesPrograms, contexts: Sequence[StepContext], leaves: Any, tables: Any
    ):
        self.programs, self.contexts = programs, contexts
        self.runs, self.lanes = programs.runs, len(contexts)
        self.attends = jax.lax.axis_index(ROLE) == 0
        templates, stacks = programs.templates, StackedLeaves.of
        self.stacks = [
            (stacks(templates.attention[kind], own), stacks(templates.ffn[kind.ffn], others))
            for (kind, *_), (own, others) in zip(self.runs, leaves, strict=True)
        ]
        with_experts = [run for run, (kind, *_) in enumerate(self.runs) if kind.ffn.router]
        self.banks, self.tables = {run: bank for bank, run in enumerate(with_experts)}, tables

    def begin(self, x: list[Array], pages: Pages) -> _Turn:
        """Returns the state before the first turn."""
        answers, forms = self.programs.answers, self.programs.formats.values()
        rows, experts = x[0].shape[0] // jax.lax.axis_size("tp"), self.programs.config.experts
        widest = max(forms, key=lambda form: form.width)
        no_answer = jnp.zeros((rows, answers.width), answers.dtype)
        message = jnp.zeros((rows, widest.width), widest.word)
        layers = (run.stop - run.start for run in self.runs if run.kind.ffn.router)
        loads = [jnp.zeros((count, experts), jnp.int32) for count in layers]
        return _Turn(x, [no_answer] * self.lanes, message, no_answer, pages, loads)

    def layer(self, turn: _Turn, at: LayerAt, before: LayerAt | None) -> _Turn:
        """Runs one layer of all lanes.

        Args:
          before: the layer before; None: this is the first one.
        """
        for lane in range(self.lanes):
            if self.lanes == 1:
                turn = self.attend(turn, lane, at)
                turn = self.serve(turn, at, _exchanged(turn.waiting))
                turn = turn._replace(answers=[_exchanged(turn.ahead)])
            else:
                back, arrived = _exchanged(turn.ahead), _exchanged(turn.waiting)
                if self.lanes == 2:
                    turn = _answered(turn, lane, back)
                turn = self.attend(turn, lane, at)
                if self.lanes > 2:
                    turn = _answered(turn, lane - 2, back)
                served = at if lane else before
                turn = turn if served is None else self.serve(turn, served, arrived)
            turn = jax.lax.optimization_barrier(turn)
        return turn

    def end(self, turn: _Turn, last: LayerAt) -> _Turn:
        """Serves the last message and brings the last answers."""
        if self.lanes == 1:
            return turn
        back, arrived = _exchanged(turn.ahead), _exchanged(turn.waiting)
        turn = self.serve(_answered(turn, self.lanes - 2, back), last, arrived)
        return _answered(turn, self.lanes - 1, _exchanged(turn.ahead))

    def attend(self, turn: _Turn, lane: int, at: LayerAt) -> _Turn:
        """Runs a layer of a lane on the devices of the attention role."""
        programs, (kind, start, *_) = self.programs, self.runs[at.run]
        batch, place = self.contexts[lane].batch, jnp.asarray(at.layer, jnp.int32)
        where, shifted = with_own_pages(programs, kind, start, place, batch)
        width = turn.waiting.shape[1]

        def run(x: Array, answer: Array, pages: Pages) -> Any:
            leaves = self.stacks[at.run][0].at(place)
            x, packed, *own = programs.layer(kind, (x, answer), pages, shifted, leaves)
            return x, jnp.pad(packed, ((0, 0), (0, width - packed.shape[1]))), tuple(own)

        def keep(x: Array, answer: Array, pages: Pages) -> Any:
            return x, jnp.zeros_like(turn.waiting), pages

        own = turn.x[lane], turn.answers[lane], tuple(turn.pages[where])
        x, message, pages = jax.lax.cond(self.attends, run, keep, *own)
        streams, pages = [*turn.x], (*turn.pages[: where.start], *pages, *turn.pages[where.stop :])
        streams[lane] = x
        return turn._replace(x=streams, waiting=message, pages=pages)

    def serve(self, turn: _Turn, at: LayerAt, arrived: Array) -> _Turn:
        """Runs a layer's FFN for a message on the devices of the ffn role."""
        programs, kind, bank = self.programs, self.runs[at.run][0].ffn, self.banks.get(at.run)
        form, (_, stack) = programs.formats[kind.kind], self.stacks[at.run]
        place = jnp.asarray(at.layer, jnp.int32)
        none = jnp.zeros(programs.config.experts, jnp.int32)
        if programs.shared is not None and bank is not None:
            _, start, stop, pool, first = self.runs[at.run]
            matrices = programs.shared.in_matrices(turn.pages[pool], first, stop - start)
            stack = stack._replace(whole={**stack.whole, **matrices})

        def run(packed: Array) -> Any:
            block = programs.templates.ffn[kind].merge(stack.at(place))
            if block.experts is not None:
                block.experts.tensor = programs.tensor
            packing = PackedRows(form, programs.dtype)
            table = None if bank is None else self.tables[bank][place]
            exchange = programs.exchanges[kind.kind]
            own = packed[:, : form.width]
            rows, load = ended(exchange.stages(own, block, packing, table, place))
            return programs.answers.pack(rows), none if load is None else load

        def nothing(packed: Array) -> Any:
            return jnp.zeros_like(turn.ahead), none

        sent, load = jax.lax.cond(self.attends, nothing, run, arrived)
        loads = [*turn.loads]
        if bank is not None:
            loads[bank] = loads[bank].at[place].add(load)
        return turn._replace(ahead=sent, loads=loads)


def _exchanged(array: Array) -> Array:
    """Sends an array to the paired device of the other role, and returns that device's."""
    return jax.lax.ppermute(array, ROLE, [(0, 1), (1, 0)])


def _answered(turn: _Turn, lane: int, answer: Array) -> _Turn:
    answers = [*turn.answers]
    answers[lane] = answer
    return turn._replace(answers=answers)


def ends(programs: BothRolesPrograms, buckets: Sequence[Bucket], get: Get) -> Any:
    """Collects the programs of the attention mesh before and after the layers of each bucket's
    steps: `embedded`, `leave`, and `lane_steps.options`."""
    makes = BothRolesPrograms.embedded, BothRolesPrograms.leave
    return {
        bucket: (*(get(make, bucket.of_tokens) for make in makes), *others)
        for bucket, others in options(programs, buckets, get).items()
    }


class BothRolesPipeline(StepPipeline):
    """Runs the steps of all lanes of both roles."""

    _programs: BothRolesPrograms
    _pooled: PooledWeights | None = None

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None = None):
        config, names, meshes, templates, source = model
        if (count := jax.process_count()) > 1 and not deployment.shares_processes(count):
            raise ConfigError(f"pipeline = step: each of {count} processes needs both roles")
        self._programs = programs = BothRolesPrograms(templates, deployment, meshes)
        self._pages: list[jax.Array] = []
        with load_progress(source, 2 + 2 * config.all_layers):
            of_ends = RoleWeights(source, programs.mesh)
            self._embedding, self._head = of_ends.add_ends(templates, names, ATTENTION_RULES)
            modules = add_modules(of_ends, templates, names)
            weights = RoleWeights(source, union := programs.union)
            if (shared := programs.shared) is not None:
                self._pooled = weights = PooledWeights(shared, model, union, self._pages)
            for run in programs.runs:
                kind, first, stop, *_ = run
                attention, ffn = names.attention[first:stop], names.ffn[first:stop]
                block = templates.attention[kind]
                weights.add("attention", block, attention, ATTENTION_RULES, first)
                if self._pooled is not None and kind.ffn.router:
                    self._pooled.add_experts(run, programs.rules)
                else:
                    weights.add("ffn", templates.ffn[kind.ffn], ffn, programs.rules, first)
        weights.held += of_ends.held
        self._compile(programs, ends, self._embedding, self._head, modules)
        self._halves = Halves(programs.mesh, programs.union, programs.sharding(ROWS))
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(deployment.lanes, weights, slots, observer)

    def renew(self) -> bool:
        """See `WholeSteps`. In pools a lost step has destroyed the experts as well: they are
        loaded again, where the latest moves have put them."""
        if self._pooled is not None:
            placements = {} if self.slots is None else self.slots.placements
            self._pooled.renew(self._programs.rules, placements)
        return super().renew()

    def _clear(self) -> None:
        super()._clear()
        programs, pools = self._programs, [] if self._pooled is None else self._pooled.halves
        self._pages.clear()  # the old ones are free before there are new ones
        self._pages += map(self._halves.with_empty, pools, programs.pages)
        self._pages += zeros_of(programs.pages[len(pools) :])
        pools.clear()
        self._tokens = TokenLanes(programs, self._head)

    def _own_pages(self) -> list[jax.Array]:
        # A program that a half is donated to takes the whole arrays along.
        self._apart = [self._halves.apart(array) for array in self._pages]
        specs = (array.sharding.spec for array in self._programs.all_pages)
        return [*map(self._halves.taken, self._pages, specs)]

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        kinds = zip(pages, self._apart, self._programs.pages, strict=True)
        self._pages[:] = [self._halves.joined(*each) for each in kinds]

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        embedded, leave, *_ = self._ends[bucket]
        begun = [(*embedded(last, batch, *self._embedding), table) for last, batch, table in steps]
        streams = self._layers(bucket, 0, begun)
        lanes = zip(streams, steps, strict=True)
        return [(tuple(leave(*x, *step[:2], *self._head)), x) for x, step in lanes]

    def _layers(self, bucket: Bucket, module: int, steps: Sequence[Arrays]) -> list[Arrays]:
        step, leaves = self.executables[bucket, len(steps), module], sum(self._weights.blocks, ())
        made = step(*map(self._halves.spread, itertools.chain(*steps)), *self._state, *leaves)
        self._keep(made[len(steps) :])
        return [(self._halves.taken(x, ROWS),) for x in made[: len(steps)]]
