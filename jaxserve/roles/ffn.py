"""The ffn worker: dense FFN, shared and routed experts. Stateless but for its weights, and for
where experts are and what they got (`expert_slots.py`).

Inside one runtime its runner has it take part in every lane's step, in the total order of stages
(`cell.py`); for attention workers of other runtimes it answers messages as they come (`answer`). It
knows a step's lane and size, never its sequences, pages or plans.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFNKind
from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.dispatch.ends import Arrays, FFNEnd
from jaxserve.mesh import ffn_rules
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.capacity import token_sizes
from jaxserve.roles.compilation import Get, ProgramKey, compile_steps, hot_call
from jaxserve.roles.expert_reader import ExpertReader
from jaxserve.roles.expert_slots import ExpertSlots, make_slots, slot_programs
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.ffn_weights import FFNWeights
from jaxserve.roles.layout import Bucket
from jaxserve.roles.weights import HeldBlock, LeafSource, load_progress
from jaxserve.roles.worker import Passed, Stages, Step, layers_of

FFNExecutables = dict[tuple[FFNKind, MessageSize], jax.stages.Compiled]
"""By kind of layer and size of the message."""


def ffn_executables(programs: FFNPrograms, token_sizes: Sequence[int], get: Get) -> FFNExecutables:
    """What `FFNWorker` runs for steps of these numbers of tokens a DP group."""
    return {
        (kind, programs.contract.size(tokens)): get(
            ProgramKey("ffn", kind, Bucket(tokens, 1)), programs.ffn, tokens, kind
        )
        for tokens in sorted(set(token_sizes))
        for kind in programs.formats
    }


def build_ffn(
    templates: ModelTemplates,
    deployment: Deployment,
    mesh: Mesh,
    source: LeafSource,
    names: CheckpointNames,
) -> tuple[FFNPrograms, FFNExecutables, FFNWeights, ExpertSlots | None]:
    """Loads and compiles: what `FFNWorker` takes."""
    programs, sizes = FFNPrograms(templates, deployment, mesh), token_sizes(deployment)
    with load_progress(source, templates.config.all_layers) as counted:
        weights = FFNWeights(counted, names, programs)
    moving = slot_programs(programs.experts, programs.banks)
    executables, compiled = compile_steps(ffn_executables, programs, sizes, others=moving)
    reader = ExpertReader(templates, deployment.experts, names, source, mesh, ffn_rules(mesh))
    slots = make_slots(programs.experts, programs.banks, weights, compiled, reader)
    return programs, executables, weights, slots


class _Layer(NamedTuple):
    """What the stages of one layer run, looked up once."""

    receive: Callable[[], Arrays]
    run: Callable[[Arrays], Arrays]


class FFNWorker:
    """Runs the ffn stages of all lanes, or answers messages.

    Args:
      slots: where its experts are; None: it has none.
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
        self._executables, self._weights = dict(executables), weights
        self._bank = {bank.layers[0]: number for number, bank in enumerate(programs.banks)}
        self._layers: dict[tuple[int, int], list[_Layer]] = {}
        self._runs: dict[tuple[int, MessageSize], Callable[[Arrays], Arrays]] = {}
        self._send: dict[tuple[int, int], Callable[..., object]] = {}

    def held(self) -> list[HeldBlock]:
        """What of the checkpoint is here."""
        return self._weights.held()

    def add(self, executables: FFNExecutables) -> None:
        """Takes in what messages of further sizes run."""
        self._executables |= executables

    def has(self, size: MessageSize) -> bool:
        """Whether `answer` takes messages of this size."""
        return all((kind, size) in self._executables for kind in set(self._contract.layers))

    def attach(self, link: FFNEnd, token_sizes: Sequence[int], domain: int = 0) -> None:
        """Makes this end of a link the one that a domain's steps of so many tokens a DP group
        receive from and send to."""
        for tokens in token_sizes:
            size = self._contract.size(tokens)
            self._send[domain, tokens] = link.sender(tokens)
            self._layers[domain, tokens] = [
                _Layer(link.receiver(layer, tokens), self._run(layer, size))
                for layer in range(len(self._contract.layers))
            ]

    def answer(self, layer: int, size: MessageSize, message: Arrays) -> Arrays:
        """Enqueues one layer on a message, one array a slot; the answer is laid out likewise."""
        return self._run(layer, size)(message)

    def _run(self, layer: int, size: MessageSize) -> Callable[[Arrays], Arrays]:
        """`answer` for messages of one layer and size, with everything looked up that stays."""
        if (layer, size) not in self._runs:
            self._runs[layer, size] = self._bind(layer, size)
        return self._runs[layer, size]

    def _bind(self, layer: int, size: MessageSize) -> Callable[[Arrays], Arrays]:
        leaves, number = self._weights.layers, self._bank.get(layer)
        if number is None:
            dense = hot_call(self._executables["dense", size])
            return lambda message: dense(*message, *leaves[layer])
        assert self.slots is not None
        moe = hot_call(self._executables["moe", size])
        tables, counts = self.slots.tables, self.slots.counts

        def run(message: Arrays) -> Arrays:
            made = moe(*message, tables[number], counts[number], *leaves[layer])
            counts[number] = made[-1]
            return made[:-1]

        return run

    def begin(self, step: Step) -> Stages:
        """Puts a step on a lane. Its stages: for each layer dispatch, ffn and combine, and leave at
        the end.

        They make the message in dispatch, the answer in ffn, nothing in combine, and a `Passed` in
        leave.
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
