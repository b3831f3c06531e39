"""The ffn worker: dense FFN, shared and routed experts. Its only state is its weights and the
slots and token counts of its experts (`expert_slots.py`).

Inside one runtime a cell (`attention.py`) runs it as part of every lane's step, in the total order
of stages. For attention workers of other runtimes it answers messages as they arrive (`answer`). It
knows a step's lane and size, never its sequences, pages or plans.

Each kind of layer and size of a step has a program. A message arrives as pieces, one for each slot
of a device; slots without a piece hold padding. The exchange brings rows to the devices that need
them, and results back to the rows' devices.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN
from jaxserve.link.dispatch.contract import Contract, MessageSize
from jaxserve.link.dispatch.ends import Arrays, FFNEnd
from jaxserve.link.dispatch.message import PackedRows, answer_format, message_formats
from jaxserve.link.dispatch.route import Route
from jaxserve.mesh import FFN_AXES, INSTANCE, AnyMesh, expert_axes, ffn_rules, placed
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.exchange import RowBlocks, ended, make_exchanges
from jaxserve.roles.compilation import Get, Program, compile_steps, hot_call
from jaxserve.roles.expert_programs import Bank, ExpertPrograms, add_load, bank_arrays
from jaxserve.roles.expert_slots import ExpertSlots, open_slots
from jaxserve.roles.layout import Bucket, token_sizes
from jaxserve.roles.weights import HeldBlock, LeafSource, RoleWeights, load_progress
from jaxserve.roles.worker import Passed, Stages, layers_of

if TYPE_CHECKING:
    from jaxserve.roles.step_plan import StepPlan


class FFNPrograms:
    """Programs of the ffn mesh for the messages of domains that share a contract.

    Args:
      contract: shapes of the messages; None takes the deployment's.
    """

    def __init__(
        self,
        templates: FFNTemplates,
        deployment: Deployment,
        mesh: AnyMesh,
        contract: Contract | None = None,
    ):
        self.templates = templates
        self.mesh = cast(Mesh, mesh)  # an abstract mesh suffices to compute shapes
        self.config, self.dtype = templates.config, templates.dtype
        self.contract = contract or Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(self.contract), answer_format(self.contract)
        # Over `pull` the contract's instances are other ffn workers.
        instances = deployment.ffn.instances
        self.route = Route.of(self.contract, mesh.size)._replace(instances=instances)
        blocks = RowBlocks(mesh.size // instances * self.route.slots, self.route.filled)
        axes = Axes(*FFN_AXES, rows=FFN_AXES, instance=INSTANCE if instances > 1 else None)
        self.exchanges = make_exchanges(
            templates.exchange, axes, self.dtype, blocks, self.contract.combine
        )
        self.slots = templates.slots
        self.banks = tuple(
            Bank((layer,), self.slots)
            for layer, kind in enumerate(self.contract.layers)
            if kind == "moe"
        )
        self.experts: ExpertPrograms | None = None
        if templates.moe:
            rules, divided = ffn_rules(mesh), expert_axes(mesh)
            self.experts = ExpertPrograms(
                templates, deployment.experts, mesh, rules, divided, stacked=False
            )

    def ffn(self, bucket: Bucket, spec: FFN) -> Program:
        """(message, table, counts, layer) → (pieces of the answer…, counts), for steps with as
        many tokens a DP group as the bucket.

        The message has one array for each slot. Layers without routed experts have neither table
        nor counts.
        """
        layer, slots = self.templates.ffn[spec], self.route.slots
        message, rows = self.formats[spec.kind], self.contract.piece_rows(bucket.tokens)
        packing, exchange = PackedRows(message, self.dtype), self.exchanges[spec.kind]
        moe = spec.router is not None

        def body(message: Arrays, tables: Arrays, counts: Arrays, leaves: Arrays) -> Arrays:
            packed, block = jnp.concatenate(message), layer.merge(leaves)
            if moe and (first := self.templates.first_expert):
                own = cast(jax.Array, packing.unpack(packed).experts) - first
                packed = packing.addressed(packed, own)  # others' are padding
            table = tables[0][0] if tables else None
            answer, load = ended(exchange.stages(packed, block, packing, table))
            pieces = self.answers.pieces(answer, slots)
            return pieces if load is None else (*pieces, add_load(counts[0], load[None]))

        pieces = PartitionSpec(tuple(self.mesh.shape))
        piece = jax.ShapeDtypeStruct((self.mesh.size * rows, message.width), message.word)
        axes = expert_axes(self.mesh)
        counts, tables = bank_arrays(self.mesh, [Bank((0,), self.slots)] * moe, axes)
        return Program(
            f"ffn_{spec.kind}",
            body,
            self.mesh,
            (
                placed(self.mesh, [piece] * slots, [pieces] * slots),
                tables,
                counts,
                layer.arrays(self.mesh, ffn_rules(self.mesh)),
            ),
            (*[pieces] * slots, *[Bank.counts_spec(axes)] * moe),
            donates=(2,),
            cuda_graphs="off",
            ragged=moe and self.templates.exchange == "alltoall",
        )


class FFNWeights(RoleWeights):
    """Weights of an ffn worker: a block for each layer, layers of prediction modules included.
    Each layer with routed experts is a bank."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: FFNPrograms):
        super().__init__(source, programs.mesh)
        templates, config = programs.templates, programs.config
        for layer in range(config.all_layers):
            block, rules = templates.ffn[config.layer(layer).ffn], ffn_rules(programs.mesh)
            self.add("ffn", block, names.ffn[layer], rules, layer)


