"""An ffn worker in a runtime of its own: a message server, which knows neither plans nor requests.

Called by `serve --role ffn`. It may be killed at any time: attention workers send again what it has
not answered, to its successor or to a standby.
"""

import functools
import gc
import pkgutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.opening import open_folder
from jaxserve.checkpoint.peer import open_weights
from jaxserve.config.deployment import Deployment
from jaxserve.config.shrink import shrunk
from jaxserve.errors import ConfigError
from jaxserve.fleet import expert_answers
from jaxserve.fleet.membership import ProcessArguments
from jaxserve.fleet.process_end import alone
from jaxserve.fleet.role_runtime import RoleRuntime, deadlines_of, open_role
from jaxserve.fleet.signals import on_signals, tell_ready
from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.dispatch.ends import Arrays
from jaxserve.link.dispatch.message import message_formats
from jaxserve.link.remote.passes import POLICIES
from jaxserve.link.remote.server import MessageServer
from jaxserve.link.remote.work import MessageLanding, sizes_together
from jaxserve.link.session.listener import listen
from jaxserve.logs import announce
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.roles.capacity import available_memory
from jaxserve.roles.compilation import compile_steps
from jaxserve.roles.expert_balancer import make_balancer
from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.ffn import (
    FFNExecutables,
    FFNPrograms,
    FFNWeights,
    FFNWorker,
    build_ffn,
    ffn_executables,
)
from jaxserve.roles.ffn_bytes import ffn_bytes, most_messages
from jaxserve.roles.layout import token_sizes
from jaxserve.roles.weights import LeafSource, serve_weights

if TYPE_CHECKING:
    from jaxserve.fleet.ffn_group import FFNGroup
    from jaxserve.fleet.prepared import Prepared
    from jaxserve.link.weights.server import WeightsServer

    Joined = Callable[[ProcessArguments, Deployment], AbstractContextManager[FFNGroup | None]]

LOOK_SECONDS = 0.1
"""How often the main thread, which alone runs the handlers of signals, wakes up."""


def answer_messages(
    deployment: Deployment,
    process: ProcessArguments,
    address_given: str | None,
    on_turn: Callable[[], None] = lambda: None,
    joined: "Joined" = alone,
    prepared: "Prepared | None" = None,
) -> int:
    """Runs one process of an ffn worker in its own runtime, until a signal ends it.

    Args:
      address_given: where it listens; None: at its address in `link.addresses`.
      on_turn: called a few times a second once the process is ready.
      joined: initialises JAX together with all processes of the worker. A signal to one process
        ends the whole worker.
      prepared: work that this process did as a spare; None: it was none.
    """
    server = None

    def leave(name: str) -> bool:
        if server is not None and group is not None:
            group.leave(name)
        return server is not None

    signals = on_signals(leave)
    with joined(process, deployment) as group:
        own = process.worker * process.processes + process.process_id
        if not address_given and own >= len(deployment.link.addresses):
            raise ConfigError(
                f"--worker {process.worker} of {process.processes} processes: link.addresses has "
                f"{len(deployment.link.addresses)} addresses, none for process {process.process_id}"
            )
        address = address_given or deployment.link.addresses[own]
        if address in deployment.link.addresses:
            own = deployment.link.addresses.index(address)
        listen(address, process.token).close()  # refuses it before the model is loaded
        worker = own // process.processes
        server, work = open_ffn(deployment, process.token, address, group, worker, prepared)
        weights = None if group else work.serve_weights(process.token)
        gc.collect()
        gc.freeze()  # as engine/runtime.py does: a full collection would delay a message
        listening = server.start()
        if group is not None:
            group.begin(server, work.slots)
        announce("ready", {"role": "ffn", "link": listening})
        tell_ready()
        if work.experts is not None:
            work.experts.start()
        while not (group.ended.is_set() if group else signals):
            on_turn()
            time.sleep(LOOK_SECONDS)
            work.move_experts(server.passes.between)
        if work.experts is not None:
            work.experts.close()
        if weights is not None:
            weights.close()
        server.close()
    return 0


