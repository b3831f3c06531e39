"""A step of all layers and lanes as one program of each role (`pipeline: step`).

The two roles run different programs over one mesh, the *union*: its first axis, `role`, has the
attention devices and then the ffn devices, and its other axes are those of the role's own mesh. A
process calls the program of its role, with arrays of which it has its own devices' shards. Device i
of one role exchanges messages with device i of the other by `ppermute`s.

The order is that of `schedule.Rotation` for lanes that begin together. In every turn a lane passes
a layer: attention sends the lane's message and receives the answer of the turn before, both in one
exchange. The first turn brings an answer of zeros, and an exchange after the last turn the last
answer. A lane alone has two exchanges a layer, one each way.

XLA orders collectives as it likes, and two programs with different orders would swap lanes without
an error. Each exchange therefore depends on all before by a *token*, made of elements of what these
received, and `exchanges` reads the order that was compiled. Everything received is used,
because XLA removes a `ppermute` whose result is not.
"""

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.errors import EngineFailedError
from jaxserve.link.dispatch.message import reinterpreted
from jaxserve.link.dispatch.packed_rows import PackedRows
from jaxserve.mesh import ATTENTION_RULES, FFN_AXES, FFN_RULES
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.expert_programs import (
    Bank,
    ExpertPrograms,
    add_load,
    bank_arrays,
    stacked_banks,
)
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import REPLICATED, ROWS, Arrays, Program
from jaxserve.roles.stacked_layers import StackedLeaves, scanned, with_own_pages
from jaxserve.roles.token_programs import StepContext, TokenPrograms

Dispatch = tuple[Bucket, int]
"""Bucket and number of lanes of a dispatch."""

ROLE = "role"
_DIVIDED = FFN_AXES[:1]


def union_mesh(attention: Mesh, ffn: Mesh, own: Mesh) -> Mesh:
    """Returns the devices of both roles as one mesh, with the further axes of `own`, which is one
    of the two."""
    devices = np.array([*attention.devices.flat, *ffn.devices.flat])
    return Mesh(devices.reshape(2, *own.devices.shape), (ROLE, *own.axis_names))


