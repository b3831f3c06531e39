"""A step of all layers and lanes as one program of both roles, for devices that all run one program
(`pipeline: step` where a process has devices of both roles).

The mesh is the union of both roles': its first axis, `role`, has the attention devices and then the
ffn devices, its others are those of the attention mesh. What a device does is a branch by its role;
messages and answers are exchanged with the paired device of the other role by `ppermute`s between
the branches. All devices run the same exchanges, so no order has to be compared.

Every turn a lane passes a layer. The ffn role always serves the message of the turn before, so both
roles compute at once. With three lanes and more both exchanges of a turn run beside a computation:
that of the message, which began after attention's branch of the turn before, ends before the ffn
role's branch; that of the answer, which began after the ffn role's branch of the turn before, ends
after it. With two lanes the answer of the turn before last is needed at once. One lane alone waits
for its answer in every turn.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.packed_rows import PackedRows
from jaxserve.mesh import ATTENTION_AXES, RoleMeshes
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.residual import added
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.expert_programs import Bank, add_load, bank_arrays
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import REPLICATED, ROWS, Arrays, Program
from jaxserve.roles.stacked_layers import StackedLeaves, with_own_pages
from jaxserve.roles.token_programs import StepContext

ROLE = "role"
_DIVIDED = ATTENTION_AXES[:1]


def both_roles_mesh(deployment: Deployment, meshes: RoleMeshes) -> Mesh:
    """Returns the devices of both roles as one mesh.

    Raises:
      ConfigError: the roles' meshes have different shapes.
    """
    attention, ffn = deployment.attention, deployment.ffn
    if (attention.dp, attention.tp) != (ffn.ep, ffn.tp):
        raise ConfigError(
            f"pipeline = step: attention.dp = {attention.dp} and attention.tp = {attention.tp} "
            f"must be ffn.ep = {ffn.ep} and ffn.tp = {ffn.tp} where a process has both roles"
        )
    devices = np.array([meshes.attention.devices, meshes.ffn.devices])  # type: ignore[union-attr]
    return Mesh(devices, (ROLE, *ATTENTION_AXES))


class _Place(NamedTuple):
    """A layer: the number of its run, and its place in the run."""

    run: int
    layer: Array | int


class _Turn(NamedTuple):
    """What passes from turn to turn."""

    x: list[Array]
    """Residual stream of each lane."""
    answers: list[Array]
    """Last answer to each lane's message; on devices of the ffn role nothing of meaning."""
    waiting: Array
    """Message of the turn before, which is to be sent."""
    ahead: Array
    """Answer of the turn before, which is to be sent."""
    pages: Pages
    loads: list[Array]
    """Rows that experts got, int32 [layers, experts], of every run with routed experts."""


class BothRolesPrograms(ColocatedPrograms):
    """Programs of steps on the mesh of both roles."""

    def steps(self, bucket: Bucket, lanes: int) -> Program:
        """((last_tokens, batch, page_table) of each lane, pages, counts, tables, embedding, head,
        runs) → ((last_tokens, sampled, logits, x) of each lane, pages…, counts…); with drafts each
        lane's lengths precede x.
        """
        runs = self.config.runs()

        def body(
            steps: Sequence[Arrays], pages: Pages, counts: Arrays, tables: Arrays, *rest: Any
        ) -> Arrays:
            (embedding, head), leaves = rest
            contexts = [
                self.step_context(bucket, batch, table, last) for last, batch, table in steps
            ]
            step = _Step(self, contexts, leaves, tables)
            turn = step.begin([self.embed(context, embedding) for context in contexts], pages)
            before: _Place | None = None
            for run, (_, start, stop) in enumerate(runs):
                # The first layer of a run serves messages of the run before.
                turn, count = step.layer(turn, _Place(run, 0), before), stop - start

                def one(turn: _Turn, layer: Array, run: int = run) -> tuple[_Turn, None]:
                    return step.layer(turn, _Place(run, layer), _Place(run, layer - 1)), None

                if count > 1:
                    turn, _ = jax.lax.scan(one, turn, jnp.arange(1, count, dtype=jnp.int32))
                before = _Place(run, count - 1)
            turn, made = step.end(turn, before), list[Array]()
            for context, (last, *_), *stream in zip(
                contexts, steps, turn.x, turn.answers, strict=True
            ):
                final = self.add_answer(*stream)
                made += *self.end_step(final, last, context.fields, head, bucket), final
            loads = [jax.lax.psum(load, ROLE) for load in turn.loads]
            return *made, *turn.pages, *map(add_load, counts, loads)

        counts, tables = bank_arrays(self.mesh, self.banks[: self.stacked_banks], _DIVIDED)
        lengths = [ROWS] if bucket.drafts else []
        of_lane = ROWS, REPLICATED, self.logits_spec, *lengths, ROWS
        return Program(
            f"step_{lanes}",
            body,
            self.mesh,
            (
                [self.step_shapes(bucket)] * lanes,
                self.all_pages,
                counts,
                tables,
                self.leaves(self.templates.embedding, self.templates.head),
                [self._layers(kind, stop - start) for kind, start, stop in runs],
            ),
            (
                *of_lane * lanes,
                *self.pages_specs(*self.pools),
                *[Bank.counts_spec(_DIVIDED)] * len(counts),
            ),
            donates=(1, 2),
            cuda_graphs="branches",
        )

    def add_answer(self, x: Array, answer: Array) -> Array:
        """Adds an answer of the ffn role to the residual stream."""
        return added(self.config, x, self.answers.total([answer], x.dtype))