def open_ffn(
    deployment: Deployment,
    token: str,
    address: str,
    group: "FFNGroup | None" = None,
    worker: int = 0,
    prepared: "Prepared | None" = None,
) -> tuple[MessageServer, "FFNMessages"]:
    """Returns a warm ffn worker, and the server that answers messages at the address; `start` it.

    Args:
      worker: place of the ffn worker among those of `link.addresses`.
      prepared: as for `answer_messages`.

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
    """
    if deployment.ffn.shrink:
        deployment = shrunk(deployment, "ffn", jax.device_count())
    make = RoleRuntime.of
    if deployment.ffn.instances > 1:  # which few processes need
        runtime_of = pkgutil.resolve_name("jaxserve.fleet.ffn_shard:runtime_of")
        make = functools.partial(runtime_of, worker)
    role = open_role(deployment, "ffn", ffn_bytes, make, prepared)
    open_source = open_folder if group else functools.partial(open_weights, token=token)
    source = open_source(role.deployment, role.names)
    return message_server(role, role.deployment, source, token, address, group)


def message_server(
    role: RoleRuntime,
    deployment: Deployment,
    source: LeafSource,
    token: str,
    address: str,
    group: "FFNGroup | None" = None,
) -> tuple[MessageServer, "FFNMessages"]:
    """Returns the end of the link, and the ffn worker of this runtime behind it, loaded, compiled
    and run once.

    It is ready for as many domains as the deployment has, with its attention mesh and step sizes.
    For others it compiles when they join, unless it has several processes.
    """
    own = {role.role: role.mesh.local_devices}
    memory = available_memory(role.config, deployment, own, ffn_bytes)
    most = most_messages(role.config, deployment, memory[role.role])
    meshes = AbstractSubmeshes(deployment)
    templates = (role.templates or FFNTemplates)(role.config, deployment, meshes)
    built = build_ffn(templates, deployment, role.mesh, source, role.names, role.executables)
    policy = POLICIES[deployment.link.batching](most)
    log = expert_answers.PassLog(policy)
    work = FFNMessages(role, deployment, log, *built, group)
    sizes = [role.contract.size(tokens) for tokens in token_sizes(deployment)]
    together = sizes_together(sizes, min(policy.most, deployment.domains))
    work.compile([size for size in together if size.messages > 1])
    if group is not None:  # its processes run what all have compiled, and compile nothing later
        group.wait_warm_up(revision(deployment.model).digest)
        policy.most = group.least(min(policy.most, deployment.domains))
        together = sizes_together(sizes, policy.most)
    work.warm_up(together)
    server = MessageServer(
        address,
        role.hello,
        token,
        work,
        transport=deployment.link.transport,
        policy=policy,
        deadlines=deadlines_of(deployment),
        on_question=functools.partial(expert_answers.answer, work.experts, log),
        group=group,
    )
    return server, work