FFNExecutables = dict[tuple[FFN, MessageSize], jax.stages.Compiled]
"""Compiled programs by the FFN of a layer and the size of the message."""


def ffn_executables(programs: FFNPrograms, token_sizes: Sequence[int], get: Get) -> FFNExecutables:
    """Compiles the programs of `FFNWorker` for steps with these numbers of tokens a DP group."""
    return {
        (spec, programs.contract.size(tokens)): get(FFNPrograms.ffn, Bucket(tokens, 1), spec)
        for tokens in sorted(set(token_sizes))
        for spec in programs.templates.ffn
    }


def build_ffn(
    templates: FFNTemplates,
    deployment: Deployment,
    mesh: Mesh,
    source: LeafSource,
    names: CheckpointNames,
    executables: FFNExecutables | None = None,
) -> tuple[FFNPrograms, FFNExecutables, FFNWeights, ExpertSlots | None]:
    """Loads weights and compiles programs: the arguments of `FFNWorker`.

    Args:
      executables: programs for this model, deployment and mesh; None: compiles them.
    """
    programs, sizes = FFNPrograms(templates, deployment, mesh), token_sizes(deployment)
    with load_progress(source, templates.config.all_layers):
        weights = FFNWeights(source, names, programs)
    executables = executables or compile_steps(ffn_executables, programs, sizes)
    slots = open_slots(programs.experts, programs.banks, weights, names, source)
    return programs, executables, weights, slots


class _Layer(NamedTuple):
    """Everything that the stages of one layer call, looked up once."""

    receive: Callable[[], Arrays]
    run: Callable[[Arrays], Arrays]


class FFNWorker:
    """Runs the ffn stages of all lanes, or answers messages.

    Args:
      slots: slots of the routed experts; None without routed experts.
    """

    def __init__(
        self,
        programs: FFNPrograms,
        executables: FFNExecutables,
        weights: FFNWeights,
        slots: ExpertSlots | None,
    ):
        self.slots = slots
        self._contract, self._config = programs.contract, programs.config
        self._specs = [self._config.layer(n).ffn for n in range(self._config.all_layers)]
        self._executables, self._weights = dict(executables), weights
        self._bank = {bank.layers[0]: number for number, bank in enumerate(programs.banks)}
        self._layers: dict[tuple[int, int], list[_Layer]] = {}
        self._runs: dict[tuple[int, MessageSize], Callable[[Arrays], Arrays]] = {}
        self._send: dict[tuple[int, int], Callable[..., object]] = {}

    def held(self) -> list[HeldBlock]:
        """Returns the blocks of the checkpoint that this process holds."""
        return self._weights.held

    def add(self, executables: FFNExecutables) -> None:
        """Adds programs for messages of further sizes."""
        self._executables |= executables

    def has(self, size: MessageSize) -> bool:
        """Returns whether `answer` accepts messages of this size."""
        return all((spec, size) in self._executables for spec in self._specs)

    def attach(self, link: FFNEnd, token_sizes: Sequence[int], domain: int = 0) -> None:
        """Attaches this end of a link to a domain's steps with these numbers of tokens a DP group:
        they receive messages from it and send answers to it."""
        for tokens in token_sizes:
            size = self._contract.size(tokens)
            self._send[domain, tokens] = link.sender(tokens)
            self._layers[domain, tokens] = [
                _Layer(link.receiver(layer, tokens), self._run(layer, size))
                for layer in range(len(self._contract.layers))
            ]

    def answer(self, layer: int, size: MessageSize, message: Arrays) -> Arrays:
        """Enqueues one layer on a message, an array a slot; the answer has the same layout."""
        return self._run(layer, size)(message)

    def _run(self, layer: int, size: MessageSize) -> Callable[[Arrays], Arrays]:
        """Returns `answer` for messages of one layer and size, with all lookups already made."""
        if (layer, size) not in self._runs:
            self._runs[layer, size] = self._bind(layer, size)
        return self._runs[layer, size]

    def _bind(self, layer: int, size: MessageSize) -> Callable[[Arrays], Arrays]:
        leaves, number = self._weights.blocks, self._bank.get(layer)
        compiled = hot_call(self._executables[self._specs[layer], size])
        if number is None:
            return lambda message: compiled(*message, *leaves[layer])
        assert self.slots is not None
        tables, counts = self.slots.tables, self.slots.counts

        def run(message: Arrays) -> Arrays:
            made = compiled(*message, tables[number], counts[number], *leaves[layer])
            counts[number] = made[-1]
            return made[:-1]

        return run

    def begin(self, step: "StepPlan") -> Stages:
        """Puts a step on a lane and returns its stages: dispatch, ffn and combine for each layer,
        then leave.

        Dispatch makes the message, ffn the answer, combine nothing, and leave a `Passed`.
        """
        send = self._send[step.domain, step.bucket.tokens]
        stages = self._layers[step.domain, step.bucket.tokens]
        results: Arrays = ()
        for layer in layers_of(self._config, step.bucket):
            receive, run = stages[layer]
            message = receive()
            yield message[0]
            results = run(message)
            del message
            yield results[0]
            send(*results)
            yield None
        yield Passed(results[0])