class _Step:
    """The turns of one step."""

    def __init__(
        self,
        programs: BothRolesPrograms,
        contexts: Sequence[StepContext],
        leaves: Sequence[tuple[Arrays, Arrays]],
        tables: Arrays,
    ):
        self.programs, self.contexts = programs, contexts
        self.runs, self.lanes = programs.config.runs(), len(contexts)
        self.attends = jax.lax.axis_index(ROLE) == 0
        templates = programs.templates
        self.attention, self.ffn = (
            [StackedLeaves.of(block, own) for block, own in zip(blocks, stacks, strict=True)]
            for blocks, stacks in zip(
                (
                    [templates.attention[kind] for kind, *_ in self.runs],
                    [templates.ffn[kind.ffn] for kind, *_ in self.runs],
                ),
                zip(*leaves, strict=True),
                strict=True,
            )
        )
        with_experts = [run for run, (kind, *_) in enumerate(self.runs) if kind.ffn.router]
        self.banks, self.tables = {run: bank for bank, run in enumerate(with_experts)}, tables

    def begin(self, x: list[Array], pages: Pages) -> _Turn:
        """Returns the state before the first turn."""
        answers, rows = self.programs.answers, x[0].shape[0]
        widest = max(self.programs.formats.values(), key=lambda form: form.width)
        no_answer = jnp.zeros((rows, answers.width), answers.dtype)
        experts = self.programs.config.experts
        loads = [
            jnp.zeros((stop - start, experts), jnp.int32)
            for kind, start, stop in self.runs
            if kind.ffn.router
        ]
        message = jnp.zeros((rows, widest.width), widest.word)
        return _Turn(x, [no_answer] * self.lanes, message, no_answer, pages, loads)

    def layer(self, turn: _Turn, at: _Place, before: _Place | None) -> _Turn:
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

    def end(self, turn: _Turn, last: _Place | None) -> _Turn:
        """Serves the last message and brings the last answers."""
        if self.lanes == 1 or last is None:
            return turn
        back, arrived = _exchanged(turn.ahead), _exchanged(turn.waiting)
        turn = self.serve(_answered(turn, self.lanes - 2, back), last, arrived)
        return _answered(turn, self.lanes - 1, _exchanged(turn.ahead))

    def attend(self, turn: _Turn, lane: int, at: _Place) -> _Turn:
        """Runs a layer of a lane on the devices of the attention role."""
        programs, (kind, start, _) = self.programs, self.runs[at.run]
        stack, batch = self.attention[at.run], self.contexts[lane].batch
        where, shifted = with_own_pages(programs, kind, start, jnp.asarray(at.layer), batch)
        width = turn.waiting.shape[1]

        def run(x: Array, answer: Array, pages: Pages) -> Any:
            block = programs.templates.attention[kind].merge(_of_layer(stack, at.layer))
            x, message, own = block(
                programs.add_answer(x, answer),
                pages,
                programs.of_kind(shifted, kind),
                programs.sentinel,
            )
            packed = programs.formats[kind.ffn.kind].pack(message)
            return x, jnp.pad(packed, ((0, 0), (0, width - packed.shape[1]))), tuple(own)

        def keep(x: Array, answer: Array, pages: Pages) -> Any:
            return x, jnp.zeros_like(turn.waiting), pages

        own = turn.x[lane], turn.answers[lane], tuple(turn.pages[where])
        x, message, pages = jax.lax.cond(self.attends, run, keep, *own)
        return turn._replace(
            x=[x if place == lane else other for place, other in enumerate(turn.x)],
            waiting=message,
            pages=(*turn.pages[: where.start], *pages, *turn.pages[where.stop :]),
        )

    def serve(self, turn: _Turn, at: _Place, arrived: Array) -> _Turn:
        """Runs a layer's FFN for a message on the devices of the ffn role."""
        programs, kind = self.programs, self.runs[at.run][0].ffn
        form, stack, bank = programs.formats[kind.kind], self.ffn[at.run], self.banks.get(at.run)
        experts = programs.config.experts

        def run(packed: Array) -> Any:
            block = programs.templates.ffn[kind].merge(_of_layer(stack, at.layer))
            packing = PackedRows(form, programs.dtype)
            table = None if bank is None else self.tables[bank][at.layer]
            place = jnp.asarray(at.layer, jnp.int32)
            exchange = programs.exchanges[kind.kind]
            rows, load = exchange(packed[:, : form.width], block, packing, table, place)
            return programs.answers.pack(rows), jnp.zeros(
                experts, jnp.int32
            ) if load is None else load

        def nothing(packed: Array) -> Any:
            return jnp.zeros_like(turn.ahead), jnp.zeros(experts, jnp.int32)

        sent, load = jax.lax.cond(self.attends, nothing, run, arrived)
        loads = [
            total.at[at.layer].add(load) if number == bank else total
            for number, total in enumerate(turn.loads)
        ]
        return turn._replace(ahead=sent, loads=loads)


def _exchanged(array: Array) -> Array:
    """Sends an array to the paired device of the other role, and returns that device's."""
    return jax.lax.ppermute(array, ROLE, [(0, 1), (1, 0)])


def _answered(turn: _Turn, lane: int, answer: Array) -> _Turn:
    lane %= len(turn.answers)
    answers = [answer if place == lane else other for place, other in enumerate(turn.answers)]
    return turn._replace(answers=answers)


def _of_layer(stack: StackedLeaves, layer: Array | int) -> list[Any]:
    place = jnp.asarray(layer, jnp.int32)
    return stack.of_layer({name: leaf[place] for name, leaf in stack.sliced.items()}, place)