class FFNMessages:
    """An ffn worker as its message server knows it (`link.work.Work`), for any attention mesh.

    Attributes:
      experts: moves them, between messages: attention workers send logical ids and never know;
        None: the model has none, or another process of the worker decides.
      slots: the experts of this process; None: the model has none.
    """

    def __init__(
        self,
        role: RoleRuntime,
        deployment: Deployment,
        log: expert_answers.PassLog,
        programs: FFNPrograms,
        executables: FFNExecutables,
        weights: FFNWeights,
        slots: ExpertSlots | None,
        group: "FFNGroup | None" = None,
    ):
        self._role, self._deployment, self._group = role, deployment, group
        self._formats = message_formats(role.contract)
        self._landings = {
            role.contract.attention_devices: MessageLanding(programs.route, role.mesh)
        }
        self._templates = programs.templates
        self._padding = functools.cache(self._make_padding)
        self._worker = FFNWorker(programs, executables, weights, slots)
        self._log = log
        self.slots = slots
        self.experts = None
        if group is None or not group.process:
            counts = group.counts if group else None
            self.experts = make_balancer(programs.templates, deployment, slots, counts)

    def serve_weights(self, token: str) -> "WeightsServer | None":
        """Hands its weights out to workers that start, where the deployment says so."""
        return serve_weights(self._deployment, self._worker.held, self.slots, token)

    def move_experts(self, between_messages: Callable[[Callable[[], None]], float]) -> None:
        """Carries out the actions that the expert balancer has due, if any."""
        experts, slots = self.experts, self.slots
        if experts is None or slots is None or not (actions := experts.due()):
            return

        def carry_out() -> None:
            if self._group is not None:
                self._group.order(actions=actions)
            for action in actions:
                slots.carry_out(action)

        between_messages(carry_out)
        experts.carried_out(actions)

    def ready(self, sizes: Sequence[MessageSize]) -> bool:
        """Whether messages of these sizes can be run, without compiling anything."""
        return all(map(self._worker.has, sizes))

    def compile(self, sizes: Sequence[MessageSize]) -> None:
        """Compiles the programs for messages of these sizes."""
        for pieces, messages in {(size.pieces, size.messages) for size in sizes}:
            contract = self._role.contract.of_pieces(pieces, messages)
            programs = FFNPrograms(self._templates, self._deployment, self._role.mesh, contract)
            rows = [size.rows for size in sizes if size[::2] == (pieces, messages)]
            self._worker.add(compile_steps(ffn_executables, programs, rows))
            if messages == 1:
                self._landings[pieces] = MessageLanding(programs.route, self._role.mesh)

    def warm_up(self, sizes: Sequence[MessageSize]) -> None:
        """Runs the programs of each size once, on padding."""
        for size in sizes:
            one = size._replace(messages=1)
            for kind in self._formats:
                layer, padding = self._role.contract.layers.index(kind), self._padding(kind, one)
                jax.block_until_ready(self._answer(kind, layer, one, [padding] * size.messages))

    def shapes(self, kind: str, size: MessageSize) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of a message's pieces."""
        message = self._formats[kind]
        return [jax.ShapeDtypeStruct((size.rows, message.width), message.word)] * size.pieces

    def padding(self, kind: str) -> np.ndarray:
        """Returns a row that goes to no expert and counts for none."""
        return self._formats[kind].padding(1)

    def holders(self, pieces: int) -> list[int]:
        """Returns the process at which each piece lands."""
        return self._landings[pieces].holders

    def land(self, kind: str, size: MessageSize, pieces: Sequence[np.ndarray]) -> Arrays:
        """Puts the pieces of this process on its part of the ffn mesh."""
        message = self._formats[kind]
        shape = size.rows, message.width
        return self._landings[size.pieces].land(pieces, shape, np.dtype(message.word))

    def run(
        self, kind: str, layer: int, size: MessageSize, messages: Sequence[Arrays]
    ) -> list[list[jax.Array]]:
        """Enqueues one pass over messages of one size and returns the pieces of their answers."""
        answers, rows = self._answer(kind, layer, size, messages), size.pieces * size.rows
        self._log.add(layer, len(messages), len(messages) * rows, next(iter(answers[0]), None))
        return answers

    def _answer(
        self, kind: str, layer: int, size: MessageSize, messages: Sequence[Arrays]
    ) -> list[list[jax.Array]]:
        """Runs messages side by side; padding fills their number up to a power of two."""
        landing, count = self._landings[size.pieces], 1 << (len(messages) - 1).bit_length()
        slots = [slot for message in messages for slot in message]
        each = len(slots) // len(messages)
        if count > len(messages):
            slots += [*self._padding(kind, size)] * (count - len(messages))
        made = self._worker.answer(layer, size._replace(messages=count), slots)
        return [landing.pieces(made[at : at + each]) for at in range(0, each * len(messages), each)]

    def _make_padding(self, kind: str, size: MessageSize) -> Arrays:
        """Makes a message whose rows go to no expert and count for none."""
        rows = self._formats[kind].padding(size.rows)
        return self.land(kind, size, [rows] * self.holders(size.pieces).count(jax.process_index()))
