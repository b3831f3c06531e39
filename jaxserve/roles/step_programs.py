"""A step of all layers and lanes as one program of each role (`pipeline: step`).

The two roles run different programs over one mesh, the *union* (`Union`). Its first axis, `role`,
has rows of the attention devices and then the instances of the ffn role, which are as large as a
row. Its other axes are those of the role's own mesh. A process passes its own devices' shards to
the program of its role. In turns, a device of each attention row exchanges messages by `ppermute`s
with the device at the same place of each instance. All other programs run on a role's own mesh.

The order is that of `schedule.Rotation` for lanes that begin together: in every turn a lane passes
a layer. A lane alone has two exchanges a turn, one each way. Two lanes have one: attention sends
the message of the turn and receives the answer of the turn before; a last one brings the last
answer. Three lanes and more are a pipeline of three stages (Step-3, figure 7), in which no exchange
waits for what is computed in the same turn. While attention computes a turn, it sends the message
of the turn before and receives the answer of the one before that; the ffn role meanwhile sends the
answer of its turn before and receives the next message. What is sent before the first turn and
received after the last is zeros.

XLA orders collectives as it likes, and two programs with different orders would swap lanes without
an error. Each exchange therefore depends on all before by a *token*, made of elements of what these
received, and `exchanges` reads the order that was compiled. Everything received is used, because
XLA removes a `ppermute` whose result is not.
"""

import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.link.dispatch.message import PackedRows
from jaxserve.mesh import (
    ATTENTION_RULES,
    FFN_AXES,
    INSTANCE,
    ROLE,
    Submeshes,
    axis_product,
    cached_sharding,
    expert_axes,
    ffn_rules,
)
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.exchange import ended, make_exchanges
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.compilation import REPLICATED, ROWS, Arrays, Program
from jaxserve.roles.expert_programs import (
    Bank,
    ExpertPrograms,
    add_load,
    bank_arrays,
    stacked_banks,
)
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.lane_steps import Dispatch, all_runs, runs_of
from jaxserve.roles.layout import Bucket
from jaxserve.roles.token_programs import StepContext
from jaxserve.roles.whole_steps import StackedLeaves, with_own_pages
from pallas_kernels.permute_order import permutes

STAGES = 3
"""Lanes from which a step is a pipeline of attention, exchanges and FFN."""


class Union(NamedTuple):
    """The devices of both roles as one mesh, and one of the roles on it.

    A role's collectives run along whole axes, so they stay inside a row. Where a role has several
    rows, its arrays are longer on the union: the other role's rows would have shards, too.
    """

    mesh: Mesh
    own: Mesh
    """The role's mesh outside dispatches."""
    role: int
    """0 for attention, 1 for ffn."""
    rows: tuple[int, int]
    """Rows of the attention role, and of the ffn role."""

    @classmethod
    def of(cls, meshes: Submeshes, instances: int, role: int) -> "Union":
        """Makes a role's union.

        Raises:
          ConfigError: the devices are TPUs, whose cores must all run one program.
        """
        both = meshes.attention, meshes.ffn
        if meshes.ffn.devices.flat[0].platform == "tpu":
            raise ConfigError(
                "pipeline = step: TPUs need attention.processes = ffn.processes = all"
            )
        rows = meshes.attention.size * instances // meshes.ffn.size, instances
        first, *inner = (name for name in both[role].axis_names if name != INSTANCE)
        sizes = sum(rows), -1, *(both[role].shape[name] for name in inner)
        devices = np.concatenate([mesh.devices.flatten() for mesh in both])
        return cls(Mesh(devices.reshape(sizes), (ROLE, first, *inner)), both[role], role, rows)

    @property
    def kept(self) -> "Union":
        """Returns the union with itself as the role's own mesh, where the role has one row: arrays
        are then divided over both meshes alike, and a dispatch takes them as they are."""
        return self._replace(own=self.mesh) if self.rows[self.role] == 1 else self

    def spec(self, spec: PartitionSpec, *, back: bool = False) -> PartitionSpec:
        """Returns how an array of the role's own mesh is divided over the union, or the reverse."""
        across: dict[str, tuple[str, ...]] = {INSTANCE: (ROLE,), "dp": (ROLE, "dp")}
        if back:  # the compiler may have left out axes of a single device, but never the role's
            across = {ROLE: (INSTANCE,)} if self.role else {ROLE: ("dp",), "dp": ()}
        if self.rows[self.role] == 1:
            return spec
        split = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
        named = [[new for name in names for new in across.get(name, (name,))] for names in split]
        return PartitionSpec(*(tuple(names) or None for names in named))

    def array(self, array: jax.ShapeDtypeStruct, *, back: bool = False) -> jax.ShapeDtypeStruct:
        """Returns an array of the role's own mesh as one of the union, or the reverse."""
        mesh, spec = self.own if back else self.mesh, self.spec(array.sharding.spec, back=back)
        pieces = array.sharding.shard_shape(array.shape)
        counts = (axis_product(mesh, axes) for axes in spec)
        shape = tuple(math.prod(each) for each in zip_longest(pieces, counts, fillvalue=1))
        return array.update(shape=shape, sharding=cached_sharding(mesh, spec))

    @property
    def turns(self) -> list[list[tuple[int, int]]]:
        """Pairs of coordinates of an attention row and an instance, for each turn of an exchange:
        in all turns together every row meets every instance once."""
        (attention, ffn), turns = self.rows, range(max(self.rows))
        met = [[(row, (row + turn) % len(turns)) for row in range(attention)] for turn in turns]
        return [[(row, attention + other) for row, other in each if other < ffn] for each in met]

    def partner(self, turn: int) -> Array | int:
        """Returns the number of the row of the other role that this device meets in a turn; beyond
        the last: none."""
        if max(self.rows) == 1:
            return 0
        own = jax.lax.axis_index(ROLE) - self.role * self.rows[0]
        return (own + (-turn if self.role else turn)) % max(self.rows)