class Wire(NamedTuple):
    """One role's end of the exchanges in a program."""

    role: int
    """Coordinate of the role on the union mesh: 0 for attention, 1 for ffn."""
    word: jnp.dtype
    """Unsigned dtype in which arrays travel: that of the smaller of messages' and answers' words,
    so that both fit one exchange. Tokens have it, too."""
    answer: jax.ShapeDtypeStruct
    """Shape of a device's piece of an answer."""

    @classmethod
    def of(cls, role: int, programs: AttentionPrograms | FFNPrograms, tokens: int) -> "Wire":
        """Makes an end for steps with this number of tokens a DP group."""
        rows, form = programs.contract.piece_rows(tokens), programs.answers
        message = next(iter(programs.formats.values())).word  # equal for all kinds of layers
        word = jnp.dtype(f"uint{8 * min(message.itemsize, form.dtype.itemsize)}")
        return cls(role, word, jax.ShapeDtypeStruct((rows, form.width), form.dtype))

    @property
    def no_answer(self) -> Array:
        """An answer of zeros."""
        return jnp.zeros(self.answer.shape, self.answer.dtype)

    @property
    def first_token(self) -> Array:
        """The token before the first exchange."""
        return jnp.zeros((), self.word)

    def exchange(
        self, sent: Array | None, received: jax.ShapeDtypeStruct | None, token: Array
    ) -> tuple[Array, Array]:
        """Sends an array to the paired device of the other role, and receives one of this shape;
        None: nothing travels in that direction.

        Returns:
          what was received (zeros if nothing was), and the next token.
        """
        there, pairs, parts = 1 - self.role, [], []
        if sent is not None:
            parts.append(self._words(sent))
            pairs.append((self.role, there))
        if received is not None:
            parts.append(self._words(jnp.zeros(received.shape, received.dtype)))
            pairs.append((there, self.role))
        width = max(part.shape[1] for part in parts)
        out = jnp.pad(parts[0], ((0, 0), (0, width - parts[0].shape[1])))
        out, token = jax.lax.optimization_barrier((out, token))
        got = jax.lax.ppermute(out, ROLE, sorted(pairs))
        token ^= got[0, 0]
        if received is None:
            return got, token
        words = got[:, : parts[-1].shape[1]]
        if (ratio := received.dtype.itemsize // self.word.itemsize) > 1:
            words = words.reshape(*received.shape, ratio)
        return reinterpreted(words, received.dtype), token

    def _words(self, array: Array) -> Array:
        return reinterpreted(array, self.word).reshape(array.shape[0], -1)


class AttentionStepPrograms(AttentionPrograms):
    """The attention role's programs over the union mesh."""

    def step(self, bucket: Bucket, lanes: int) -> Program:
        """((last_tokens, batch, page_table) of each lane, pages, embedding, head, runs) →
        ((last_tokens, sampled, logits, x) of each lane, pages…, last token of the exchanges); with
        drafts each lane's lengths precede x (`TokenPrograms.draw`).

        x is the residual stream after the last layer. Pages are those of all layers of a pool.
        """
        templates, runs = self.templates, self.config.runs()
        wire = Wire.of(0, self, bucket.tokens)

        def body(steps: Sequence[Arrays], pages: Pages, ends: Any, stacks: Any) -> Arrays:
            embedding, head = ends
            contexts = [
                self.step_context(bucket, batch, table, last) for last, batch, table in steps
            ]
            x = [self.embed(context, embedding) for context in contexts]
            carry: Any = x, [wire.no_answer] * lanes, pages, wire.first_token
            for run, leaves in zip(runs, stacks, strict=True):
                stack = StackedLeaves.of(templates.attention[run[0]], leaves)
                layer = functools.partial(turns, run, stack, contexts)
                carry, _ = jax.lax.scan(layer, carry, scanned(run[2] - run[1], [stack]))
            x, answers, pages, token = carry
            if lanes > 1:
                answers[-1], token = wire.exchange(None, wire.answer, token)
            made: list[Array] = []
            for context, (last, *_), *stream in zip(contexts, steps, x, answers, strict=True):
                final = self._add_combined(*stream)
                made += *self.end_step(final, last, context.fields, head, bucket), final
            return *made, *pages, token

        def turns(
            run: tuple[LayerKind, int, int],
            stack: StackedLeaves,
            contexts: Sequence[StepContext],
            carry: Any,
            inputs: Any,
        ) -> tuple[Any, None]:
            (kind, start, _), (x, answers, pages, token) = run, carry
            (place, (sliced,), _), x, answers = inputs, [*x], [*answers]
            for lane, (batch, _) in enumerate(contexts):
                at, shifted = with_own_pages(self, kind, start, place, batch)
                before = self._add_combined(x[lane], answers[lane])
                leaves = stack.of_layer(sliced, place)
                x[lane], packed, *own = self._attend(kind, before, pages[at], shifted, leaves)
                pages = *pages[: at.start], *own, *pages[at.stop :]
                if lanes == 1:
                    _, token = wire.exchange(packed, None, token)
                    answers[0], token = wire.exchange(None, wire.answer, token)
                else:
                    answers[lane - 1], token = wire.exchange(packed, wire.answer, token)
            return (x, answers, pages, token), None

        lengths = [ROWS] if bucket.drafts else []
        of_lane = ROWS, REPLICATED, self.logits_spec, *lengths, ROWS
        return Program(
            f"step_{lanes}",
            body,
            self.mesh,
            (
                [self.step_shapes(bucket)] * lanes,
                self.all_pages,
                self.leaves(templates.embedding, templates.head),
                [
                    templates.attention[kind].arrays(self.mesh, ATTENTION_RULES, stop - start)
                    for kind, start, stop in runs
                ],
            ),
            (*of_lane * lanes, *self.pages_specs(*self.pools), REPLICATED),
            donates=(1,),
        )

    stream_shapes = TokenPrograms.stream_shapes
    stream = TokenPrograms.stream


class FFNStepPrograms(FFNPrograms):
    """The ffn role's programs over the union mesh.

    Args:
      own: mesh of the ffn role.
      union: the mesh of both roles, with the axes of `own`.
    """

    def __init__(self, templates: ModelTemplates, deployment: Deployment, own: Mesh, union: Mesh):
        super().__init__(templates, deployment, own)
        self.mesh = union
        self.banks = stacked_banks(self.config, templates.slots)
        if templates.moe:
            self.experts = ExpertPrograms(
                templates, deployment.experts, union, FFN_RULES, _DIVIDED, stacked=True
            )

    def step(self, tokens: int, lanes: int) -> Program:
        """(tables, counts, runs) → (counts…, last token of the exchanges), for steps with this
        number of tokens a DP group. The ffn role's part of `AttentionStepPrograms.step`."""
        templates, runs = self.templates, self.config.runs()
        wire = Wire.of(1, self, tokens)

        def body(tables: Arrays, counts: Arrays, stacks: Sequence[Arrays]) -> Arrays:
            carry: Any = wire.no_answer, wire.first_token
            loads: list[Array] = []
            for (kind, start, stop), leaves in zip(runs, stacks, strict=True):
                stack = StackedLeaves.of(templates.ffn[kind.ffn], leaves)
                table = tables[len(loads)] if kind.ffn.router else None
                inputs = scanned(stop - start, [stack], table)
                carry, load = jax.lax.scan(functools.partial(turns, kind, stack), carry, inputs)
                loads += [] if load is None else [load]
            last, token = carry
            if lanes > 1:
                _, token = wire.exchange(last, None, token)
            return *map(add_load, counts, loads), token

        def turns(
            kind: LayerKind, stack: StackedLeaves, carry: Any, inputs: Any
        ) -> tuple[Any, Array | None]:
            (sent, token), (place, (sliced,), table), loads = carry, inputs, []
            block = templates.ffn[kind.ffn].merge(stack.of_layer(sliced, place))
            form = self.formats[kind.ffn.kind]
            message = jax.ShapeDtypeStruct((wire.answer.shape[0], form.width), form.word)
            packing, exchange = PackedRows(form, self.dtype), self.exchanges[kind.ffn.kind]
            for _ in range(lanes):
                packed, token = wire.exchange(sent if lanes > 1 else None, message, token)
                results, load = exchange(packed, block, packing, table, place)
                (sent,) = self.answers.pieces(results, 1)
                loads += [] if load is None else [load]
                if lanes == 1:
                    _, token = wire.exchange(sent, None, token)
            return (sent, token), sum(loads[1:], loads[0]) if loads else None

        counts, tables = bank_arrays(self.mesh, self.banks, _DIVIDED)
        return Program(
            f"ffn_step_{lanes}",
            body,
            self.mesh,
            (
                tables,
                counts,
                [
                    templates.ffn[kind.ffn].arrays(self.mesh, FFN_RULES, stop - start)
                    for kind, start, stop in runs
                ],
            ),
            (*[Bank.counts_spec(_DIVIDED)] * len(counts), REPLICATED),
            donates=(1,),
        )


_INSTRUCTION = re.compile(r"^  (?:ROOT )?%\S+ = (.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MESSAGE = re.compile(r"\(?(\w+\[[\d,]*\]).* collective-permute(?:-start)?\(.*pairs=\{(.*?)\}\}")


def exchanges_digest(steps: Mapping[Dispatch, jax.stages.Compiled], devices: int) -> str:
    """Returns a digest of the exchanges between the roles in all programs, in the compiled order.

    If the roles' digests differ, messages would get to other lanes or layers without an error.

    Args:
      devices: devices of a role.

    Raises:
      EngineFailedError: the order is not known, because a loop has no known number of turns.
    """
    found = {
        (bucket.tokens, lanes, *exchanges(cast(str, compiled.as_text()), devices))
        for (bucket, lanes), compiled in steps.items()
    }
    return hashlib.blake2s(repr(sorted(found)).encode(), digest_size=8).hexdigest()


def exchanges(text: str, devices: int) -> list[str]:
    """Lists the exchanges between roles of a compiled program in their order, loops unrolled: shape
    and pairs of devices. Arguments and errors as of `exchanges_digest`."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif found := _INSTRUCTION.match(line):
            bodies[name].append(found[1])

    @functools.cache
    def of(name: str) -> tuple[str, ...]:
        return tuple(one for line in bodies[name] for one in inside(line))

    def inside(line: str) -> Iterator[str]:
        if message := _MESSAGE.match(line):
            pairs = re.findall(r"(\d+),(\d+)", message[2])
            if any((int(a) < devices) != (int(b) < devices) for a, b in pairs):
                yield f"{message[1]} {message[2]}"
            return
        called = [one for name in _CALLED.findall(line) for one in of(name)]
        if called and " while(" in line:
            trips = _TRIPS.search(line)
            if trips is None:
                raise EngineFailedError("pipeline = step: a compiled loop has no known trip count")
            called *= int(trips[1])
        yield from called

    return list(of(entry))