class Wire(NamedTuple):
    """One role's end of the exchanges in a program."""

    union: Union
    word: jnp.dtype
    """Unsigned dtype in which arrays travel: that of the smaller of messages' and answers' words,
    so that both fit one exchange. Tokens have it, too."""
    message: jax.ShapeDtypeStruct
    """Shape of a device's piece of the widest message."""
    answer: jax.ShapeDtypeStruct
    """Shape of a device's piece of an answer."""

    @classmethod
    def of(cls, union: Union, programs: AttentionPrograms | FFNPrograms, tokens: int) -> "Wire":
        """Makes an end for steps with this number of tokens a DP group."""
        rows, form = programs.contract.piece_rows(tokens), programs.answers
        widest = max(programs.formats.values(), key=lambda each: each.width)
        word = jnp.dtype(f"uint{8 * min(widest.word.itemsize, form.dtype.itemsize)}")
        message = jax.ShapeDtypeStruct((rows, widest.width), widest.word)
        return cls(union, word, message, jax.ShapeDtypeStruct((rows, form.width), form.dtype))

    @property
    def no_answer(self) -> Array:
        """Answers of zeros: those to a message, or those that an ffn device sends."""
        count = self.union.rows[1 - self.union.role]
        return jnp.zeros((count, *self.answer.shape), self.answer.dtype)

    def pass_on(self, sent: Array, received: jax.ShapeDtypeStruct, token: Array) -> Any:
        """Sends, then receives, in two exchanges. Arguments and results as of `exchange`."""
        _, token = self.exchange(sent, None, token)
        return self.exchange(None, received, token)

    def exchange(
        self, sent: Array | None, received: jax.ShapeDtypeStruct | None, token: Array
    ) -> tuple[Array, Array]:
        """Sends an array to each paired device of the other role, and each sends one back. Without
        `sent` or `received` nothing travels in that direction.

        Args:
          sent: attention's message, the same for all devices; or the answers of the ffn role, one
            for each device.
          received: shape of an array that is received.

        Returns:
          what was received, stacked (zeros if nothing was), and the next token.
        """
        role, rows = self.union.role, self.union.rows
        found = None
        if received is not None:
            found = jnp.zeros((rows[1 - role], *received.shape), received.dtype)
        for turn, met in enumerate(self.union.turns):
            partner, pairs, parts = self.union.partner(turn), [], []
            if sent is not None:
                piece = sent if role == 0 else jax.lax.dynamic_index_in_dim(sent, partner, 0, False)
                parts.append(self._words(piece))
                pairs += [pair[::-1] if role else pair for pair in met]
            if received is not None:
                parts.append(self._words(jnp.zeros(received.shape, received.dtype)))
                pairs += [pair if role else pair[::-1] for pair in met]
            width = max(part.shape[1] for part in parts)
            out = jnp.pad(parts[0], ((0, 0), (0, width - parts[0].shape[1])))
            out, token = jax.lax.optimization_barrier((out, token))
            got = jax.lax.ppermute(out, ROLE, sorted(pairs))
            token ^= got[0, 0]
            if found is None or received is None:
                continue
            words = got[:, : parts[-1].shape[1]]
            if (ratio := received.dtype.itemsize // self.word.itemsize) > 1:
                words = words.reshape(*received.shape, ratio)
            found = found.at[partner].set(bitcast_convert_type(words, received.dtype), mode="drop")
        return (got if found is None else found), token

    def _words(self, array: Array) -> Array:
        return bitcast_convert_type(array, self.word).reshape(array.shape[0], -1)


class AttentionStepPrograms(AttentionPrograms):
    """The attention role's programs: those of its own mesh, and steps on the union."""

    def __init__(self, templates: ModelTemplates, deployment: Deployment, union: Union):
        super().__init__(templates, deployment, union.own)
        self.union = union

    def of_all_groups(self, own: Array) -> Array:
        """See `TokenPrograms`. In a step the DP groups of a row are an axis of the union."""
        found, rows = super().of_all_groups(own), self.union.rows[0]
        if rows == 1 or ROLE not in jax.sharding.get_abstract_mesh().shape:
            return found
        row, every = jax.lax.axis_index(ROLE), jnp.zeros((rows, *found.shape), found.dtype)
        for turn in range(rows):
            pairs = [(there, (there + turn) % rows) for there in range(rows)]
            got = jax.lax.ppermute(found, ROLE, pairs) if turn else found
            every = every.at[(row - turn) % rows].set(got)
        return every.reshape(-1, *own.shape)

    def step(self, bucket: Bucket, lanes: int, module: int = 0) -> Program:
        """((last_tokens, batch, page_table) of each lane, pages, embedding, head, runs) →
        ((last_tokens, sampled, logits, x) of each lane, pages…, last token of the exchanges); with
        drafts each lane's lengths precede x (`TokenPrograms.draw`).

        x is the residual stream after the last layer. Pages are those of all layers of a pool, runs
        those of `lane_steps.all_runs`.

        Args:
          module: a prediction module, from 1, whose layer alone runs: ((x, batch, page_table) of
            each lane, …) → (x of each lane, …); 0: the model's own layers.
        """
        templates, runs = self.templates, all_runs(self.config)
        wire = Wire.of(self.union, self, bucket.tokens)

        def body(steps: Sequence[Arrays], pages: Pages, ends: Any, stacks: Any) -> Arrays:
            embedding, head = ends
            contexts = [
                self.step_context(bucket, batch, table, None if module else first)
                for first, batch, table in steps
            ]
            x = [first for first, *_ in steps]
            x = x if module else [self.embed(context, embedding) for context in contexts]
            carry: Any = x, [wire.no_answer] * lanes, pages, jnp.zeros((), wire.word)
            if lanes >= STAGES:
                carry = *carry, jnp.zeros(wire.message.shape, wire.message.dtype)
            for number in runs_of(self.config, runs, module):
                kind, start, stop = runs[number]
                stack = StackedLeaves.of(templates.attention[kind], stacks[number])
                layer = functools.partial(turns, runs[number], stack, contexts)
                carry, _ = jax.lax.scan(layer, carry, jnp.arange(stop - start, dtype=jnp.int32))
            x, answers, pages, token, *waiting = carry
            if waiting:
                for lane in (-2, -1):
                    answers[lane], token = wire.pass_on(waiting[0], wire.answer, token)
            elif lanes > 1:
                answers[-1], token = wire.exchange(None, wire.answer, token)
            made: list[Array] = []
            for context, (last, *_), own, added in zip(contexts, steps, x, answers, strict=True):
                final = self._add_combined(own, *added)
                if not module:
                    made += self.end_step(final, last, context.fields, head, bucket)
                made.append(final)
            return *made, *pages, token

        def turns(
            run: Any,
            stack: StackedLeaves,
            contexts: Sequence[StepContext],
            carry: Any,
            place: Array,
        ) -> tuple[Any, None]:
            (kind, start, _), (x, answers, pages, token, *waiting) = run, carry
            x, answers, leaves = [*x], [*answers], stack.at(place)
            for lane, (batch, _) in enumerate(contexts):
                if waiting:
                    answers[lane - 2], token = wire.pass_on(waiting[0], wire.answer, token)
                at, shifted = with_own_pages(self, kind, start, place, batch)
                before = self._add_combined(x[lane], *answers[lane])
                x[lane], packed, *own = self._attend(kind, before, pages[at], shifted, leaves)
                # A turn ends before the next one begins. XLA would otherwise compute several lanes
                # at once, and copy the pages that one lane reads and the next writes.
                x, answers, packed, own, token = jax.lax.optimization_barrier(
                    (x, answers, packed, own, token)
                )
                pages = *pages[: at.start], *own, *pages[at.stop :]
                if waiting:
                    wider = wire.message.shape[1] - packed.shape[1]
                    waiting = [jnp.pad(packed, ((0, 0), (0, wider)))]
                elif lanes == 1:
                    _, token = wire.exchange(packed, None, token)
                    answers[0], token = wire.exchange(None, wire.answer, token)
                else:
                    answers[lane - 1], token = wire.exchange(packed, wire.answer, token)
            return (x, answers, pages, token, *waiting), None

        ends = self.leaves(templates.embedding, templates.head)
        stacks = [
            templates.attention[kind].arrays(self.mesh, ATTENTION_RULES, stop - start)
            for kind, start, stop in runs
        ]
        first, *others = self.step_shapes(bucket)
        lengths = [ROWS] if bucket.drafts else []
        left = ROWS, REPLICATED, self.logits_spec, *lengths
        if module:
            (first,), left = self.stream_shapes(bucket), ()
        inputs = [(first, *others)] * lanes, self.all_pages, ends, stacks
        specs = *(*left, ROWS) * lanes, *self.pages_specs(*self.pools), REPLICATED
        return Program(
            f"{'pass' if module else 'step'}_{lanes}",
            body,
            self.union.mesh,
            jax.tree.map(self.union.array, inputs),
            (*map(self.union.spec, specs),),
            donates=(1,),
            cuda_graphs="branches",
            paired=self.contract.attention_devices,
        )


class FFNStepPrograms(FFNPrograms):
    """The ffn role's programs: those of its own mesh, and steps on the union."""

    def __init__(self, templates: ModelTemplates, deployment: Deployment, union: Union):
        super().__init__(templates, deployment, own := union.own)
        self.union, (attention, instances) = union, union.rows
        axes = Axes(*FFN_AXES, rows=FFN_AXES)
        if instances > 1:
            axes = axes._replace(instance=ROLE, before=attention)
        self.exchanges = make_exchanges(
            templates.exchange, axes, self.dtype, combine=self.contract.combine
        )
        self.banks = stacked_banks(all_runs(self.config), templates.slots)
        if templates.moe:
            given = templates, deployment.experts, own, ffn_rules(own), expert_axes(own)
            self.experts = ExpertPrograms(*given, stacked=True)

    def step(self, tokens: int, lanes: int, module: int = 0) -> Program:
        """(counts, tables, runs) → (counts…, last token of the exchanges), for steps with this
        number of tokens a DP group. The ffn role's part of `AttentionStepPrograms.step`."""
        templates, runs = self.templates, all_runs(self.config)
        wire = Wire.of(self.union, self, tokens)
        banks, slots = [bank.layers[0] for bank in self.banks], self.union.rows[0]

        def body(counts: Arrays, tables: Arrays, stacks: Sequence[Arrays]) -> Arrays:
            carry: Any = wire.no_answer, jnp.zeros((), wire.word)
            if lanes >= STAGES:
                _, token = wire.exchange(None, wire.message, carry[1])
                ahead, token = wire.pass_on(wire.no_answer, wire.message, token)
                carry = wire.no_answer, token, ahead
            counted = [*counts]
            for number in runs_of(self.config, runs, module):
                kind, start, stop = runs[number]
                stack = StackedLeaves.of(templates.ffn[kind.ffn], stacks[number])
                table = tables[banks.index(start)] if kind.ffn.router else None
                places = jnp.arange(stop - start, dtype=jnp.int32)
                layer = functools.partial(turns, kind, stack, table)
                carry, load = jax.lax.scan(layer, carry, places)
                if load is not None:
                    counted[banks.index(start)] = add_load(counts[banks.index(start)], load)
            last, token, *_ = carry
            if lanes > 1:
                _, token = wire.exchange(last, None, token)
            return *counted, token

        def turns(
            kind: LayerKind, stack: StackedLeaves, tables: Array | None, carry: Any, place: Array
        ) -> tuple[Any, Array | None]:
            (sent, token, *ahead), loads = carry, []
            block = templates.ffn[kind.ffn].merge(stack.at(place))
            table = None if tables is None else tables[place]
            form = self.formats[kind.ffn.kind]
            message = jax.ShapeDtypeStruct((wire.answer.shape[0], form.width), form.word)
            packing, exchange = PackedRows(form, self.dtype), self.exchanges[kind.ffn.kind]
            for _ in range(lanes):
                if ahead:
                    packed = ahead[0][:, :, : form.width]
                    ahead[0], token = wire.pass_on(sent, wire.message, token)
                else:
                    packed, token = wire.exchange(sent if lanes > 1 else None, message, token)
                rows = packed.reshape(-1, form.width)
                results, load = ended(exchange.stages(rows, block, packing, table, place))
                sent = jnp.stack(self.answers.pieces(results, slots))
                sent, ahead, token = jax.lax.optimization_barrier((sent, ahead, token))
                loads += [] if load is None else [load]
                if lanes == 1:
                    _, token = wire.exchange(sent, None, token)
            return (sent, token, *ahead), sum(loads[1:], loads[0]) if loads else None

        divided = expert_axes(self.mesh)
        counts, tables = bank_arrays(self.mesh, self.banks, divided)
        leaves = [
            templates.ffn[kind.ffn].arrays(self.mesh, ffn_rules(self.mesh), stop - start)
            for kind, start, stop in runs
        ]
        spec = self.union.spec(Bank.counts_spec(divided))
        return Program(
            f"ffn_{'pass' if module else 'step'}_{lanes}",
            body,
            self.union.mesh,
            jax.tree.map(self.union.array, (counts, tables, leaves)),
            (*[spec] * len(counts), REPLICATED),
            donates=(0,),
            ragged=templates.exchange == "alltoall",
            paired=self.contract.attention_devices,
        )


def exchanges_digest(steps: Mapping[Dispatch, jax.stages.Compiled], devices: int) -> str:
    """Returns a digest of the exchanges between the roles in all programs, in the compiled order.

    If the roles' digests differ, messages would get to other lanes or layers without an error.

    Args:
      devices: devices of the attention role.

    Raises:
      EngineFailedError: the order is not known, because a loop has no known number of turns.
    """
    found = {
        (bucket.tokens, lanes, module, *exchanges(cast(str, compiled.as_text()), devices))
        for (bucket, lanes, module), compiled in steps.items()
    }
    return hashlib.blake2s(repr(sorted(found)).encode(), digest_size=8).hexdigest()


def exchanges(text: str, devices: int) -> list[str]:
    """Lists the exchanges between roles of a compiled program in their order, loops unrolled: shape
    and pairs of devices. Arguments and errors as of `exchanges_digest`."""

    def crosses(pairs: str) -> bool:
        found = re.findall(r"(\d+),(\d+)", pairs)
        return any((int(a) < devices) != (int(b) < devices) for a, b in found)

    try:
        return permutes(text, crosses)
    except ValueError as error:
        raise EngineFailedError(f"pipeline = step: {error}") from None
